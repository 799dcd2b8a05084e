# SPDX-License-Identifier: Apache-2.0
"""Batches drawn on the training device from the token streams of `prepare.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from corpus import SOURCES

STREAMS = (*SOURCES, "short", "long")
# Shares of the rows of a batch, by the streams above.
SHORT_MIX = (0.24, 0.06, 0.13, 0.17, 0.40, 0.0)
LONG_MIX = (0.20, 0.05, 0.10, 0.13, 0.20, 0.32)


@dataclass
class Streams:
    tokens: Tensor  # int16 [N], all streams end to end
    begins: list[int]
    sizes: list[int]
    starts: list[Tensor]  # int64 [n], document or paragraph starts, absolute
    generator: torch.Generator

    def batch(self, rows: int, length: int, mix: tuple[float, ...]) -> Tensor:
        """int64 [rows, length]; the mix is kept as exactly as whole rows allow."""
        device = self.tokens.device
        edges = [round(rows * sum(mix[: i + 1])) for i in range(len(mix))]
        parts: list[Tensor] = []
        for i, (low, high) in enumerate(zip([0, *edges], edges, strict=False)):
            if high > low:
                parts.append(self._rows(i, high - low, length))
        out = torch.cat(parts)
        return out[torch.randperm(rows, device=device, generator=self.generator)]

    def _rows(self, stream: int, rows: int, length: int) -> Tensor:
        begin, size, starts = self.begins[stream], self.sizes[stream], self.starts[stream]
        device = self.tokens.device

        def draw(high: int) -> Tensor:
            return torch.randint(high, (rows,), device=device, generator=self.generator)

        first = starts[draw(len(starts))]
        if STREAMS[stream] in SOURCES:
            # Half of the prose rows open like a prompt: BOS, then a paragraph.
            anywhere = begin + draw(size)
            opened = draw(2).bool()
            first = torch.where(opened, first - 1, anywhere)
        first = first.clamp(begin, begin + size - length)
        rows_out = self.tokens[first[:, None] + torch.arange(length, device=device)].long()
        if STREAMS[stream] in SOURCES:
            rows_out[:, 0] = torch.where(opened, 0, rows_out[:, 0])
        return rows_out


def load_streams(folder: Path, device: torch.device, seed: int) -> Streams:
    with np.load(folder / "tokens.npz") as arrays:
        parts = [arrays[name].astype(np.int16) for name in STREAMS]
        starts = [arrays[f"{name}_starts"] for name in STREAMS]
    sizes = [p.size for p in parts]
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    return Streams(
        torch.from_numpy(np.concatenate(parts)).to(device),
        begins,
        sizes,
        [torch.from_numpy(s + b).to(device) for s, b in zip(starts, begins, strict=True)],
        generator,
    )
