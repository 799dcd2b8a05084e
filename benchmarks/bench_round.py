# SPDX-License-Identifier: Apache-2.0
r"""Time one round at real dimensions on a CUDA device, with random weights.

    python benchmarks/bench_round.py --config benchmarks/configs/v32_tp8shard.json \
        [--batch 1,8] [--context 4096] [--speculate 3] [--weights fp8|mxfp4]
        [--kv-cache-dtype fp8|fp8-index] [--layers N] [--deterministic] [--log FILE]

The configurations are one rank's share of eight: heads, experts' width and vocabulary divided, full
depth. Weights are bfloat16, or FP8 in blocks of 128 wherever a released checkpoint has them so;
embedding, head, router and key-value up-projections are bfloat16 always. With `mxfp4` the routed
experts are in that, and the rest as with `fp8`. The experts of `--distinct` layers are made and
used in turn by all layers (0: all have their own): each is far larger than the L2 cache, so this
changes the memory taken and not the time.

Several cards: `torchrun --nproc-per-node 2 benchmarks/bench_round.py --tp 2 ..`, or `--dp 2 --ep`;
`--batch` is then of each copy.

One line a case. `round us`: graph replays alone, by CUDA events. `loop us`: launched and collected
by the executor two rounds ahead, by the wall clock. `busy`: time in kernels, by the profiler, over
`round us`. `floor us`: bytes that a round must read, over the bandwidth of a large copy.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import sys
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from stream_floor import Sizes as StreamSizes
from stream_floor import stream_floor
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import DeviceType, ProfilerActivity, profile

from freewheel.config import launched_rank
from freewheel.decode import ChainDrafter
from freewheel.models import load_model
from freewheel.nn.cut import Cut
from freewheel.nn.matrix import (
    BLOCK,
    GROUP,
    BlockMatrix,
    Matrix,
    PackedMatrix,
    PlainMatrix,
    copy_into,
)
from freewheel.nn.source import held_tensors
from freewheel.ops import load_kernels
from freewheel.runtime import Executor, Sizes
from freewheel.runtime.parallel.group import close_groups, form_mesh, open_groups
from freewheel.spec import StepPlan, StepShape
from freewheel.spec.cache import CacheGroup
from freewheel.spec.compressed import CompressedSpec
from freewheel.spec.mesh import ALONE, Mesh
from freewheel.spec.model import DsaSpec
from freewheel.spec.model_config import read_model_spec
from freewheel.spec.storage import Fp8IndexStorage, Fp8Storage, PlainStorage, RowStorage

PAGES, HEADROOM = {DsaSpec: 64, CompressedSpec: 256}, 512
BANDWIDTH = 4.3e12
"""Bytes a second that a large device-to-device copy moves on an H200, reads and writes counted."""

STORAGES: dict[str, RowStorage] = {
    "bf16": PlainStorage("bfloat16"),
    "fp8": Fp8Storage(),
    "fp8-index": Fp8IndexStorage(PlainStorage("bfloat16")),
}
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
WEIGHTS = {
    "bf16": StreamSizes(2.0, 2.0),
    "fp8": StreamSizes(1.0, 1.0),
    "mxfp4": StreamSizes(1.0, 0.5 + 1 / GROUP),
}
"""Bytes of a weight: of projections, and of routed experts."""


Spec = DsaSpec | CompressedSpec


class DummySource:
    """Random weights, made on the device; experts of only `distinct` layers, or of all if it is 0.

    `weights`: a key of WEIGHTS.
    """

    def __init__(self, distinct: int, weights: str, mesh: Mesh = ALONE) -> None:
        self.dtype, self.device = torch.bfloat16, torch.device("cuda")
        self.mesh = mesh
        self._distinct, self._weights = distinct, weights
        self._experts: dict[str, Matrix] = {}

    def has(self, name: str) -> bool:
        return name.endswith(EXPERTS)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        return self._draw(name, shape if cut is None else cut.shape(shape), dtype)

    def elsewhere(self, name: str, shape: tuple[int, ...]) -> None:
        del name, shape

    def matrix(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Matrix:
        shape = shape if cut is None else cut.shape(shape)
        if not name.endswith(EXPERTS):
            return self._draw_matrix(name, shape)
        key = name
        if self._distinct:
            key = re.sub(r"\.(\d+)\.", lambda n: f".{int(n[1]) % self._distinct}.", name, count=1)
        if key not in self._experts:
            draw = self._draw_packed if self._weights == "mxfp4" else self._draw_matrix
            self._experts[key] = draw(name, shape)
        return self._experts[key]

    def fill(
        self, name: str, shape: tuple[int, ...], target: Matrix, cut: Cut | None = None
    ) -> None:
        copy_into(target, self.matrix(name, shape, cut))

    def settle(self) -> None:
        """Targets are filled at once."""

    def dense(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        cut: Cut | None = None,
    ) -> Tensor:
        return self.tensor(name, shape, dtype, cut)

    def _draw_matrix(self, name: str, shape: tuple[int, ...]) -> Matrix:
        if self._weights == "bf16":
            return PlainMatrix(self._draw(name, shape, None))
        values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device)
        for piece in values if len(shape) > 2 else values[None]:
            piece.copy_(torch.randn(piece.shape, dtype=torch.bfloat16, device=self.device))
        *lead, outputs, inputs = values.shape
        grid = (*lead, -(-outputs // BLOCK), -(-inputs // BLOCK))
        scale = torch.rand(grid, device=self.device) + 0.5
        return BlockMatrix(values, scale * inputs**-0.5)

    def _draw_packed(self, name: str, shape: tuple[int, ...]) -> Matrix:
        """Values of variance 1 / inputs: codes, drawn evenly, are 2.9 in the mean square."""
        del name
        *lead, inputs = shape
        codes = torch.empty((*lead, inputs // 2), dtype=torch.uint8, device=self.device)
        scales = torch.empty((*lead, inputs // GROUP), dtype=torch.uint8, device=self.device)
        power = 127 + round(math.log2(inputs**-0.5 / 2.9))
        return PackedMatrix(codes.random_(0, 256), scales.random_(power - 1, power + 2))

    def ids(self, name: str, shape: tuple[int, ...], below: int) -> Tensor:
        """Each row's ids differ, as the experts of a token do."""
        del name
        order = torch.rand((shape[0], below), device=self.device).argsort(-1)
        return order[:, : shape[1]].int().contiguous()

    def _draw(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        values = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        if name.endswith(("e_score_correction_bias", ".gate.bias")):
            return values.zero_()  # tokens spread evenly over the experts
        if len(shape) > 1:
            return values.normal_(0, shape[-1] ** -0.5)
        return values.normal_(1.0 if name.endswith(".weight") else 0.0, 0.1)

    def same(self, name: str, other: str) -> bool:
        del name, other
        return False

    def skip(self, pattern: str, reason: str) -> None:
        del pattern, reason


@dataclass(frozen=True)
class Case:
    batch: int
    context: int
    depth: int

    @property
    def shape(self) -> StepShape:
        return StepShape(self.batch, 1 + self.depth, self.depth)


def main() -> int:
    options = _options()
    mesh = _meet(options.tp, options.dp, options.ep)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    load_kernels("cuda")
    spec = read_model_spec(json.loads(Path(options.config).read_text()))
    assert isinstance(spec, (DsaSpec, CompressedSpec))
    if options.layers:
        spec = _shortened(spec, options.layers)
    batches = [int(b) for b in options.batch.split(",")]
    contexts = [int(c) for c in options.context.split(",")]
    cases = [Case(b, c, options.speculate) for b in batches for c in contexts]
    _measure(spec, cases, options, mesh)
    gc.collect()  # graphs hold on to the communicators that are closed next
    close_groups()
    return 0


def _measure(spec: Spec, cases: list[Case], options: argparse.Namespace, mesh: Mesh) -> None:
    log_file = options.log if options.log and not mesh.rank else "/dev/null"
    with open(log_file, "w", encoding="utf-8") as log:
        source = DummySource(options.distinct, options.weights, mesh)
        executor = _build(
            spec, cases, source, STORAGES[options.kv_cache_dtype], options.deterministic
        )
        if not mesh.rank:
            print(_header(), flush=True)
        for case in cases:
            line = _line(spec, case, executor, log, options.config, WEIGHTS[options.weights])
            if not mesh.rank:
                print(line, flush=True)


def _meet(tp: int, dp: int, whole: bool) -> Mesh:
    """With several ranks, each a process of torchrun that does all that the others do."""
    ranks = tp * dp
    if ranks == 1:
        return ALONE
    own = launched_rank()
    assert own.ranks == ranks, f"torchrun started {own.ranks} processes, not {ranks}"
    groups = open_groups("cuda", own.rank, ranks, None, own.local)
    form_mesh(groups, tp, dp, lambda: "")
    return Mesh(tp, own.rank, whole, dp)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a round at real dimensions.")
    parser.add_argument("--config", required=True)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--context", default="4096", help="rows have room for the longest")
    parser.add_argument("--speculate", type=int, default=3)
    parser.add_argument("--weights", default="bf16", choices=tuple(WEIGHTS))
    parser.add_argument("--kv-cache-dtype", default="bf16", choices=tuple(STORAGES))
    parser.add_argument("--layers", type=int, default=0, help="fewer layers, for a quick look")
    parser.add_argument("--distinct", type=int, default=8, help="layers with experts of their own")
    parser.add_argument("--tp", type=int, default=1, help="ranks, each a process of torchrun")
    parser.add_argument("--dp", type=int, default=1, help="copies, of as many ranks each")
    parser.add_argument("--ep", action="store_true", help="deal out the experts whole")
    parser.add_argument("--deterministic", action="store_true", help="one order of sums")
    parser.add_argument("--log", default="", help="write the kernels of a round there")
    return parser.parse_args()


def _shortened(spec: Spec, layers: int) -> Spec:
    """The first `layers` layers, and the multi-token-prediction layer behind them."""
    if isinstance(spec, CompressedSpec):
        return replace(
            spec,
            layers=layers,
            kinds=spec.kinds[:layers],
            moe=replace(spec.moe, hashed=spec.moe.hashed[:layers]),
            mtp=None if spec.mtp is None else replace(spec.mtp, layer=layers),
        )
    full = spec.indexer.full_layers[:layers]
    return replace(
        spec,
        layers=layers,
        sparse_layers=spec.sparse_layers[:layers],
        indexer=replace(spec.indexer, full_layers=full),
        mtp=None if spec.mtp is None else replace(spec.mtp, layer=layers),
    )


def _build(
    spec: Spec,
    cases: list[Case],
    source: DummySource,
    storage: RowStorage,
    deterministic: bool = False,
) -> Executor:
    """An executor whose rows stand at `context` tokens, over caches of random numbers."""
    width = max(case.context for case in cases) + HEADROOM
    batch = max(case.batch for case in cases)
    model, head = load_model(spec, source, positions=width)
    assert head is not None
    groups = model.cache_groups(PAGES[type(spec)], "bfloat16", storage)
    pages = tuple(batch * group.pages_for(width) + 1 for group in groups)
    executor = Executor(
        model,
        ChainDrafter(head),
        held_tensors(model, head),
        groups,
        Sizes(batch + 1, width, pages),
        tuple(dict.fromkeys(case.shape for case in cases)),
        device=source.device.type,
        graph="cuda",
        run_ahead=2,
        guard=False,
        deterministic=deterministic,
        mesh=source.mesh,
    )
    torch.manual_seed(1 + source.mesh.replica.index)  # other tokens, which choose other experts
    for index, group in enumerate(groups):
        _fill(executor, index, group)
    executor.state.tokens[1:].random_(0, spec.vocab_size)
    return executor


def _fill(executor: Executor, index: int, group: CacheGroup) -> None:
    """Random numbers in the group's caches, random pages in its table: every row owns its own.

    A group that keeps only the latest tokens keeps them all here.
    """
    state = executor.state
    for field in group.fields:
        stored = executor.arena[f"cache.{group.name}.{field.name}"]
        if field.packed is None:
            stored.normal_()
        else:
            stored.random_(0, 64)  # codes and scales of small numbers
    rows, columns = state.page_tables.shape[1] - 1, state.columns[index]
    order = torch.randperm(rows * columns, device="cuda") + 1
    state.page_tables[index, 1:, :columns] = order.view(rows, columns).int()


def _rewind(executor: Executor, case: Case) -> None:
    """Every row at the case's context again, greedy, without a limit in reach."""
    torch.cuda.synchronize()
    state = executor.state
    state.known_lens[1:] = case.context
    state.computed_lens[1:] = case.context - 1
    state.limit_lens[1:] = case.context + HEADROOM
    torch.cuda.synchronize()


def _line(
    spec: Spec, case: Case, executor: Executor, log: object, name: str, sizes: StreamSizes
) -> str:
    shape = case.shape
    begin = time.perf_counter()
    executor.capture([shape], lambda _: None)
    torch.cuda.synchronize()
    captured = time.perf_counter() - begin
    _rewind(executor, case)
    loop = _time_loop(executor, case, 30)
    _rewind(executor, case)
    _time_loop(executor, case, 3)
    alone = _time_replays(executor, shape, 30)
    kernels, inside = _profile(executor, shape, log, f"{name} batch {case.batch}")
    floor = _floor_bytes(spec, case, sizes) / BANDWIDTH * 1e6
    config = Path(name).stem
    return (
        f"{config:16s} {case.batch:5d} {case.context:7d} {shape.width:5d} {alone:9.0f} {loop:9.0f} "
        f"{kernels:7.0f} {inside / alone:5.2f} {floor:8.0f} {captured:9.1f}"
    )


def _header() -> str:
    return (
        f"{'config':16s} {'batch':>5s} {'context':>7s} {'width':>5s} {'round us':>9s} "
        f"{'loop us':>9s} {'kernels':>7s} {'busy':>5s} {'floor us':>8s} {'capture s':>9s}"
    )


def _time_loop(executor: Executor, case: Case, rounds: int) -> float:
    """Microseconds a round, launched two ahead and read."""
    rows = tuple(range(1, case.batch + 1))
    nothing = (None,) * case.batch
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for index in range(rounds):
        plan = StepPlan(index, case.shape, rows, nothing, nothing, ())
        executor.launch(plan.alike(executor.copies))
        if executor.in_flight > 2:
            executor.collect()
    while executor.in_flight:
        executor.collect()
    return (time.perf_counter() - begin) / rounds * 1e6


def _time_replays(executor: Executor, shape: StepShape, rounds: int) -> float:
    """Microseconds a replay: the median of `rounds`."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    events[0].record()
    for event in events[1:]:
        executor.replay(shape)
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    return times[rounds // 2] * 1e3


def _profile(executor: Executor, shape: StepShape, log: object, title: str) -> tuple[float, float]:
    """(kernels, microseconds in kernels) of one replay; the kernels by name go to `log`."""
    rounds = 3
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(rounds):
            executor.replay(shape)
        torch.cuda.synchronize()
    kernels = [e for e in seen.events() or () if e.device_type == DeviceType.CUDA]
    totals: dict[str, tuple[int, float]] = {}
    for kernel in kernels:
        count, spent = totals.get(kernel.name, (0, 0.0))
        totals[kernel.name] = count + 1, spent + kernel.device_time_total
    print(title, file=log)  # pyright: ignore[reportArgumentType]
    for kernel_name, (count, spent) in sorted(totals.items(), key=lambda item: -item[1][1]):
        times = f"{spent / rounds:10.1f} us {count / rounds:7.1f} x {spent / count:8.2f}"
        print(times, kernel_name[:110], file=log)  # pyright: ignore[reportArgumentType]
    _print_in_order(kernels[: len(kernels) // rounds], log)
    return len(kernels) / rounds, sum(k.device_time_total for k in kernels) / rounds


def _print_in_order(kernels: list[FunctionEvent], log: object) -> None:
    """One replay's kernels as they ran: start and length in microseconds."""
    print("in order", file=log)  # pyright: ignore[reportArgumentType]
    kernels = sorted(kernels, key=lambda kernel: kernel.time_range.start)
    for kernel in kernels:
        start = kernel.time_range.start - kernels[0].time_range.start
        line = f"{start:10.1f} {kernel.device_time_total:8.2f} {kernel.name[:110]}"
        print(line, file=log)  # pyright: ignore[reportArgumentType]


def _floor_bytes(spec: Spec, case: Case, sizes: StreamSizes) -> float:
    """Bytes of weights and caches that one round of the whole model reads at the least.

    The head, caches and what is never quantised count as bfloat16, the router as float32. What
    each of several cards reads, `freewheel plan` says.
    """
    if isinstance(spec, CompressedSpec):
        return stream_floor(spec, case.batch, case.context, case.depth, sizes)
    width, join = case.shape.width, 2 * spec.hidden_size**2 * sizes.projections
    layers = sum(_layer_bytes(spec, case, sparse, width, sizes) for sparse in spec.sparse_layers)
    draft = _layer_bytes(spec, case, True, width, sizes) + join
    draft += (case.depth - 1) * (_layer_bytes(spec, case, True, 1, sizes) + join)
    heads = (1 + case.depth) * 2 * spec.vocab_size * spec.hidden_size
    return layers + draft + heads


def _layer_bytes(spec: DsaSpec, case: Case, sparse: bool, width: int, sizes: StreamSizes) -> float:
    own, index, hidden = spec.attention, spec.indexer, spec.hidden_size
    weights = hidden * (own.q_lora_rank + own.latent_width + own.heads * own.value_dim)
    weights += own.heads * own.query_dim * own.q_lora_rank
    weights += index.heads * index.dim * own.q_lora_rank + hidden * index.dim
    plain = own.heads * own.kv_lora_rank * (own.nope_dim + own.value_dim)
    plain += hidden * 2 * index.heads
    tokens, routed = case.batch * width, 0.0
    if sparse and spec.moe is not None:
        moe = spec.moe
        touched = moe.experts * (1 - (1 - moe.top_k / moe.experts) ** tokens)
        weights += 3 * hidden * moe.width * moe.shared
        routed = 3 * hidden * moe.width * touched
        plain += 2 * hidden * moe.experts
    else:
        weights += 3 * hidden * spec.dense_width
    keys = case.batch * case.context * index.dim
    picked = tokens * min(case.context, index.topk) * own.latent_width
    stored = sizes.projections * weights + sizes.experts * routed
    return stored + 2.0 * (plain + keys + picked)


if __name__ == "__main__":
    sys.exit(main())
