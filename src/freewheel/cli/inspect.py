# SPDX-License-Identifier: Apache-2.0
"""`freewheel inspect`: what a folder holds, and what an engine would make of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from freewheel.cli import options as o
from freewheel.cli.later import Later
from freewheel.cli.terminal import answers, loading, write_json
from freewheel.config import EngineConfig, find_model
from freewheel.spec import StepShape

if TYPE_CHECKING:
    from freewheel import engine
    from freewheel.engine import Survey
else:
    engine = Later("freewheel.engine")

OWN = "freewheel::"

LINE = 100
"""Letters of a line, at most; a longer word stands alone."""

NAMES = {"BF16": "bfloat16", "F32": "float32", "F64": "float64"}
"""safetensors' names of dtypes that are also computed in."""


def inspect(
    model: o.Model,
    speculate: o.Speculate = "3",
    drafter: o.Drafter = "auto",
    chunk: o.Chunk = 256,
    batch: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 8,
    context_len: o.ContextLen = None,
    device: o.Device = "auto",
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.KvCacheDtype = "auto",
    graph: Annotated[
        bool, typer.Option("--graph", help="Also list what each captured round calls.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every file against the folder's SHA256SUMS.")
    ] = False,
    json: o.Json = False,
) -> None:
    """Print configuration, memory plan and cache groups. Reads headers only; loads nothing.

    With --graph, every round is traced on tensors without memory. An operator of Freewheel's own
    counts as one call; `freewheel audit` counts kernels on a CUDA device.
    """
    config = EngineConfig(
        model=model,
        speculate=o.depth(speculate),
        drafter=drafter,
        chunk=chunk,
        max_batch=batch,
        prefill_batch=min(2, batch),
        context_len=context_len,
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
    )
    find_model(model)
    verified = None
    if verify:
        with loading(model, "verifying") as progress:
            verified = engine.verify(model, progress)
    found = engine.survey(config)
    graphs = engine.outline(config) if graph else {}
    if json:
        checked = {} if verified is None else {"verified": verified}
        write_json(_as_object(found, graphs) | checked)
        return
    _print(found)
    if verified is not None:
        _section("files")
        _row("verified", f"{verified} are as SHA256SUMS says")
    _print_graphs(graphs)


def _as_object(found: Survey, graphs: dict[StepShape, Counter[str]]) -> dict[str, object]:
    """Everything, with the numbers that follow from a cache group written out."""
    groups = [
        asdict(group)
        | {"page_bytes": group.page_bytes, "pages": pages, "token_bytes": group.token_bytes}
        | {"request_bytes": held * group.page_bytes}
        for group, pages, held in zip(
            found.groups, found.sizes.pages, found.request_pages, strict=True
        )
    ]
    shapes = [
        asdict(shape) | ({"calls": dict(graphs[shape].most_common())} if graphs else {})
        for shape in found.ladder.shapes()
    ]
    return asdict(found) | {"groups": groups, "ladder": shapes}


def _print(found: Survey) -> None:
    spec = found.spec
    _section("model")
    _row("family", spec.family)
    _row("parameters", f"{found.parameters:,} computed in {found.dtype}")
    _row("layers", f"{spec.layers}" + (" and a multi-token-prediction layer" if spec.mtp else ""))
    _row("attention", f"{spec.reading}; up to {found.sizes.row_width:,} tokens")
    _row("vocabulary", f"{spec.vocab_size:,}; ends at {', '.join(map(str, spec.eos_ids))}")
    _section("runs in")
    for kind in found.precisions:
        stored = "" if kind.held == NAMES.get(kind.stored) else f" (stored as {kind.stored})"
        count = "1 tensor" if kind.tensors == 1 else f"{kind.tensors:,} tensors"
        _row(kind.held, f"{count}{stored}: {', '.join(kind.modules)}", 28)
    _section("memory plan")
    for name, size in found.memory.items():
        _row(name, _bytes(size))
    _row("total", _bytes(sum(found.memory.values())))
    _section("cache groups")
    numbers = zip(found.groups, found.sizes.pages, found.request_pages, strict=True)
    for group, pages, held in numbers:
        fields = ", ".join(
            f"{f.name} {f.row_bytes} B x {len(f.layers)} layers" for f in group.fields
        )
        _row(
            group.name,
            f"{pages:,} pages of {group.page_size} tokens, {_bytes(group.page_bytes)} each; "
            "one of them is scratch, where padding writes",
        )
        _row("", fields)
        kept = "all tokens" if group.retention is None else f"the last {group.retention} tokens"
        _row(
            "",
            f"{_bytes(group.token_bytes)} a token, {_bytes(held * group.page_bytes)} a request; "
            f"keeps {kept}",
        )
    _section("rounds")
    for shape in found.ladder.shapes():
        _row(f"{shape.batch} x {shape.width}", f"then {shape.depth} drafts")
    if found.decisions:
        _section("decisions")
    for decision in found.decisions:
        value = _usable_pages(found) if decision.option == "pages" else decision.value
        _row(decision.option, f"{value}: {decision.reason}", 16)
    if found.notes:
        _section("notes")
    for note in found.notes:
        _row("", note, 0)


def _print_graphs(graphs: dict[StepShape, Counter[str]]) -> None:
    for shape, calls in graphs.items():
        own = sum(n for name, n in calls.items() if name.startswith(OWN))
        _section(f"graph of {shape.batch} x {shape.width}, then {shape.depth} drafts")
        _row("calls", f"{calls.total()}, of which {own} are Freewheel's own operators")
        for name, count in calls.most_common():
            _row("", f"{count:>5}  {name}")


def _usable_pages(found: Survey) -> str:
    """Pages that requests may hold: all but the scratch page of each group."""
    groups = zip(found.groups, found.sizes.pages, strict=True)
    return ", ".join(f"{pages - 1:,} of {group.name}" for group, pages in groups)


def _section(title: str) -> None:
    answers.print(title, style="bold")


def _row(name: str, value: object, width: int = 14) -> None:
    """A name and what is to be said of it, in as many lines as that takes."""
    lines = wrap(str(value), LINE - 2 - width, break_long_words=False, break_on_hyphens=False)
    for head, line in zip_longest([name], lines or [""], fillvalue=""):
        answers.print(f"  {head:{width}}{line}")


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
