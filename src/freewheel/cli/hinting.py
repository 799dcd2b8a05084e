# SPDX-License-Identifier: Apache-2.0
"""Commands that know what other engines and errors call their options, and the heading of each."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperOption

from freewheel.cli.naming import Option, as_options, by_field
from freewheel.cli.panels import MANY, panel_of, place_of
from freewheel.cli.terminal import fail
from freewheel.errors import CheckpointError, ConfigError, RequestError
from freewheel.spec.elsewhere import option_hint

UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])
"""Of the click that typer uses, which may be its own."""


_LINE_END = re.compile(r"(?<!\n)\n[ ]*(?!\n)(?=\S)")

_SHORT = re.compile(r"-[a-zA-Z]")

_EXTRA = re.compile(r"unexpected extra arguments?(?:\(s\))? \((.*)\)")

BAD_INPUT = 2
"""Exit code of a command that was given what it cannot take."""


class Hinting(TyperCommand):
    """Says of options that it lacks which of its own are meant, or why there is none, and of one
    that is refused its name here.

    If it has many, its help has them under headings (`panels`).
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # a line's end within a paragraph of a docstring would be one on the terminal, too
        self.help = _LINE_END.sub(" ", self.help) if self.help else self.help
        options = [one for one in self.params if isinstance(one, TyperOption) and one.name]
        if len(options) < MANY:
            return
        for option in options:
            option.rich_help_panel = panel_of(str(option.name))
        options.sort(key=lambda option: place_of(str(option.name)))
        self.params = [one for one in self.params if one not in options] + [*options]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            option = _whole(vars(error).get("option_name"), given)
            if option is None:
                switch = self._switch_with_value(str(error), given)
                if not switch:
                    raise
                message = f"{switch} is a switch, which takes no value"
                raise UsageError(message, ctx=ctx) from error
            unknown = self._unknown(given)
            if option not in unknown:
                raise
            hints = [(one, self._hint(ctx, one, given)) for one in unknown]
            if not any(hint for _, hint in hints) and len(hints) == 1:
                raise
            lines = [f"No such option: {one}" + f"; {hint}" * bool(hint) for one, hint in hints]
            raise UsageError("\n".join(lines), ctx=ctx) from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (CheckpointError, ConfigError, RequestError) as error:
            fail(as_options(str(error), self.by_field()))
            raise typer.Exit(BAD_INPUT) from error

    def by_field(self) -> dict[str, Option]:
        """Its options by the fields that errors name."""
        return by_field(
            (str(one.name), Option(_longest(one.opts), _longest(one.secondary_opts)))
            for one in self.params
            if isinstance(one, TyperOption) and one.name
        )

    def _switch_with_value(self, message: str, given: list[str]) -> str:
        """The switch behind which a word stands that `message` is about; empty if none does."""
        extra = _EXTRA.search(message)
        words = [] if extra is None else extra[1].split()
        switches = {
            name
            for one in self.params
            if isinstance(one, TyperOption) and one.is_flag
            for name in (*one.opts, *one.secondary_opts)
        }
        return next((a for a, b in pairwise(given) if a in switches and b in words), "")

    def _unknown(self, given: list[str]) -> list[str]:
        """All options in a command line that are none of its own, each once and as it was given.

        A word behind an option that takes a value is that value.
        """
        own = {
            name: one.is_flag
            for one in self.params
            if isinstance(one, TyperOption)
            for name in (*one.opts, *one.secondary_opts)
        } | {"--help": True}
        found, words = list[str](), iter(given)
        for word in words:
            name, equals, _ = word.partition("=")
            if word == "--":
                break
            if name in own:
                if not own[name] and not equals:
                    next(words, None)
            elif name.startswith("--") or (_SHORT.match(word) and word[:2] not in own):
                found.append(name)
        return list(dict.fromkeys(found))

    def _hint(self, ctx: Any, option: str, given: list[str]) -> str:
        arguments = {one.name for one in self.params if one.param_type_name == "argument"}
        value = _value_of(option, given)
        standing = {
            name: f"{ctx.command_path} {value or name.upper()}" for name in arguments if name
        }
        return option_hint(
            option, {name: one.on for name, one in self.by_field().items()}, standing
        )


def _whole(option: object, given: list[str]) -> str | None:
    """An unknown option as it was given: of `-tp`, only `-t` is named."""
    if not isinstance(option, str):
        return None
    if option.startswith("--"):
        return option
    return next((word for word in given if word.startswith(option)), option)


def _longest(written: list[str]) -> str:
    return max(written, key=len, default="")


def _value_of(option: str, given: list[str]) -> str:
    """What was given with an option; empty if nothing was."""
    for place, word in enumerate(given):
        name, _, value = word.partition("=")
        if name == option:
            following = given[place + 1 : place + 2]
            return value or next((one for one in following if not one.startswith("-")), "")
    return ""
