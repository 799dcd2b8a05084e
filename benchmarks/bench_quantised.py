# SPDX-License-Identifier: Apache-2.0
"""Time projections and experts over FP8, MXFP4 and float32 weights on a CUDA device.

    python benchmarks/bench_quantised.py [--tokens 1,4,8,32,128] [--json FILE]

One line a case: microseconds a call (graph replays over weights or routings that change from call
to call, so that nothing is found in the L2 cache), the floor (bytes of weights that the call must
read, over the bandwidth of a large copy), their ratio, and the relative error against the
specification in float64 on the same inputs. `bf16` lines are the same work with bfloat16 weights:
cuBLAS, or `grouped_experts`; `library` lines are cuBLAS in float32. Dimensions are those of one
rank of eight of DeepSeek-V3.2, and of one of four of V4-Flash for MXFP4.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel.ops import (
    SPECIFICATIONS,
    block_experts,
    block_linear,
    grouped_experts,
    load_kernels,
    repack_mxfp4,
    repacked_experts,
    wide_linear,
)
from freewheel.ops.codecs import blocks

BANDWIDTH, DEVICE, ROTATION = 4.25e12, "cuda", 8
PROJECTIONS = ((2240, 7168), (11264, 1536), (7168, 2048), (512, 7168), (7168, 256), (4608, 7168))
WIDE = (256, 64)
"""Outputs of the float32 projections: the router's, and the gates of index heads."""

HIDDEN, INNER, EXPERTS, TOP_K = 7168, 256, 256, 8
V4_HIDDEN, V4_INNER, V4_TOP_K, V4_LIMIT = 4096, 512, 6, 10.0
CHECKED = 24
"""Experts of the calls whose error is measured: the specification runs each on every token."""


@dataclass(frozen=True)
class Line:
    case: str
    tokens: int
    us: float
    floor_us: float
    error: float | None


def main() -> int:
    parser = argparse.ArgumentParser(description="Time ops over quantised weights.")
    parser.add_argument("--tokens", default="1,4,8,32,128")
    parser.add_argument("--json", default="", help="write the figures there")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    load_kernels("cuda")
    counts = [int(count) for count in options.tokens.split(",")]
    print(f"{'case':28s} {'tokens':>6s} {'us':>8s} {'floor':>8s} {'share':>6s} {'error':>8s}")
    lines: list[Line] = []
    for line in _lines(counts):
        lines.append(line)
        error = "" if line.error is None else f"{line.error:8.1e}"
        share = line.floor_us / line.us
        print(
            f"{line.case:28s} {line.tokens:6d} {line.us:8.2f} {line.floor_us:8.2f} {share:6.3f} "
            f"{error}",
            flush=True,
        )
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(line) for line in lines], indent=1))
    return 0


def _lines(counts: list[int]) -> Iterator[Line]:
    for outputs, inputs in PROJECTIONS:
        yield from _projection(outputs, inputs, counts)
    for outputs in WIDE:
        yield from _wide_projection(outputs, counts)
    yield from _fp8_experts(counts)
    yield from _mxfp4_experts(counts)


def _projection(outputs: int, inputs: int, counts: list[int]) -> Iterator[Line]:
    size = outputs * inputs
    weights = [_fp8(outputs, inputs) for _ in range(2 + int(2e8 / size))]
    scale = _scale(blocks(outputs), blocks(inputs), inputs=inputs)
    plain = [weight.bfloat16() for weight in weights]
    name = f"linear {outputs}x{inputs}"
    for count in counts:
        x = _draw(count, inputs)
        us = _time(block_linear, [(x, w, scale) for w in weights])
        error = _error("block_linear", (x, weights[0], scale))
        yield Line(f"{name} fp8", count, us, _floor(size), error)
        us = _time(F.linear, [(x, w) for w in plain])
        yield Line(f"{name} bf16", count, us, _floor(2 * size), None)


def _wide_projection(outputs: int, counts: list[int]) -> Iterator[Line]:
    """float32 weights, bfloat16 tokens."""
    size = 4 * outputs * HIDDEN
    weights = [torch.randn(outputs, HIDDEN, device=DEVICE) / HIDDEN**0.5 for _ in range(24)]
    for count in counts:
        x = _draw(count, HIDDEN)
        us = _time(wide_linear, [(x, w) for w in weights])
        wanted = x.double() @ weights[0].double().T
        error = ((wide_linear(x, weights[0]) - wanted).norm() / wanted.norm()).item()
        yield Line(f"linear {outputs}x{HIDDEN} float32", count, us, _floor(size), error)
        us = _time(F.linear, [(x.float(), w) for w in weights])
        yield Line(f"linear {outputs}x{HIDDEN} library", count, us, _floor(size), None)


def _fp8_experts(counts: list[int]) -> Iterator[Line]:
    own, shared = _block_experts(EXPERTS), tuple(t[0] for t in _block_experts(1))
    size = 3 * INNER * HIDDEN
    gate_up, down = own[0].bfloat16(), own[2].bfloat16()
    for count in counts:
        x, shares = _draw(count, HIDDEN), torch.rand(count, TOP_K, device=DEVICE)
        routings, hit = _routings(count, EXPERTS, TOP_K)
        us = _time(block_experts, [(x, *own, r, shares, None, *shared) for r in routings])
        few = tuple(t[:CHECKED] for t in own)
        given = (x, *few, routings[0] % CHECKED, shares, None, *shared)
        error = _error("block_experts", given)
        yield Line("experts + shared fp8", count, us, _floor((hit + 1) * size), error)
        us = _time(block_experts, [(x, *own, r, shares) for r in routings])
        yield Line("experts fp8", count, us, _floor(hit * size), None)
        us = _time(grouped_experts, [(x, gate_up, down, r, shares) for r in routings])
        yield Line("experts bf16", count, us, _floor(2 * hit * size), None)


def _mxfp4_experts(counts: list[int]) -> Iterator[Line]:
    own = (
        _bytes(0, 256, EXPERTS, 2 * V4_INNER, V4_HIDDEN // 2),
        _bytes(118, 124, EXPERTS, 2 * V4_INNER, V4_HIDDEN // 32),
        _bytes(0, 256, EXPERTS, V4_HIDDEN, V4_INNER // 2),
        _bytes(118, 124, EXPERTS, V4_HIDDEN, V4_INNER // 32),
    )
    own = repack_mxfp4(*own[:2], True), repack_mxfp4(*own[2:], False)
    size = 3 * V4_INNER * V4_HIDDEN * (1 / 2 + 1 / 32)
    for count in counts:
        x, shares = _draw(count, V4_HIDDEN), torch.rand(count, V4_TOP_K, device=DEVICE)
        routings, hit = _routings(count, EXPERTS, V4_TOP_K)
        us = _time(repacked_experts, [(x, *own, r, shares, V4_LIMIT) for r in routings])
        given = (x, *(t[:CHECKED] for t in own), routings[0] % CHECKED, shares, V4_LIMIT)
        error = _error("repacked_experts", given)
        yield Line("experts mxfp4", count, us, _floor(hit * size), error)


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).bfloat16()


def _fp8(*shape: int) -> Tensor:
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    for piece in values if len(shape) > 2 else values[None]:
        piece.copy_(torch.randn(piece.shape, device=DEVICE))
    return values


def _scale(*grid: int, inputs: int) -> Tensor:
    return (torch.rand(grid, device=DEVICE) + 0.5) * inputs**-0.5


def _bytes(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, device=DEVICE)


def _block_experts(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        _fp8(count, 2 * INNER, HIDDEN),
        _scale(count, 2 * blocks(INNER), blocks(HIDDEN), inputs=HIDDEN),
        _fp8(count, HIDDEN, INNER),
        _scale(count, blocks(HIDDEN), blocks(INNER), inputs=INNER),
    )


def _routings(tokens: int, experts: int, top_k: int) -> tuple[list[Tensor], float]:
    """Routings int32 [tokens, top_k] spread evenly, and how many experts one of them reads."""
    routings = [
        torch.rand(tokens, experts, device=DEVICE).argsort(-1)[:, :top_k].int().contiguous()
        for _ in range(ROTATION)
    ]
    return routings, sum(r.unique().numel() for r in routings) / ROTATION


def _floor(size: float) -> float:
    return size / BANDWIDTH * 1e6


def _error(name: str, args: tuple[Any, ...]) -> float:
    """Norm of the difference from the specification in float64, over the norm of that."""
    found = getattr(torch.ops.freewheel, name).default(*args)
    expected = SPECIFICATIONS[name](args[0].double(), *args[1:])
    return ((found.double() - expected).norm() / expected.norm()).item()


def _time(call: Callable[..., Tensor], arguments: list[tuple[Any, ...]]) -> float:
    """Microseconds a call: the median of graph replays of all calls, two at a time."""
    call(*arguments[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args in arguments:
            call(*args)
    graph.replay()
    times: list[float] = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 500 / len(arguments))
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    sys.exit(main())
