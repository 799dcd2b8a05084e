# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2's encoding, built in: the family publishes one instead of a template.

    <begin>{system}<User>{question}<Assistant></think>{answer}<end>...

The mark behind `<Assistant>` opens thinking or ends it. Thoughts are kept behind the last question
only. Tools stand behind the system turn, calls are DSML, results a list behind the turn with the
calls. The wording is the model card's (its `encoding` folder): it is what the model was taught.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from freewheel.chat.pieces import NO_THINK, THINK, Piece
from freewheel.chat.turns import Ask, Message, Tool, ToolCall, alternating
from freewheel.errors import RequestError

BEGIN = "<｜begin▁of▁sentence｜>"
END = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
DSML = "｜DSML｜"
BLOCK = "function_calls"

_MARKS = re.compile(f"({DSML}|{THINK}|{NO_THINK})")

_TOOLS = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part \
of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists \
and objects should use JSON format. The "string" attribute should be set to "true" for string type \
parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider \
outputting a thinking block. Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
"""
_TOOLS_END = "\n</functions>\n"


def render(messages: Sequence[Message], ask: Ask) -> list[Piece]:
    """Pieces of the prompt that asks for the next turn. Raises RequestError for bad turns."""
    if ask.keep_thoughts is not None:
        raise RequestError(
            "chat_template_kwargs",
            "this model's encoding keeps thoughts behind the last question and no others",
        )
    turns = alternating(messages)
    if ask.tools and turns[0].role != "system":
        turns.insert(0, Message("system", ""))
    last = max((at for at, turn in enumerate(turns) if turn.role == "user"), default=-1)
    pieces: list[Piece] = [(BEGIN, True)]
    for at, turn in enumerate(turns):
        thinks = ask.thinking and at >= last
        if turn.role == "system":
            pieces += [(turn.content, False), *_tools(ask.tools)]
        elif turn.role == "user":
            pieces += [(USER, True), (turn.content, False), (ASSISTANT, True), _opening(thinks)]
        elif turn.role == "assistant":
            pieces += _answer(turn, ask.thinking and at > last)
        else:
            before = turns[at - 1].role == "tool"
            after = at + 1 < len(turns) and turns[at + 1].role == "tool"
            pieces += _result(turn, first=not before, final=not after, thinks=thinks)
    return pieces


def _opening(thinks: bool) -> Piece:
    return (THINK if thinks else NO_THINK, True)


def _answer(turn: Message, thinks: bool) -> list[Piece]:
    pieces: list[Piece] = []
    if thinks:
        pieces += [(turn.reasoning or "", False), (NO_THINK, True)]
    pieces.append((turn.content, False))
    if turn.calls:
        pieces += [("\n\n", False), *_tag("", BLOCK), ("\n", False)]
        for call in turn.calls:
            pieces += [*_call(call), ("\n", False)]
        pieces += _tag("/", BLOCK)
    return [*pieces, (END, True)]


def _call(call: ToolCall) -> list[Piece]:
    pieces: list[Piece] = [*_tag("", f'invoke name="{call.name}"'), ("\n", False)]
    for name, value in call.values().items():
        is_text = isinstance(value, str)
        opening = f'parameter name="{name}" string="{"true" if is_text else "false"}"'
        pieces += [*_tag("", opening), (value if is_text else _json(value), False)]
        pieces += [*_tag("/", "parameter"), ("\n", False)]
    if not call.values():
        pieces.append(("\n", False))
    return [*pieces, *_tag("/", "invoke")]


def _tag(slash: str, rest: str) -> list[Piece]:
    return [(f"<{slash}", False), (DSML, True), (f"{rest}>", False)]


def _result(turn: Message, first: bool, final: bool, thinks: bool) -> list[Piece]:
    opening = "\n\n<function_results>" if first else ""
    pieces: list[Piece] = [(f"{opening}\n<result>{turn.content}</result>", False)]
    if final:
        pieces += [("\n</function_results>\n\n", False), _opening(thinks)]
    return pieces


def _tools(tools: Sequence[Tool]) -> list[Piece]:
    if not tools:
        return []
    known = "\n".join(_json(tool.as_function()) for tool in tools)
    words = [(part, bool(_MARKS.fullmatch(part))) for part in _MARKS.split(f"\n\n{_TOOLS}")]
    return [*words, (known + _TOOLS_END, False)]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
