# SPDX-License-Identifier: Apache-2.0
"""Reads which layers run an indexer of their own, and which hold a mixture of experts."""

from __future__ import annotations

from freewheel.errors import CheckpointError, UnsupportedModel
from freewheel.spec.config_fields import Fields


def full_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers run their own indexer: the explicit list, else the pattern, else the schedule.

    The schedule makes layer i full iff max(i - offset + 1, 0) is a multiple of freq, offset 2 if
    absent (transformers, GlmMoeDsaConfig). Entries past the last layer are not read: whether the
    multi-token-prediction layer has an indexer shows from its tensors.
    """
    freq = fields.whole("index_topk_freq", 1)
    offset = fields.whole("index_skip_topk_offset", 2, low=0)
    pattern = fields.get("index_topk_pattern")
    letters = tuple(pattern) if isinstance(pattern, str) else fields.items("index_topk_pattern")
    named = fields.items("indexer_types")
    if named is not None:
        full = _flags(fields, "indexer_types", named, layers)
    elif letters is not None:
        full = _flags(fields, "index_topk_pattern", letters, layers)
    else:
        full = tuple(max(i - offset + 1, 0) % freq == 0 for i in range(layers))
    if not full[0]:
        raise CheckpointError(f"{fields.where}: layer 0 shares picks, but no layer is below it")
    return full


def _flags(fields: Fields, name: str, kinds: tuple[object, ...], layers: int) -> tuple[bool, ...]:
    meaning = {"full": True, "F": True, "shared": False, "S": False}
    if len(kinds) < layers:
        raise CheckpointError(f"{fields.where}: {name}: {len(kinds)} entries, {layers} layers")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in meaning:
            raise UnsupportedModel(f"{fields.where}: {name} holds {kind!r}; known: full, shared")
    return tuple(meaning[str(kind)] for kind in kinds[:layers])


def sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers hold a mixture of experts; an entry past the last layer is the MTP layer's."""
    named = fields.items("mlp_layer_types")
    if named is None:
        dense_first = fields.whole("first_k_dense_replace", low=0)
        return tuple(i >= dense_first for i in range(layers))
    fields.get("first_k_dense_replace")  # superseded by the list
    if len(named) < layers:
        raise CheckpointError(
            f"{fields.where}: mlp_layer_types: {len(named)} entries, {layers} layers"
        )
    for kind in named:
        if kind not in ("dense", "sparse"):
            raise UnsupportedModel(
                f"{fields.where}: mlp_layer_types holds {kind!r}; known: dense, sparse"
            )
    return tuple(kind == "sparse" for kind in named)
