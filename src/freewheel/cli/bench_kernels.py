# SPDX-License-Identifier: Apache-2.0
"""`freewheel bench kernels`: single ops at real dimensions, beside other projects' kernels."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freewheel.cli import options as o
from freewheel.cli.later import Later
from freewheel.cli.terminal import answers, table, write_json

if TYPE_CHECKING:
    from freewheel import engine
    from freewheel.bench import kernels as summarising
else:
    engine = Later("freewheel.engine")
    summarising = Later("freewheel.bench.kernels")

HELP = (
    "Time single ops on a CUDA device at DeepSeek's dimensions, one row a size.\n\n"
    "b: rows, q: queries of each, then keys of each and heads. Each time is the median of replays "
    "of a CUDA graph over several sets of inputs, ours and the peers' in turn. fixed: ours in the "
    "deterministic mode. floor: bytes over 4.25 TB/s or operations over 790 TFLOP/s (FP8 products "
    "twice as many), whichever is longer. ratio: ours over the best "
    "peer's. error: the norm of the difference from the op's specification over its norm; for "
    "top-k, how many picks differ.\n\n"
    "--peers names a folder with kernels of other projects; without it they are absent, and the "
    "table says so. Their caches are FP8; ours bfloat16, unless an op's name says FP8."
)

Peers = Annotated[Path | None, typer.Option(help="Folder of other projects' kernels.")]
Ops = Annotated[str, typer.Option(help="Only these ops, with commas between.")]
Quick = Annotated[bool, typer.Option("--quick", help="Only the smallest size of each op.")]

COLUMNS = (
    ("op", 20), ("cell", 20), ("us", 9), ("fixed", 9), ("floor", 9), ("us/floor", 8), ("ratio", 6),
    ("error", 8),
)  # fmt: skip
"""Headings and widths; peers follow them."""


def kernels(peers: Peers = None, ops: Ops = "", quick: Quick = False, json: o.Json = False) -> None:
    """Time single ops. `HELP` says what is measured."""
    cells = engine.choose_cells(tuple(name for name in ops.split(",") if name), quick)
    rows: list[dict[str, Any]] = []
    for found in engine.bench_kernels(cells, peers):
        rows.append(summarising.kernel_summary(found))
        if not json and len(rows) == 1:
            _print_head()
        if not json:
            answers.print(_row(rows[-1]))
    if json:
        write_json({"machine": asdict(engine.Machine.here("cuda")), "kernels": rows})


def _print_head() -> None:
    machine = engine.Machine.here("cuda")
    answers.print(f"{machine.processor}, torch {machine.torch_version}; microseconds a call")
    answers.print(table(COLUMNS, "peers").head())


def _row(row: dict[str, Any]) -> str:
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    cells = (
        row["op"],
        row["cell"],
        f"{row['us']:.2f}",
        f"{row['deterministic_us']:.2f}",
        f"{row['floor_us']:.2f}",
        f"{row['over_floor']:.2f}",
        ratio,
        f"{row['error']:.1e}",
    )
    peers = "; ".join(
        f"{name} {found['reason'] if found['us'] is None else format(found['us'], '.2f')}"
        for name, found in row["peers"].items()
    )
    return table(COLUMNS).row(cells, peers or "-")
