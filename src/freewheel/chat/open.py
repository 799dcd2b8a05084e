# SPDX-License-Identifier: Apache-2.0
"""Which encoding a model has, by its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from freewheel.chat import deepseek_v32
from freewheel.chat.continued import Render, continuing
from freewheel.chat.dsml import DSML, DsmlParser
from freewheel.chat.glm import CALL, KEY, TOKENS, GlmParser
from freewheel.chat.markup import Parser
from freewheel.chat.pieces import GOES_ON, NO_THINK, THINK, Piece, Vocabulary, ids_of
from freewheel.chat.renderer import Renderer
from freewheel.chat.turns import Ask, Message, Tool, checked, open_turn
from freewheel.errors import CheckpointError, RequestError, UnsupportedModel

MAX_TEMPLATE = 1 << 20
"""Bytes of a chat template."""

PLAIN = Ask()


@dataclass(frozen=True)
class Markup:
    """How a model writes tool calls. `kind`: "dsml" or "glm"; `block`: what DSML calls its block.

    `tokens`: control tokens that are part of it, as far as the tokenizer has them.
    """

    kind: str
    block: str
    tokens: tuple[str, ...]

    def parser(
        self, tools: Sequence[Tool], at_most: int | None = None, only_calls: bool = False
    ) -> Parser:
        """For one answer, which with `only_calls` is held to calls."""
        if self.kind == "glm":
            return GlmParser(tools, at_most, only_calls)
        return DsmlParser(self.block, tools, at_most, only_calls)


V32_MARKUP = Markup("dsml", deepseek_v32.BLOCK, (DSML,))
V4_MARKUP = Markup("dsml", "tool_calls", (DSML,))
GLM_MARKUP = Markup("glm", "", TOKENS)


@dataclass(frozen=True)
class Prompt:
    """Ids that ask for the next turn.

    `end_of_thought`: the token that ends thinking, if the prompt opens thinking or leaves it to the
    model; in the latter case `start_of_thought` opens it, as the first token of the answer. A
    prompt that goes on with a turn's text has both behind it.
    """

    ids: list[int]
    end_of_thought: int | None = None
    start_of_thought: int | None = None


class Chat:
    """One model's way of writing conversations."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        render: Render,
        markup: Markup | None,
        renderer: Renderer | None = None,
    ) -> None:
        self._vocabulary, self._render, self._renderer = vocabulary, render, renderer
        self.markup = markup
        """How it writes tool calls; None if that is not known."""

    @property
    def in_process(self) -> bool:
        """Rendering waits for no other process."""
        return self._renderer is None

    def prompt(self, messages: Sequence[Message], ask: Ask = PLAIN) -> Prompt:
        """The prompt for the next turn, or for the rest of the last (`ask.continues`).

        May take a while: a process renders some of them. Raises RequestError for turns or wishes
        that the encoding does not have, UnsupportedModel if the tokenizer lacks a control token or
        a library is not installed.
        """
        if ask.tools and self.markup is None:
            raise RequestError("tools", "this model's chat template has no markup known here")
        ids = ids_of(self._render(messages, ask), self._vocabulary)
        start, end = map(self._vocabulary.token_id, (THINK, NO_THINK))
        if start is None or end is None or ids[-1:] == [end]:
            return Prompt(ids)
        if ask.continues:
            marks = [one for one in ids if one in (start, end)]
            return Prompt(ids, end) if marks[-1:] == [start] else Prompt(ids)
        return Prompt(ids, end, None if ids[-1:] == [start] else start)

    def parser(
        self, tools: Sequence[Tool], at_most: int | None = None, only_calls: bool = False
    ) -> Parser | None:
        """What reads an answer that may, or must, call `tools`; None if it may call nothing."""
        return self.markup.parser(tools, at_most, only_calls) if tools and self.markup else None

    @property
    def markup_ids(self) -> frozenset[int]:
        """Control tokens whose text a parser must see."""
        found = map(self._vocabulary.token_id, self.markup.tokens if self.markup else ())
        return frozenset(one for one in found if one is not None)

    def close(self) -> None:
        """End the process that renders, if there is one."""
        if self._renderer is not None:
            self._renderer.close()


def open_chat(folder: Path, family: str, vocabulary: Vocabulary) -> Chat:
    """The encoding of the model in `folder`: its chat template, or else its family's own.

    Raises UnsupportedModel if it has neither, CheckpointError for a template that cannot be read.
    """
    config = _settings(folder / "tokenizer_config.json")
    sources = _templates(folder, config)
    if sources:
        return _by_template(sources, config, vocabulary)
    if family == "deepseek_v32":
        return Chat(vocabulary, continuing(deepseek_v32.render), V32_MARKUP)
    if family == "deepseek_v4":
        renderer = Renderer({"kind": "deepseek_v4"})
        render = continuing(partial(_by_recipe, renderer))
        return Chat(vocabulary, render, V4_MARKUP, renderer)
    raise UnsupportedModel(
        f"chat: {folder} has no chat template (chat_template.jinja, or chat_template in its "
        f"tokenizer_config.json), and no encoding is built in for {family!r}; add the template, "
        f"or render prompts yourself and use `generate`"
    )


def _by_recipe(renderer: Renderer, messages: Sequence[Message], ask: Ask) -> list[Piece]:
    if ask.keep_thoughts is not None:
        raise RequestError(
            "chat_template_kwargs", "this model's encoding keeps all thoughts if there are tools"
        )
    return renderer.render(
        {
            "messages": [asdict(turn) for turn in checked(messages)],
            "thinking": ask.thinking,
            "effort": ask.effort,
            "tools": [tool.as_function() for tool in ask.tools],
        }
    )


def _by_template(
    sources: Mapping[str, str], config: Mapping[str, Any], vocabulary: Vocabulary
) -> Chat:
    text = "".join(sources.values())
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    marks = {name: _token(config.get(name)) for name in names}
    given = {name: mark for name, mark in marks.items() if mark is not None}
    begins = {
        "kind": "template",
        "sources": dict(sources),
        "control_tokens": list(vocabulary.control_tokens),
    }
    renderer = Renderer(begins)

    def render(messages: Sequence[Message], ask: Ask) -> list[Piece]:
        return renderer.render(given | _for_template(messages, ask, text))

    return Chat(vocabulary, render, _markup_in(text), renderer)


def _for_template(messages: Sequence[Message], ask: Ask, template: str) -> dict[str, Any]:
    """What a template is given, by the names that transformers uses."""
    last = [open_turn(messages)] if ask.continues else []
    turns = [*checked(messages[: len(messages) - len(last)]), *last]
    found: dict[str, Any] = {
        "messages": [_turn(one) for one in turns],
        "add_generation_prompt": not ask.continues,
        "enable_thinking": ask.thinking,
        "thinking": ask.thinking,
    }
    if ask.continues:
        found[GOES_ON] = True
    if ask.tools:
        tools = [tool.as_function() for tool in ask.tools]
        found["tools"] = [{"type": "function", "function": tool} for tool in tools]
    if ask.effort is not None:
        found["reasoning_effort"] = ask.effort
    if ask.keep_thoughts is not None:
        if "clear_thinking" not in template:
            raise RequestError(
                "chat_template_kwargs", "this model's template decides which thoughts it keeps"
            )
        found["clear_thinking"] = not ask.keep_thoughts
    return found


def _turn(turn: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.reasoning is not None:
        found["reasoning_content"] = turn.reasoning
    if turn.call_id is not None:
        found["tool_call_id"] = turn.call_id
    if turn.calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.values()},
            }
            for call in turn.calls
        ]
    return found


def _markup_in(template: str) -> Markup | None:
    """The markup that a template writes itself."""
    if CALL in template and KEY in template:
        return GLM_MARKUP
    for markup in (V32_MARKUP, V4_MARKUP):
        if DSML in template and markup.block in template:
            return markup
    return None


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Its templates by name; a file of its own wins."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": _read(path)}
    found = config.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    if not found:
        return {}
    try:
        named = {str(one["name"]): str(one["template"]) for one in found}
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{folder}/tokenizer_config.json: chat_template: {error}") from error
    if "default" not in named:
        raise CheckpointError(f"{folder}/tokenizer_config.json: chat_template has no default")
    return named


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TEMPLATE + 1)
        if len(raw) > MAX_TEMPLATE:
            raise CheckpointError(f"{path}: longer than {MAX_TEMPLATE} bytes")
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _token(value: object) -> str | None:
    """A special token, spelt out or as an object."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None
