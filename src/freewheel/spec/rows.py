# SPDX-License-Identifier: Apache-2.0
"""How cached rows may be stored: as they are, or packed into bytes with FP8 (e4m3) values.

A packed row's numbers are quantised once, when the row is stored; whoever reads it reads the same
bytes. Layouts are those of the kernels that the field shares (FlashMLA, DeepGEMM).
"""

from __future__ import annotations

from dataclasses import dataclass

LATENT_TILE, KEY_TILE = 128, 64
"""Values that one scale covers: float32 in latents, a power of two (E8M0) in keys."""


@dataclass(frozen=True)
class Fp8LatentRow:
    """`rank` FP8 values, a float32 scale for each 128 of them, `rope` bfloat16 values: 656 bytes
    of 512 and 64."""

    rank: int
    rope: int

    @property
    def bytes(self) -> int:
        return self.rank + 4 * (self.rank // LATENT_TILE) + 2 * self.rope

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of a row's parts; each part of all rows of a page lies together."""
        return (self.bytes,)


@dataclass(frozen=True)
class Fp8IndexRow:
    """`dim` FP8 values and one float32 scale: 132 bytes of 128. A page's scales lie behind all of
    its values."""

    dim: int

    @property
    def bytes(self) -> int:
        return self.dim + 4

    @property
    def parts(self) -> tuple[int, ...]:
        """As `Fp8LatentRow.parts`."""
        return (self.dim, 4)


@dataclass(frozen=True)
class Fp8KeyRow:
    """`dim - rope` FP8 values, `rope` bfloat16 values, and a byte of E8M0 for each 64 of the first,
    filled up to eight: 584 bytes of 512 and 64. A page's scales lie behind all of its values."""

    dim: int
    rope: int

    @property
    def scaled(self) -> int:
        """Values in FP8."""
        return self.dim - self.rope

    @property
    def bytes(self) -> int:
        return sum(self.parts)

    @property
    def parts(self) -> tuple[int, ...]:
        """As `Fp8LatentRow.parts`."""
        return (self.scaled + 2 * self.rope, -(-self.scaled // (8 * KEY_TILE)) * 8)


PackedRow = Fp8LatentRow | Fp8IndexRow | Fp8KeyRow
