# SPDX-License-Identifier: Apache-2.0
"""`freewheel convert`: a model's folder again, with weights in another precision."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from freewheel.cli import options as o
from freewheel.cli.terminal import answers, loading, write_json
from freewheel.engine import convert as run_convert


def convert(
    model: o.Model,
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not be there yet.")],
    to: Annotated[str, typer.Option(help="fp8, mxfp4 (routed experts; the rest fp8) or bf16.")],
    json: o.Json = False,
) -> None:
    """Write MODEL again with weights in another precision. OUT appears whole or not at all."""
    with loading(model, "converting") as progress:
        notes = run_convert(model, out, to, progress)
    if json:
        write_json({"out": str(out), "to": to, "notes": notes})
        return
    for note in notes:
        answers.print(note)
    answers.print(f"written to {out}")
