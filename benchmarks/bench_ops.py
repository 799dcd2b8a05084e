# SPDX-License-Identifier: Apache-2.0
"""Time every op at the demo model's sizes: the specification beside the body that serves.

Run `python benchmarks/bench_ops.py [--op sparse_mla] [--dtype float32] [--json]`. Times are
microseconds of one thread's CPU time a call, of the fastest of several short series: on an idle
machine that is the time on the clock, on a busy one it still is nearly the same number. `served`
goes through the dispatcher, as in a forward.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from freewheel import ops

HIDDEN, HEADS, RANK, ROPE, INDEX_HEADS, INDEX_DIM = 256, 4, 512, 64, 4, 128
TOP_K, PAGE, EXPERTS, INNER = 64, 64, 4, 128
CONTEXT = 8192
RECTANGLES = ((1, 1), (1, 4), (1, 8), (8, 1), (8, 4), (1, 64), (1, 256), (1, 1024))
LENGTHS = (48, 512, 8192)
SERIES_SECONDS = 0.05


@dataclass(frozen=True)
class Case:
    """One op at one shape. `arguments` is called once, before the clock starts."""

    op: str
    shape: str
    arguments: Callable[[], tuple[object, ...]]


@dataclass(frozen=True)
class Timing:
    op: str
    shape: str
    specification_us: float
    served_us: float


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    cases = [case for case in _cases(dtype) if options.op in ("", case.op)]
    if not cases:
        print(f"--op: no op is named {options.op!r}", file=sys.stderr)
        return 2
    timings: list[Timing] = []
    for case in cases:
        timings.append(_measure(case))
        if not options.json:
            _print_line(timings[-1], header=len(timings) == 1)
    if options.json:
        print(
            json.dumps({"dtype": options.dtype, "timings": [asdict(t) for t in timings]}, indent=1)
        )
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time every op at the demo model's sizes.")
    parser.add_argument("--op", default="", help="only this op")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser.parse_args()


def _print_line(timing: Timing, header: bool) -> None:
    if header:
        print(f"{'op':16s} {'shape':28s} {'specification us':>16s} {'served us':>10s}")
    times = f"{timing.specification_us:16.1f} {timing.served_us:10.1f}"
    print(f"{timing.op:16s} {timing.shape:28s} {times}", flush=True)


def _measure(case: Case) -> Timing:
    arguments = case.arguments()
    served = getattr(torch.ops.freewheel, case.op).default
    specification = ops.SPECIFICATIONS[case.op]
    return Timing(
        case.op, case.shape, _fastest(specification, arguments), _fastest(served, arguments)
    )


def _fastest(call: Callable[..., object], arguments: tuple[object, ...]) -> float:
    """Microseconds a call, of the fastest of five series."""
    begin = time.thread_time()
    call(*arguments)
    repeats = max(1, int(SERIES_SECONDS / (time.thread_time() - begin + 1e-9)))
    series: list[float] = []
    for _ in range(5):
        begin = time.thread_time()
        for _ in range(repeats):
            call(*arguments)
        series.append((time.thread_time() - begin) / repeats)
    return round(min(series) * 1e6, 1)


def _cases(dtype: torch.dtype) -> Iterator[Case]:
    for batch, width in RECTANGLES:
        yield from _dense_cases(batch, width, dtype)
        yield from _store_cases(batch, width, dtype)
        for length in sorted({max(length, width) for length in LENGTHS}):
            yield from _attention_cases(batch, width, length, dtype)


def _dense_cases(batch: int, width: int, dtype: torch.dtype) -> Iterator[Case]:
    shape = f"B{batch} W{width}"

    def draw(*sizes: int) -> Tensor:
        return torch.randn(batch, width, *sizes, dtype=dtype)

    weight, table = torch.randn(HIDDEN, dtype=dtype), torch.randn(CONTEXT, ROPE)
    positions = torch.randint(0, CONTEXT, (batch, width), dtype=torch.int32)
    yield Case("rms_norm", shape, lambda: (draw(HIDDEN), weight, 1e-6))
    yield Case("add_rms_norm", shape, lambda: (draw(HIDDEN), draw(HIDDEN), weight, 1e-6))
    yield Case("layer_norm", shape, lambda: (draw(HIDDEN), weight, weight, 1e-6))
    yield Case("rope", shape + " query", lambda: (draw(HEADS, ROPE), positions, table, 0, True))
    index_query = (draw(INDEX_HEADS, INDEX_DIM), positions, table, 0, False)
    yield Case("rope", shape + " index", lambda: index_query)
    logits, bias = torch.randn(batch, width, EXPERTS), torch.randn(EXPERTS)
    yield Case("route", shape, lambda: (logits, bias, 2, 1, 2, True, 1.5))
    yield Case("silu_mul", shape, lambda: (draw(1024),))
    ids = torch.rand(batch, width, EXPERTS).argsort(-1)[..., :2].int()
    experts = (
        torch.randn(EXPERTS, 2 * INNER, HIDDEN, dtype=dtype),
        torch.randn(EXPERTS, HIDDEN, INNER, dtype=dtype),
    )
    shares = torch.rand(batch, width, 2)
    yield Case("grouped_experts", shape, lambda: (draw(HIDDEN), *experts, ids, shares))


def _store_cases(batch: int, width: int, dtype: torch.dtype) -> Iterator[Case]:
    shape, table = f"B{batch} W{width}", torch.randn(CONTEXT, ROPE)
    positions = torch.arange(width, dtype=torch.int32).expand(batch, width).contiguous()
    slots = torch.randperm(CONTEXT)[: batch * width].view(batch, width)

    def rows(size: int) -> tuple[Tensor, Tensor, Tensor]:
        cache = torch.zeros(CONTEXT // PAGE, PAGE, size, dtype=dtype)
        return cache, torch.randn(batch, width, size, dtype=dtype), torch.ones(size, dtype=dtype)

    def latent() -> tuple[object, ...]:
        cache, compressed, ones = rows(RANK + ROPE)
        return cache, compressed, ones[:RANK], 1e-6, positions, table, True, slots

    def index_key() -> tuple[object, ...]:
        cache, key, ones = rows(INDEX_DIM)
        return cache, key, ones, ones, 1e-6, positions, table, False, slots

    yield Case("store_latent", shape, latent)
    yield Case("store_index_key", shape, index_key)


def _attention_cases(batch: int, width: int, length: int, dtype: torch.dtype) -> Iterator[Case]:
    shape, columns = f"B{batch} W{width} length {length}", CONTEXT // PAGE
    table = torch.randperm(batch * columns).view(batch, columns).int()
    rows = torch.arange(batch, dtype=torch.int32)
    kv_lens = (length - width + 1 + torch.arange(width)).expand(batch, width).int().contiguous()
    logits = torch.randn(batch, width, CONTEXT)

    def scores() -> tuple[object, ...]:
        query = torch.randn(batch, width, INDEX_HEADS, INDEX_DIM, dtype=dtype)
        weights = torch.randn(batch, width, INDEX_HEADS)
        keys = torch.randn(batch * columns, PAGE, INDEX_DIM, dtype=dtype)
        return query, weights, keys, table, rows, kv_lens

    def attention() -> tuple[object, ...]:
        query = torch.randn(batch, width, HEADS, RANK + ROPE, dtype=dtype)
        latent = torch.randn(batch * columns, PAGE, RANK + ROPE, dtype=dtype)
        slots = ops.topk_slots(logits, table, rows, kv_lens, PAGE, TOP_K)
        return query, latent, slots, 0.07, RANK

    yield Case("index_logits", shape, scores)
    yield Case("topk_slots", shape, lambda: (logits, table, rows, kv_lens, PAGE, TOP_K))
    yield Case("sparse_mla", shape, attention)


if __name__ == "__main__":
    sys.exit(main())
