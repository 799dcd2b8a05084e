# SPDX-License-Identifier: Apache-2.0
"""Sizes at which single ops are measured, and the bytes and operations that each needs.

Dimensions are those of DeepSeek-V3.2 (64 index heads of 128, latents of 512 + 64, top-k 2048) and,
for window attention and experts in MXFP4, of DeepSeek-V4-Flash. `heads` 16 and 8, and experts of
width 256, are one rank's share of eight; 128 and 64 heads are the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PAGE, TOP_K = 64, 2048
INDEX_HEADS, INDEX_DIM = 64, 128
RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
WINDOW, ENTRIES, KEY_DIM = 128, 512, 512
VOCABULARY = 129_280

PACKED_LATENT, PACKED_KEY = 656, 584
"""Bytes of a row of the FP8 caches: see `spec.rows`."""

BANDWIDTH, BF16_RATE = 4.25e12, 790e12
"""Bytes and operations a second that an H200 reaches in a large copy and a large product.

In FP8 twice as many operations.
"""

INDEX_LOGITS = ("index_logits", "fp8_index_logits")
LATENT_ATTENTION = ("sparse_mla", "fp8_sparse_mla")
WINDOW_ATTENTION = ("window_attention", "fp8_window_attention")
EXPERTS = ("block_experts", "mxfp4_experts", "repacked_experts")

HEADED = (*LATENT_ATTENTION, *WINDOW_ATTENTION, "absorb_query", "expand_values")
"""Ops whose cost depends on the number of heads."""


@dataclass(frozen=True)
class Cell:
    """One op at one size.

    `context`: keys of every row; `heads`: of attention; `dims`: of a product (outputs, inputs), or
    of experts (hidden size, width, experts, chosen of them).
    """

    op: str
    batch: int
    width: int
    context: int = 0
    heads: int = 16
    dims: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.batch * self.width

    @property
    def name(self) -> str:
        context = f" {self.context // 1024}k" if self.context else ""
        heads = f" h{self.heads}" if self.op in HEADED else ""
        dims = f" {self.dims[0]}x{self.dims[1]}" if self.op == "block_linear" else ""
        return f"b{self.batch} q{self.width}{context}{heads}{dims}"

    @property
    def floor_us(self) -> float:
        """The longer of: bytes read and written once, over `BANDWIDTH`; products over their rate.

        The keys that a query attends to count for that query alone, as peers count them. Of
        experts, as many are read as evenly random choices reach on average.
        """
        moved, operations = _COSTS[self.op](self)
        rate = 2 * BF16_RATE if self.op in ("fp8_index_logits", "block_linear") else BF16_RATE
        return 1e6 * max(moved / BANDWIDTH, operations / rate)


def _index_logits(cell: Cell) -> tuple[float, float]:
    row = INDEX_DIM + 4 if cell.op.startswith("fp8") else 2 * INDEX_DIM
    scores = cell.tokens * cell.context
    return cell.batch * cell.context * row + 4 * scores, 2 * scores * INDEX_HEADS * INDEX_DIM


def _topk_slots(cell: Cell) -> tuple[float, float]:
    return 4 * cell.tokens * (cell.context + TOP_K), 0


def _latent_attention(cell: Cell) -> tuple[float, float]:
    row = PACKED_LATENT if cell.op.startswith("fp8") else 2 * (RANK + ROPE)
    picked, ends = min(TOP_K, cell.context), 2 * cell.heads * (RANK + ROPE + RANK)
    moved = cell.tokens * (ends + picked * row)
    return moved, 2 * cell.tokens * cell.heads * picked * (2 * RANK + ROPE)


def _window_attention(cell: Cell) -> tuple[float, float]:
    row = PACKED_KEY if cell.op.startswith("fp8") else 2 * KEY_DIM
    picked, ends = WINDOW + ENTRIES, 2 * cell.heads * 2 * KEY_DIM
    moved = cell.tokens * (ends + picked * row)
    return moved, 2 * cell.tokens * cell.heads * picked * 2 * KEY_DIM


def _by_head(cell: Cell) -> tuple[float, float]:
    each = {"absorb_query": NOPE + RANK + 2 * ROPE, "expand_values": RANK + VALUE}[cell.op]
    weight = cell.heads * RANK * VALUE
    return 2 * cell.tokens * cell.heads * each + 2 * weight, 2 * cell.tokens * weight


def _block_linear(cell: Cell) -> tuple[float, float]:
    outputs, inputs = cell.dims
    ends = 2 * cell.tokens * (outputs + inputs)
    return outputs * inputs + ends, 2 * cell.tokens * outputs * inputs


def _experts(cell: Cell) -> tuple[float, float]:
    hidden, width, experts, chosen = cell.dims
    byte = 1 if cell.op == "block_experts" else 1 / 2 + 1 / 32
    reached = experts * (1 - (1 - chosen / experts) ** cell.tokens)
    each = 3 * hidden * width
    return reached * each * byte + 4 * cell.tokens * hidden, 2 * cell.tokens * chosen * each


def _choose(cell: Cell) -> tuple[float, float]:
    return 4 * cell.tokens * VOCABULARY, 0


_COSTS: dict[str, Callable[[Cell], tuple[float, float]]] = {
    **dict.fromkeys(INDEX_LOGITS, _index_logits),
    "topk_slots": _topk_slots,
    **dict.fromkeys(LATENT_ATTENTION, _latent_attention),
    **dict.fromkeys(WINDOW_ATTENTION, _window_attention),
    **dict.fromkeys(("absorb_query", "expand_values"), _by_head),
    "block_linear": _block_linear,
    **dict.fromkeys(EXPERTS, _experts),
    "choose": _choose,
}
"""Op -> (bytes, operations) of a cell."""


def _cells() -> tuple[Cell, ...]:
    logits = [(1, 1, 4), (8, 1, 32), (8, 2, 32), (8, 4, 32), (8, 6, 32), (32, 4, 4), (8, 4, 128)]
    packed = [*logits[:-1], (8, 8, 32), (8, 1, 128), (8, 4, 128), (32, 1, 128)]
    topk = [(1, 1, 4), (8, 4, 4), (32, 4, 4), (8, 1, 32), (32, 1, 32), (128, 1, 32)]
    topk += [(1, 1, 128), (8, 1, 128), (32, 1, 128)]
    window = [(8, 1, 64), (128, 1, 64), *((b, 4, 8) for b in (1, 8, 32)), (32, 4, 64)]
    products = [(2112, 7168), (3072, 1536), (7168, 2048)]
    v32, v4 = (7168, 256, 256, 8), (4096, 256, 256, 6)
    return (
        *(Cell("index_logits", b, w, k << 10) for b, w, k in logits),
        *(Cell("fp8_index_logits", b, w, k << 10) for b, w, k in packed),
        *(Cell("topk_slots", b, w, k << 10) for b, w, k in topk),
        *(Cell(op, b, 4, 4096, h) for op in LATENT_ATTENTION for h in (8, 16) for b in (1, 8, 32)),
        *(
            Cell(op, b, w, 32768, 128)
            for op in LATENT_ATTENTION
            for b, w in ((8, 1), (8, 4), (32, 4))
        ),
        *(Cell(op, b, w, heads=h) for op in WINDOW_ATTENTION for b, w, h in window),
        *(Cell(op, b, 4) for op in ("absorb_query", "expand_values") for b in (1, 8, 32)),
        *(Cell("block_linear", b, 4, dims=dims) for dims in products for b in (1, 8, 32)),
        *(Cell("block_experts", b, 4, dims=v32) for b in (1, 8, 32)),
        *(Cell(op, b, 4, dims=v4) for op in EXPERTS[1:] for b in (1, 8, 32)),
        *(Cell("choose", b, w) for b, w in ((1, 1), (1, 4), (8, 4), (32, 4), (256, 1))),
    )


CELLS = _cells()
"""What is measured unless a few ops or one size are asked for."""

QUICK = tuple({cell.op: cell for cell in reversed(CELLS) if cell.context <= 4096}.values())[::-1]
"""The smallest cell of each op."""
