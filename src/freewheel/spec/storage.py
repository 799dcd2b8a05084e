# SPDX-License-Identifier: Apache-2.0
"""Which rows a model's caches have: one choice for what is attended to, and one for what is scored
by, made when it is built.

What is attended to and what is scored by may be packed. What later rows are still made of (the raw
inputs of compressors) never is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from freewheel.errors import ConfigError
from freewheel.spec.cache import CacheField
from freewheel.spec.rows import KEY_TILE, LATENT_TILE, Fp8IndexRow, Fp8KeyRow, Fp8LatentRow

Layers = tuple[int, ...]


class RowStorage(Protocol):
    """Makes the fields of a model's cache groups. Raises ConfigError for rows that do not fit."""

    def latents(self, name: str, rank: int, rope: int, layers: Layers) -> CacheField:
        """Latents of MLA: `rank` values, and `rope` rotated ones."""
        ...

    def index_keys(self, name: str, dim: int, layers: Layers) -> CacheField:
        """What an indexer scores by."""
        ...

    def keys(self, name: str, dim: int, rope: int, layers: Layers) -> CacheField:
        """Keys that are also values; the last `rope` of `dim` are rotated."""
        ...


@dataclass(frozen=True)
class PlainStorage:
    """Every row in `dtype`, as it is."""

    dtype: str

    def latents(self, name: str, rank: int, rope: int, layers: Layers) -> CacheField:
        return CacheField(name, rank + rope, self.dtype, layers)

    def index_keys(self, name: str, dim: int, layers: Layers) -> CacheField:
        return CacheField(name, dim, self.dtype, layers)

    def keys(self, name: str, dim: int, rope: int, layers: Layers) -> CacheField:
        del rope
        return CacheField(name, dim, self.dtype, layers)


@dataclass(frozen=True)
class Fp8IndexStorage:
    """FP8 index keys, in the layout of `spec.rows`; every other row as `others` has it."""

    others: PlainStorage

    def latents(self, name: str, rank: int, rope: int, layers: Layers) -> CacheField:
        return self.others.latents(name, rank, rope, layers)

    def index_keys(self, name: str, dim: int, layers: Layers) -> CacheField:
        return _packed_index_keys("fp8-index", name, dim, layers)

    def keys(self, name: str, dim: int, rope: int, layers: Layers) -> CacheField:
        return self.others.keys(name, dim, rope, layers)


@dataclass(frozen=True)
class Fp8Storage:
    """FP8 rows, in the layouts of `spec.rows`."""

    def latents(self, name: str, rank: int, rope: int, layers: Layers) -> CacheField:
        if not rank or rank % LATENT_TILE or not rope or rope % 8:
            raise _misfit(
                "fp8",
                f"latents of {rank} + {rope} values (kv_lora_rank, qk_rope_head_dim): FP8 rows "
                f"take a multiple of {LATENT_TILE} and one of 8",
            )
        return CacheField.pack(name, Fp8LatentRow(rank, rope), layers)

    def index_keys(self, name: str, dim: int, layers: Layers) -> CacheField:
        return _packed_index_keys("fp8", name, dim, layers)

    def keys(self, name: str, dim: int, rope: int, layers: Layers) -> CacheField:
        if dim <= rope or (dim - rope) % KEY_TILE or not rope or rope % 8:
            raise _misfit(
                "fp8",
                f"keys of {dim} values, {rope} of them rotated (head_dim, qk_rope_head_dim): FP8 "
                f"rows take a multiple of {KEY_TILE} unrotated ones and of 8 rotated ones",
            )
        return CacheField.pack(name, Fp8KeyRow(dim, rope), layers)


def _packed_index_keys(asked: str, name: str, dim: int, layers: Layers) -> CacheField:
    if dim != LATENT_TILE:
        raise _misfit(
            asked, f"index keys of {dim} values (index_head_dim): FP8 rows take {LATENT_TILE}"
        )
    return CacheField.pack(name, Fp8IndexRow(dim), layers)


def _misfit(asked: str, what: str) -> ConfigError:
    return ConfigError(f'kv_cache_dtype: "{asked}" does not fit this model: {what}; use "bf16"')
