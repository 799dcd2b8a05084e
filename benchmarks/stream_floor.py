# SPDX-License-Identifier: Apache-2.0
"""Bytes that one round of a DeepSeek-V4 model reads at the least: weights, and rows of caches."""

from __future__ import annotations

from typing import NamedTuple

from freewheel.spec.compressed import CompressedSpec, LayerKind

BF16, FLOAT = 2, 4


class Sizes(NamedTuple):
    """Bytes of a weight: of projections, and of experts, the shared one among the projections."""

    projections: float
    experts: float


def stream_floor(spec: CompressedSpec, batch: int, context: int, depth: int, sizes: Sizes) -> float:
    """Bytes of `batch` rows at `context` tokens, verifying `depth` drafts and writing as many.

    As the engine stores them: routers, gates and stream weights in float32; compressors, caches
    and heads in bfloat16; the rest as `sizes` says. Experts count by how many of them so many
    tokens choose on average.
    """
    width = 1 + depth
    target = sum(_layer(spec, kind, batch, width, context, sizes) for kind in spec.kinds)
    sliding = LayerKind.SLIDING
    join = sizes.projections * 2 * spec.hidden_size**2
    drafts = _layer(spec, sliding, batch, width, context, sizes) + join
    drafts += (depth - 1) * (_layer(spec, sliding, batch, 1, context, sizes) + join)
    heads = (1 + depth) * BF16 * spec.vocab_size * spec.hidden_size
    return target + drafts + heads


def _layer(
    spec: CompressedSpec, kind: LayerKind, batch: int, width: int, context: int, sizes: Sizes
) -> float:
    tokens, hidden = batch * width, spec.hidden_size
    return (
        _attention(spec, kind, batch, tokens, context, sizes)
        + _experts(spec, tokens, sizes)
        + 2 * FLOAT * (2 + spec.hyper.streams) * spec.hyper.streams**2 * hidden
    )


def _attention(
    spec: CompressedSpec, kind: LayerKind, batch: int, tokens: int, context: int, sizes: Sizes
) -> float:
    own, index, hidden = spec.attention, spec.indexer, spec.hidden_size
    weights = hidden * (own.q_lora_rank + own.head_dim)
    weights += own.heads * own.head_dim * (own.q_lora_rank + own.group_rank)
    weights += hidden * own.groups * own.group_rank
    rows = tokens * min(context, own.window)
    plain, read = 0.0, 0.0
    if kind is LayerKind.HEAVY:
        plain += 2 * own.head_dim * hidden
        rows += tokens * (context // spec.ratio(kind))
    elif kind is LayerKind.SPARSE:
        entries = context // spec.ratio(kind)
        plain += 4 * (own.head_dim + index.dim) * hidden + batch * entries * index.dim
        read += FLOAT * index.heads * hidden
        weights += index.heads * index.dim * own.q_lora_rank
        rows += tokens * min(entries, index.topk)
    return read + sizes.projections * weights + BF16 * (plain + rows * own.head_dim)


def _experts(spec: CompressedSpec, tokens: int, sizes: Sizes) -> float:
    moe, hidden = spec.moe, spec.hidden_size
    chosen = moe.experts * (1 - (1 - moe.top_k / moe.experts) ** tokens)
    weights = sizes.experts * chosen + sizes.projections * moe.shared
    return 3 * hidden * moe.width * weights + FLOAT * moe.experts * hidden
