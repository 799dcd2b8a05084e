# SPDX-License-Identifier: Apache-2.0
"""Reads which kind each layer of a DeepSeek-V4 model is, and how its experts are chosen."""

from __future__ import annotations

from freewheel.errors import CheckpointError, UnsupportedModel
from freewheel.spec.compressed import CompressionSpec, LayerKind
from freewheel.spec.config_fields import Fields

PUBLISHED = CompressionSpec(sparse_ratio=4, heavy_ratio=128)
"""What a bare list of ratios means."""


def read_compression(fields: Fields) -> CompressionSpec:
    """Tokens an entry: compress_rates, or compress_rate_csa and _hca, or the published ones."""
    named = Fields(fields.mapping("compress_rates"), f"{fields.where}: compress_rates")
    csa = fields.whole("compress_rate_csa", PUBLISHED.sparse_ratio, low=2)
    hca = fields.whole("compress_rate_hca", PUBLISHED.heavy_ratio, low=2)
    unknown = sorted(named.values.keys() - {LayerKind.SPARSE, LayerKind.HEAVY})
    if unknown:
        raise UnsupportedModel(f"{named.where}: {', '.join(unknown)} is not supported")
    return CompressionSpec(
        sparse_ratio=named.whole(LayerKind.SPARSE, csa, low=2),
        heavy_ratio=named.whole(LayerKind.HEAVY, hca, low=2),
    )


def read_kinds(fields: Fields, layers: int, own: CompressionSpec) -> tuple[LayerKind, ...]:
    """The kind of every layer, by layer_types, compress_ratios, or both if they agree.

    compress_ratios may go on past the last layer: entry `layers` is the multi-token-prediction
    layer's, which reads its window alone. There is no default: a wrong guess would load.
    """
    types, ratios = fields.items("layer_types"), fields.items("compress_ratios")
    if types is None and ratios is None:
        raise CheckpointError(
            f"{fields.where}: the field compress_ratios (or layer_types) is missing"
        )
    by_type = None if types is None else _from_types(fields, types, layers)
    by_ratio = None if ratios is None else _from_ratios(fields, ratios, layers, own)
    if by_type is not None and by_ratio is not None and by_type != by_ratio:
        raise CheckpointError(f"{fields.where}: layer_types and compress_ratios disagree")
    kinds = by_type or by_ratio
    assert kinds is not None
    return kinds


def _from_types(fields: Fields, types: tuple[object, ...], layers: int) -> tuple[LayerKind, ...]:
    known = {kind.value: kind for kind in LayerKind}
    _check_count(fields, "layer_types", types, layers)
    for name in types:
        if not isinstance(name, str) or name not in known:
            raise UnsupportedModel(
                f"{fields.where}: layer_types holds {name!r}; known: {', '.join(known)}"
            )
    return tuple(known[str(name)] for name in types[:layers])


def _from_ratios(
    fields: Fields, ratios: tuple[object, ...], layers: int, own: CompressionSpec
) -> tuple[LayerKind, ...]:
    known = {
        0: LayerKind.SLIDING,
        own.sparse_ratio: LayerKind.SPARSE,
        own.heavy_ratio: LayerKind.HEAVY,
    }
    _check_count(fields, "compress_ratios", ratios, layers)
    numbers = [fields.as_whole("compress_ratios", ratio, low=0) for ratio in ratios]
    for ratio in numbers:
        if ratio not in known:
            raise UnsupportedModel(
                f"{fields.where}: compress_ratios holds {ratio}; known: "
                f"{', '.join(map(str, sorted(known)))}"
            )
    if any(numbers[layers:]):
        raise UnsupportedModel(
            f"{fields.where}: compress_ratios gives the multi-token-prediction layer a ratio of "
            f"{numbers[layers]}; only 0 is supported"
        )
    return tuple(known[ratio] for ratio in numbers[:layers])


def hashed_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers choose experts by the token's id: mlp_layer_types, else num_hash_layers."""
    named = fields.items("mlp_layer_types")
    if named is None:
        first = fields.whole("num_hash_layers", low=0)
        return tuple(i < first for i in range(layers))
    fields.get("num_hash_layers")  # superseded by the list
    _check_count(fields, "mlp_layer_types", named, layers)
    for kind in named:
        if kind not in ("hash_moe", "moe"):
            raise UnsupportedModel(
                f"{fields.where}: mlp_layer_types holds {kind!r}; known: hash_moe, moe"
            )
    return tuple(kind == "hash_moe" for kind in named[:layers])


def _check_count(fields: Fields, name: str, listed: tuple[object, ...], layers: int) -> None:
    if len(listed) < layers:
        raise CheckpointError(f"{fields.where}: {name}: {len(listed)} entries, {layers} layers")
