# SPDX-License-Identifier: Apache-2.0
"""`freewheel convert`: a model's folder again, with weights in another precision."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freewheel.cli import options as o
from freewheel.cli.later import Later
from freewheel.cli.terminal import answers, loading, write_json
from freewheel.config import check_conversion

if TYPE_CHECKING:
    from freewheel import engine
else:
    engine = Later("freewheel.engine")


def convert(
    model: o.Model,
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not be there yet.")],
    to: Annotated[str, typer.Option(help="fp8, mxfp4 (routed experts; the rest fp8) or bf16.")],
    json: o.Json = False,
) -> None:
    """Write MODEL again with weights in another precision. OUT appears whole or not at all."""
    check_conversion(model, out, to)
    with loading(model, "converting") as progress:
        notes = engine.convert(model, out, to, progress)
    if json:
        write_json({"out": str(out), "to": to, "notes": notes})
        return
    for note in notes:
        answers.print(note)
    answers.print(f"written to {out}")
