# SPDX-License-Identifier: Apache-2.0
"""Commands that know what other engines call their options, and under which heading each stands."""

from __future__ import annotations

from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperOption

from freewheel.cli.panels import MANY, panel_of, place_of
from freewheel.spec.elsewhere import option_hint

UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])
"""Of the click that typer uses, which may be its own."""


class Hinting(TyperCommand):
    """Says of an option that it lacks which of its own is meant, or why there is none.

    If it has many, its help has them under headings (`panels`).
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
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
            option = vars(error).get("option_name")
            hint = self._hint(ctx, option, given) if isinstance(option, str) else ""
            if not hint:
                raise
            raise UsageError(f"No such option: {option}; {hint}", ctx=ctx) from error

    def _hint(self, ctx: Any, option: str, given: list[str]) -> str:
        options = {one.name for one in self.params if one.param_type_name == "option"}
        arguments = {one.name for one in self.params if one.param_type_name == "argument"}
        value = _value_of(option, given)
        standing = {
            name: f"{ctx.command_path} {value or name.upper()}" for name in arguments if name
        }
        return option_hint(option, sorted(filter(None, options)), standing)


def _value_of(option: str, given: list[str]) -> str:
    """What was given with an option; empty if nothing was."""
    for place, word in enumerate(given):
        name, _, value = word.partition("=")
        if name == option:
            following = given[place + 1 : place + 2]
            return value or next((one for one in following if not one.startswith("-")), "")
    return ""
