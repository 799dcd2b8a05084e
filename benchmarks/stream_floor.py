# SPDX-License-Identifier: Apache-2.0
"""Bytes that one round of a DeepSeek-V4 model reads at the least: weights, and rows of caches."""

from __future__ import annotations

from freewheel.spec.compressed import CompressedSpec, LayerKind

BF16, FLOAT = 2, 4


def stream_floor(spec: CompressedSpec, batch: int, context: int, depth: int) -> float:
    """Bytes of `batch` rows at `context` tokens, verifying `depth` drafts and writing as many.

    As the engine stores them: routers, gates and stream weights in float32, the rest in
    bfloat16. Experts count by how many of them so many tokens choose on average.
    """
    width = 1 + depth
    target = sum(_layer(spec, kind, batch, width, context) for kind in spec.kinds)
    sliding = LayerKind.SLIDING
    join = BF16 * 2 * spec.hidden_size**2
    drafts = _layer(spec, sliding, batch, width, context) + join
    drafts += (depth - 1) * (_layer(spec, sliding, batch, 1, context) + join)
    heads = (1 + depth) * BF16 * spec.vocab_size * spec.hidden_size
    return target + drafts + heads


def _layer(spec: CompressedSpec, kind: LayerKind, batch: int, width: int, context: int) -> float:
    tokens, hidden = batch * width, spec.hidden_size
    return (
        _attention(spec, kind, batch, tokens, context)
        + _experts(spec, tokens)
        + 2 * FLOAT * (2 + spec.hyper.streams) * spec.hyper.streams**2 * hidden
    )


def _attention(
    spec: CompressedSpec, kind: LayerKind, batch: int, tokens: int, context: int
) -> float:
    own, index, hidden = spec.attention, spec.indexer, spec.hidden_size
    elements = hidden * (own.q_lora_rank + own.head_dim)
    elements += own.heads * own.head_dim * (own.q_lora_rank + own.group_rank)
    elements += hidden * own.groups * own.group_rank
    rows = tokens * min(context, own.window)
    read = 0.0
    if kind is LayerKind.HEAVY:
        elements += 2 * own.head_dim * hidden
        rows += tokens * (context // spec.ratio(kind))
    elif kind is LayerKind.SPARSE:
        entries = context // spec.ratio(kind)
        elements += 4 * (own.head_dim + index.dim) * hidden
        read += FLOAT * index.heads * hidden
        elements += index.heads * index.dim * own.q_lora_rank + batch * entries * index.dim
        rows += tokens * min(entries, index.topk)
    return read + BF16 * (elements + rows * own.head_dim)


def _experts(spec: CompressedSpec, tokens: int) -> float:
    moe, hidden = spec.moe, spec.hidden_size
    chosen = moe.experts * (1 - (1 - moe.top_k / moe.experts) ** tokens)
    return BF16 * 3 * hidden * moe.width * (chosen + moe.shared) + FLOAT * moe.experts * hidden
