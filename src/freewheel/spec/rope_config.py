# SPDX-License-Identifier: Apache-2.0
"""Reads the rotary settings of a config, in every spelling that published checkpoints use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

from freewheel.errors import CheckpointError, UnsupportedModel
from freewheel.spec.config_fields import MISSING, Fields
from freewheel.spec.model import RopeSpec, YarnSpec

LAYER_KEYS = ("main", "indexed_attention", "full_attention")
"""Keys under which nested settings may hold those of the layers these families have."""

READ_KEYS = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "truncate",
        "type",
    }
)


def read_rope(config: Fields, dim: int, max_positions: int) -> tuple[RopeSpec, float]:
    """The rotary settings for `dim` rotated dimensions, and the factor on the attention's scale.

    Accepts `rope_scaling` beside `rope_theta`, and `rope_parameters`, flat or keyed by layer kind.
    The factor is (0.1 * mscale_all_dim * ln(factor) + 1)^2, 1 without YaRN or mscale_all_dim
    (transformers, `yarn_apply_mscale`). Raises CheckpointError for a missing or contradictory
    value, UnsupportedModel for a kind of scaling other than YaRN.
    """
    settings = _settings(config)
    theta = _theta(config, settings)
    kind = settings.text("rope_type", settings.text("type", "default"))
    refuse_unknown(settings, kind)
    if settings.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel(f"{config.where}: partial_rotary_factor must be 1 or absent")
    if kind == "default":
        return RopeSpec(dim, theta, None), 1.0
    yarn, scale = read_yarn(settings, max_positions)
    return RopeSpec(dim, theta, yarn), scale


def _settings(config: Fields) -> Fields:
    """The one set of rotary settings, whichever field holds it."""
    scaling = _unkeyed(config, config.mapping("rope_scaling"), "rope_scaling")
    parameters = _unkeyed(config, config.mapping("rope_parameters"), "rope_parameters")
    for name in scaling.keys() & parameters.keys():
        if scaling[name] != parameters[name]:
            raise CheckpointError(
                f"{config.where}: rope_scaling and rope_parameters disagree on {name}: "
                f"{scaling[name]!r} and {parameters[name]!r}"
            )
    return Fields({**parameters, **scaling}, f"{config.where}: rotary settings")


def _unkeyed(config: Fields, values: Mapping[str, object], name: str) -> Mapping[str, object]:
    """`values`, or the entry for these families' layers if `values` is keyed by layer kind."""
    keyed = {
        key: cast("Mapping[str, object]", value)
        for key, value in values.items()
        if isinstance(value, Mapping)
    }
    if not keyed:
        return values
    shared = {k: v for k, v in values.items() if k not in keyed}
    chosen = next((keyed[key] for key in LAYER_KEYS if key in keyed), None)
    if chosen is None or any(key not in LAYER_KEYS or keyed[key] != chosen for key in keyed):
        raise UnsupportedModel(
            f"{config.where}: {name} has settings for {', '.join(sorted(keyed))}; "
            f"one set is supported, under any of {', '.join(LAYER_KEYS)}"
        )
    return {**shared, **chosen}


def _theta(config: Fields, settings: Fields) -> float:
    """The rotary base. It has no default: a wrong one spoils long contexts without an error."""
    outer, inner = config.get("rope_theta"), settings.get("rope_theta")
    theta = (config if inner is MISSING else settings).number("rope_theta")
    if theta <= 1:
        raise config.wrong("rope_theta", "above 1", theta)
    if outer is not MISSING and config.number("rope_theta") != theta:
        raise CheckpointError(
            f"{config.where}: rope_theta is {outer!r} at the top, {inner!r} in the rotary settings"
        )
    return theta


def refuse_unknown(settings: Fields, kind: str) -> None:
    """Raise UnsupportedModel for a kind of scaling, or a setting, that is not implemented."""
    if kind not in {"default", "yarn"}:
        raise UnsupportedModel(
            f"{settings.where}: rope_type {kind!r} is not supported; supported: default, yarn"
        )
    unknown = sorted(k for k in settings.values.keys() - READ_KEYS if settings.has(k))
    if unknown:
        raise UnsupportedModel(f"{settings.where}: {', '.join(unknown)} is not supported")


def read_yarn(settings: Fields, max_positions: int) -> tuple[YarnSpec, float]:
    """The stretch that `settings` describe, and the factor on the attention's scale."""
    original = settings.whole("original_max_position_embeddings", max_positions)
    factor = settings.positive("factor", max_positions / original)
    mscale, mscale_all_dim = _mscale(settings, "mscale"), _mscale(settings, "mscale_all_dim")
    if mscale and mscale_all_dim:
        derived = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    else:
        derived = yarn_mscale(factor, 1.0)
    yarn = YarnSpec(
        factor=factor,
        original_positions=original,
        beta_fast=settings.positive("beta_fast", 32.0),
        beta_slow=settings.positive("beta_slow", 1.0),
        cos_sin_factor=settings.positive("attention_factor", derived),
        truncate=settings.flag("truncate", True),
    )
    return yarn, yarn_mscale(factor, mscale_all_dim) ** 2 if mscale_all_dim else 1.0


def _mscale(settings: Fields, name: str) -> float:
    """0 is as good as absent."""
    value = settings.number(name, 0.0)
    if value < 0:
        raise settings.wrong(name, "at least 0", value)
    return value


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1; 1 where nothing is stretched (YaRN, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
