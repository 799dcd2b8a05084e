# SPDX-License-Identifier: Apache-2.0
"""`freewheel plan`: what so many cards would make of a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from freewheel.cli import options as o
from freewheel.cli.later import Later
from freewheel.cli.terminal import answers, write_json

if TYPE_CHECKING:
    from freewheel import engine
    from freewheel.engine import GpuPlan
else:
    engine = Later("freewheel.engine")


def plan(
    model: Annotated[str, typer.Argument(help="A folder, a shipped model, or a config.json.")],
    gpus: Annotated[int, typer.Option(help="Cards that share every layer.")] = 1,
    batch: Annotated[str, typer.Option(help="Requests decoded together; a line each.")] = "1,8,32",
    context: Annotated[int, typer.Option(help="Tokens behind each request.")] = 8192,
    speculate: Annotated[int, typer.Option(help="Drafts of every round.")] = 3,
    dp: Annotated[int, typer.Option(help="Copies of all but the experts, on equal parts.")] = 1,
    ep: o.Ep = False,
    card_gb: Annotated[float, typer.Option(help="Memory of a card, in 10^9 bytes.")] = 141.0,
    json: o.Json = False,
) -> None:
    """Print weights per card, tokens of cache, and the least time a round can take.

    By calculation, from config.json alone: a floor of bytes and operations on an H200, not a
    forecast. What ranks exchange is assumed, and given apart.
    """
    found = engine.plan_gpus(
        model,
        gpus,
        batches=o.numbers("batch", batch),
        context=context,
        speculate=speculate,
        dp=dp,
        ep=ep,
        card_bytes=card_gb * 1e9,
    )
    if json:
        write_json(asdict(found) | {"fits": found.fits})
        return
    for line in plan_lines(found, gpus, card_gb):
        answers.print(line)


def plan_lines(found: GpuPlan, gpus: int, card_gb: float) -> list[str]:
    """What a person reads of a plan."""
    mesh = found.mesh
    experts = "experts dealt out whole" if mesh.experts_whole else "experts cut by width"
    shape = f"tp {mesh.tp}" + (f", dp {mesh.dp}" if mesh.dp > 1 else "")
    of_copy = " of its copy" if mesh.dp > 1 else ""
    lines = [
        f"{found.family} on {gpus} x {card_gb:g} GB, {shape}" + (f", {experts}" * (gpus > 1)),
        f"weights per card   {found.weight_bytes / 1e9:8.1f} GB",
        f"cache per token    {found.token_bytes / 1e3:8.1f} kB on every card{of_copy}, bfloat16",
    ]
    if found.request_bytes:
        lines.append(f"cache per request  {found.request_bytes / 1e6:8.1f} MB besides")
    if not found.fits:
        return [*lines, "does not fit: more cards, or a card of more memory"]
    lines.append(f"tokens of cache    {found.kv_tokens:8d}")
    lines.append(f"a round with {found.depth} drafts at {found.context} tokens, at least:")
    for one in found.rounds:
        lines.append(
            f"  batch {one.batch:4d}  {one.floor_ms:7.2f} ms  + {one.exchange_ms:5.2f} ms of "
            "exchange (assumed)"
        )
    return lines
