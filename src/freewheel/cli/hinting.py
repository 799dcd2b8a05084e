# SPDX-License-Identifier: Apache-2.0
"""Commands that know the names which other engines have for their options."""

from __future__ import annotations

from typing import Any, cast

import typer
from typer.core import TyperCommand

from freewheel.spec.elsewhere import option_hint

_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])
"""Of the click that typer uses, which may be its own."""


class Hinting(TyperCommand):
    """Says of an option that it lacks which of its own is meant, or why there is none."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            option = vars(error).get("option_name")
            known = [one.name for one in self.params if one.name is not None]
            hint = option_hint(option, known) if isinstance(option, str) else ""
            if not hint:
                raise
            raise _UsageError(f"No such option: {option}; {hint}", ctx=ctx) from error
