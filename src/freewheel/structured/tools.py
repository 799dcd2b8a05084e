# SPDX-License-Identifier: Apache-2.0
"""Grammars of tool calls: which calls are valid, in the way that a family of models writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from freewheel.errors import RequestError
from freewheel.structured.tool_rules import ToolRules
from freewheel.structured.tree import Tree

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Tool:
    """A function that may be called. `parameters`: JSON schema of its arguments' object, or any."""

    name: str
    parameters: Schema | None = None


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written: `begin`, calls with `between` them, `end`.

    A call is `call_begin`, its name, `name_end`, its arguments, `call_end`. Arguments are one JSON
    object; or, with a `key_begin`, for each of them `key_begin`, its name, `key_end_text` and a
    string as it is, or `key_end_json` and any other value as JSON, then `value_end`. Texts of
    control tokens stand for these tokens.
    """

    begin: str
    end: str
    call_begin: str
    name_end: str
    call_end: str
    between: str = ""
    key_begin: str = ""
    key_end_text: str = ""
    key_end_json: str = ""
    value_end: str = ""

    @property
    def opening(self) -> str:
        """What tells a call from other text: the first line of what stands before a name."""
        return (self.begin or self.call_begin).split("\n", 1)[0]


def _dsml(block: str) -> ToolFormat:
    return ToolFormat(
        begin=f"<｜DSML｜{block}>\n",
        end=f"</｜DSML｜{block}>",
        call_begin='<｜DSML｜invoke name="',
        name_end='">\n',
        call_end="</｜DSML｜invoke>\n",
        key_begin='<｜DSML｜parameter name="',
        key_end_text='" string="true">',
        key_end_json='" string="false">',
        value_end="</｜DSML｜parameter>\n",
    )


DSML_V32 = _dsml("function_calls")
DSML_V4 = _dsml("tool_calls")
GLM = ToolFormat(
    begin="",
    end="",
    call_begin="<tool_call>",
    name_end="",
    call_end="</tool_call>",
    key_begin="<arg_key>",
    key_end_text="</arg_key><arg_value>",
    key_end_json="</arg_key><arg_value>",
    value_end="</arg_value>",
)
JSON_CALLS = ToolFormat(
    begin="",
    end="",
    call_begin='<tool_call>\n{"name": "',
    name_end='", "arguments": ',
    call_end="}\n</tool_call>",
    between="\n",
)


@dataclass(frozen=True)
class ToolGrammar:
    """`calls` and `trigger` are SamplingParams' `calls` and `grammar_trigger`."""

    calls: str
    trigger: int | None


def tool_grammar(
    tools: Sequence[Tool],
    tool_choice: str,
    fmt: ToolFormat,
    control_tokens: Mapping[str, int],
    *,
    parallel: bool = True,
    whole: bool = False,
) -> ToolGrammar | None:
    """What an answer must be for its calls to be valid; None if nothing is asked of it.

    `tool_choice`: "none"; "auto", the model may call; "required", it must; "function:NAME", it must
    call that one. `control_tokens`: ids by their text. `parallel`: more than one call may be made.
    With "auto" the grammar begins behind the first control token of the format's opening, and all
    before it is free. If it has none, or if `whole`, the grammar describes the text before the
    calls too. Raises RequestError, naming tools or tool_choice.
    """
    if tool_choice == "none" or (tool_choice == "auto" and not tools):
        return None
    rules, chosen = ToolRules(fmt, control_tokens), _chosen(tools, tool_choice)
    for index, tool in enumerate(chosen):
        rules.add(index, tool)
    rules.close(len(chosen))
    trigger = None
    if tool_choice != "auto":
        start = rules.at_once(parallel)
    elif whole or rules.mark is None:
        start = rules.behind_text(parallel)
    else:
        start, trigger = rules.behind_mark(parallel), rules.mark
    return ToolGrammar(Tree(start, rules.rules).text(), trigger)


def _chosen(tools: Sequence[Tool], choice: str) -> list[Tool]:
    names = [tool.name for tool in tools]
    for name in names:
        if not _NAME.fullmatch(name):
            raise RequestError("tools", f"has a name {name!r}; use letters, digits, _, - and .")
        if names.count(name) > 1:
            raise RequestError("tools", f"names {name!r} more than once")
    if choice in ("auto", "required"):
        if not tools:
            raise RequestError("tools", "is empty, but a call is required")
        return list(tools)
    kind, _, name = choice.partition(":")
    if kind != "function":
        raise RequestError("tool_choice", f"must be none, auto, required or a tool, got {choice!r}")
    if name not in names:
        raise RequestError("tool_choice", f"names {name!r}, which is not among the tools")
    return [tools[names.index(name)]]
