# SPDX-License-Identifier: Apache-2.0
"""`freewheel replay`: what a failed engine was doing, once more."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from freewheel.cli import options as o
from freewheel.cli.later import Later
from freewheel.cli.serve import check_libraries
from freewheel.cli.terminal import answers, messages, open_llm, write_json

if TYPE_CHECKING:
    from freewheel.server import journal
    from freewheel.server import replay as replaying
else:
    journal, replaying = Later("freewheel.server.journal"), Later("freewheel.server.replay")

LIBRARIES = frozenset({"msgspec", "zmq"})
DIFFERS = 1


def replay(
    dump: Annotated[Path, typer.Argument(help="A file of `serve --dump-dir`.")],
    model: Annotated[str, typer.Option(help="Another folder with the same model.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    graph: o.Graph = "auto",
    dtype: Annotated[str, typer.Option(help="As the dump's unless given.")] = "",
    guard: Annotated[bool, typer.Option("--guard", help="Count host reads.")] = False,
    to_end: Annotated[
        bool, typer.Option("--to-end", help="Go on until every request has ended.")
    ] = False,
    json: o.Json = False,
) -> None:
    """Give a failed engine's requests to another, each in the same turn, and compare tokens.

    Exit code 1 if tokens differ from the dump's, as they may between devices and dtypes.
    """
    check_libraries(LIBRARIES, "replay", "server")
    read = journal.read_dump(dump)
    overrides = {"device": device, "graph": graph, "guard": guard}
    overrides |= {"model": model} if model else {}
    overrides |= {"dtype": dtype} if dtype else {}
    messages.print(
        f"{len(read.entries)} requests, {read.turns} turns, from {read.device}: {read.why}",
        markup=False,
        soft_wrap=True,
    )
    if not read.whole:
        messages.print("requests that had ended are missing: turns may fall out otherwise")
    found = replaying.replay(read, overrides, open_llm, to_end=to_end)
    if json:
        write_json(asdict(found))
    else:
        told = sum(len(entry.tokens) for entry in read.entries)
        answers.print(f"{found.turns} turns without an exception")
        answers.print(f"{found.same_tokens} of {told} tokens as in the dump")
        answers.print(f"{found.same_rounds} of {len(read.rounds)} rounds as in the dump")
        for request_id, why in found.refused.items():
            answers.print(f"request {request_id} is refused: {why}", markup=False)
        for request_id, (place, theirs, ours) in found.differing.items():
            answers.print(f"request {request_id} differs at token {place}: {theirs}, here {ours}")
    if found.differing:
        raise typer.Exit(DIFFERS)
