# SPDX-License-Identifier: Apache-2.0
"""Cached rows of one field in one layer: one class for each way to store them, with the same calls.

A call is an op over such rows; the class chooses which. It follows from the field's format, which
is chosen when the engine is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from freewheel import ops
from freewheel.spec.rows import Fp8IndexRow, Fp8KeyRow, Fp8LatentRow
from freewheel.state import CachePool

Placed = tuple[Tensor, Tensor, Tensor]
"""The indexer's queries and gates, and the attention's queries."""


class Latents(Protocol):
    """Latents of latent attention. Arguments behind the cache are those of the ops named."""

    def norm(self, *args: Any) -> Tensor:
        """`ops.norm_latents`."""
        ...

    def attend(
        self,
        query: Tensor,
        slots: Tensor,
        scale: float,
        value_up: Tensor,
        table: Tensor,
        rows: Tensor,
    ) -> Tensor:
        """`ops.sparse_mla_values` over slots in the pages of `rows` of `table`."""
        ...


class IndexKeys(Protocol):
    """What an indexer scores by."""

    @property
    def page_rows(self) -> int:
        """Rows of a page."""
        ...

    def place(self, *args: Any) -> tuple[Tensor, Tensor]:
        """`ops.index_queries`."""
        ...

    def place_all(self, placed: tuple[Any, ...], absorbed: tuple[Any, ...]) -> Placed:
        """`place` of the arguments `placed`, and `ops.absorb_query` of the others.

        `absorbed`: (query, key_up, interleaved), at the positions and by the table of `placed`.
        """
        ...

    def store_entries(self, *args: Any) -> None:
        """`ops.store_entries`."""
        ...

    def logits(
        self, query: Tensor, gates: Tensor, table: Tensor, rows: Tensor, lens: Tensor, skip: int
    ) -> Tensor:
        """`ops.index_logits`."""
        ...


class Keys(Protocol):
    """Keys that are also values; those of tokens, or of windows (entries)."""

    @property
    def tensor(self) -> Tensor:
        """[n_pages, page_rows, D or bytes]."""
        ...

    def place(self, *args: Any) -> Tensor:
        """`ops.place_heads`."""
        ...

    def store_entries(self, *args: Any) -> None:
        """`ops.store_entries`."""
        ...

    def attend(
        self, query: Tensor, slots: Tensor, entries: Tensor, picks: Tensor, *args: Any
    ) -> Tensor:
        """`ops.window_attention`, of these keys and of `entries` stored alike."""
        ...


@dataclass(frozen=True)
class PlainLatents:
    tensor: Tensor  # float [n_pages, page_size, C + Dr]

    def norm(self, *args: Any) -> Tensor:
        return ops.norm_latents(self.tensor, *args)

    def attend(
        self,
        query: Tensor,
        slots: Tensor,
        scale: float,
        value_up: Tensor,
        table: Tensor,
        rows: Tensor,
    ) -> Tensor:
        own = (query, self.tensor, slots, scale, value_up)
        return ops.sparse_mla_values(*own, page_table=table, rows=rows)


@dataclass(frozen=True)
class Fp8Latents:
    tensor: Tensor  # uint8 [n_pages, page_size, bytes]

    def norm(self, *args: Any) -> Tensor:
        return ops.fp8_norm_latents(self.tensor, *args)

    def attend(
        self,
        query: Tensor,
        slots: Tensor,
        scale: float,
        value_up: Tensor,
        table: Tensor,
        rows: Tensor,
    ) -> Tensor:
        del table, rows  # each query reads its own keys
        mixed = ops.fp8_sparse_mla(query, self.tensor, slots, scale, value_up.shape[1])
        return ops.expand_values(mixed, value_up)


@dataclass(frozen=True)
class PlainIndexKeys:
    tensor: Tensor  # float [n_pages, page_rows, Di]

    @property
    def page_rows(self) -> int:
        return self.tensor.shape[1]

    def place(self, *args: Any) -> tuple[Tensor, Tensor]:
        return ops.index_queries(self.tensor, *args)

    def place_all(self, placed: tuple[Any, ...], absorbed: tuple[Any, ...]) -> Placed:
        queries, gates, own = ops.place_queries(self.tensor, *placed, *absorbed)
        return queries, gates, own

    def store_entries(self, *args: Any) -> None:
        ops.store_entries(self.tensor, *args)

    def logits(
        self, query: Tensor, gates: Tensor, table: Tensor, rows: Tensor, lens: Tensor, skip: int
    ) -> Tensor:
        return ops.index_logits(query, gates, self.tensor, table, rows, lens, skip)


@dataclass(frozen=True)
class Fp8IndexKeys:
    tensor: Tensor  # uint8 [n_pages, page_rows, bytes]

    @property
    def page_rows(self) -> int:
        return self.tensor.shape[1]

    def place(self, *args: Any) -> tuple[Tensor, Tensor]:
        return ops.fp8_index_queries(self.tensor, *args)

    def place_all(self, placed: tuple[Any, ...], absorbed: tuple[Any, ...]) -> Placed:
        queries, gates, own = ops.fp8_place_queries(self.tensor, *placed, *absorbed)
        return queries, gates, own

    def store_entries(self, *args: Any) -> None:
        ops.fp8_store_index_entries(self.tensor, *args)

    def logits(
        self, query: Tensor, gates: Tensor, table: Tensor, rows: Tensor, lens: Tensor, skip: int
    ) -> Tensor:
        return ops.fp8_index_logits(query, gates, self.tensor, table, rows, lens, skip)


@dataclass(frozen=True)
class PlainKeys:
    tensor: Tensor  # float [n_pages, page_rows, D]

    def place(self, *args: Any) -> Tensor:
        return ops.place_heads(self.tensor, *args)

    def store_entries(self, *args: Any) -> None:
        ops.store_entries(self.tensor, *args)

    def attend(
        self, query: Tensor, slots: Tensor, entries: Tensor, picks: Tensor, *args: Any
    ) -> Tensor:
        return ops.window_attention(query, self.tensor, slots, entries, picks, *args)


@dataclass(frozen=True)
class Fp8Keys:
    tensor: Tensor  # uint8 [n_pages, page_rows, bytes]

    def place(self, *args: Any) -> Tensor:
        return ops.fp8_place_heads(self.tensor, *args)

    def store_entries(self, *args: Any) -> None:
        ops.fp8_store_entries(self.tensor, *args)

    def attend(
        self, query: Tensor, slots: Tensor, entries: Tensor, picks: Tensor, *args: Any
    ) -> Tensor:
        return ops.fp8_window_attention(query, self.tensor, slots, entries, picks, *args)


def latents_of(cache: CachePool, field: str, layer: int) -> Latents:
    """Latents of model layer `layer`, stored as `field` is."""
    stored = cache.layer(field, layer)
    packed = isinstance(cache.field(field).packed, Fp8LatentRow)
    return Fp8Latents(stored) if packed else PlainLatents(stored)


def index_keys_of(cache: CachePool, field: str, layer: int) -> IndexKeys:
    """Index keys, or index entries, of model layer `layer`, stored as `field` is."""
    stored = cache.layer(field, layer)
    packed = isinstance(cache.field(field).packed, Fp8IndexRow)
    return Fp8IndexKeys(stored) if packed else PlainIndexKeys(stored)


def keys_of(cache: CachePool, field: str, layer: int) -> Keys:
    """Keys, or entries, of model layer `layer`, stored as `field` is."""
    stored = cache.layer(field, layer)
    packed = isinstance(cache.field(field).packed, Fp8KeyRow)
    return Fp8Keys(stored) if packed else PlainKeys(stored)


def tensor_of(cache: CachePool, field: str, layer: int) -> Tensor:
    """Rows of model layer `layer` as they are stored."""
    return cache.layer(field, layer)
