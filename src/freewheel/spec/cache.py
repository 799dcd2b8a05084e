# SPDX-License-Identifier: Apache-2.0
"""What a model stores for each token, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.spec.rows import PackedRow

ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "uint8": 1}


@dataclass(frozen=True)
class CacheField:
    """One kind of stored row: `width` elements of `dtype` in each of `layers`.

    `packed`: what the bytes of a row of uint8 stand for; None where elements stand for themselves.
    """

    name: str
    width: int
    dtype: str
    layers: tuple[int, ...]
    packed: PackedRow | None = None

    @staticmethod
    def pack(name: str, row: PackedRow, layers: tuple[int, ...]) -> CacheField:
        """The field whose rows are stored as `row` says."""
        return CacheField(name, row.bytes, "uint8", layers, row)

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row of one layer."""
        return self.width * ELEMENT_BYTES[self.dtype]

    @property
    def parts(self) -> tuple[int, ...]:
        """Elements of a row's parts; each part of all rows of a page lies together."""
        return (self.width,) if self.packed is None else self.packed.parts


@dataclass(frozen=True)
class CacheGroup:
    """Rows that share a page table.

    `page_size`: tokens that a page spans. `stride`: tokens that one stored row covers (1, 4, 128).
    `retention`: tokens behind `computed` that must stay readable; None keeps all of them.
    `resume`: how many of those a row needs that starts at the end of pages which another row
    wrote. Less than the retention where nothing that spans such an end is still unfinished; None
    says all of them.
    """

    name: str
    page_size: int
    stride: int
    retention: int | None
    fields: tuple[CacheField, ...]
    resume: int | None = None

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.stride < 1 or self.page_size % self.stride:
            raise ValueError(
                f"{self.name}: page_size {self.page_size} is no multiple of stride {self.stride}"
            )

    @property
    def page_rows(self) -> int:
        """Stored rows in one page of one layer."""
        return self.page_size // self.stride

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, over all fields and layers."""
        return self.page_rows * sum(f.row_bytes * len(f.layers) for f in self.fields)

    @property
    def token_bytes(self) -> float:
        """Bytes that one token adds, over all fields and layers."""
        return self.page_bytes / self.page_size

    @property
    def resume_tokens(self) -> int:
        """Tokens behind a page's end that a row needs to start there; 0 where all are kept."""
        return (self.retention or 0) if self.resume is None else self.resume

    def resume_columns(self, end: int) -> range:
        """Columns of the pages that hold those tokens, for a row that starts at `end`."""
        first = max(0, end - self.resume_tokens) // self.page_size
        return range(first, self.pages_for(end))

    def pages_for(self, tokens: int) -> int:
        """Pages that hold the first `tokens` tokens of a row."""
        return -(-tokens // self.page_size)
