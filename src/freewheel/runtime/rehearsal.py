# SPDX-License-Identifier: Apache-2.0
"""What is done before the first round so that fewer things wait for one another.

Rounds are rehearsed: run once without the kernels that are not loaded yet, only to learn which ones
they are. These are then compiled, or read from disk, side by side; a capture that ran first would
meet them one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from freewheel.graph.dispatch import Args, DispatchMode, OpOverload
from freewheel.ops import FAKES, IMPLEMENTATIONS, MEETINGS, load_ahead

aten = torch.ops.aten
_EMPTIES = frozenset(
    {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
)


class Blank(DispatchMode):
    """A context in which memory is zero where a kernel was left out.

    Zero is a row, a page, a slot, an expert and a token that exist, so that whatever does run
    behind reads no stray address. Operators of this package are called by their bodies for
    `device`, whose own temporaries are then seen too. Where ranks would meet, nobody waits: each
    rehearses by itself, and what others would have brought is zero as well.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        space, _, name = func.name().partition("::")
        if space == "freewheel" and name in MEETINGS:
            brought = FAKES[name](*args, **(kwargs or {}))
            return brought.zero_() if isinstance(brought, Tensor) else brought
        body = IMPLEMENTATIONS.get((name, self._device)) if space == "freewheel" else None
        if body is not None:
            with self:
                return body(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        return out.zero_() if func.overloadpacket in _EMPTIES else out


def rehearse(rounds: Iterable[Callable[[], None]], device: str) -> int:
    """Load the kernels of `rounds` before any of them runs; returns how many were not loaded.

    Each must be without effect that matters, as rounds of scratch rows are.
    """

    def dry_run() -> None:
        with torch.inference_mode(), Blank(device):
            for one in rounds:
                one()

    return load_ahead(dry_run)


def open_device(device: str) -> str:
    """Begin in a thread what the first use of a CUDA device waits for: its context, its libraries.

    Nobody needs to wait for it: whoever comes first does the work. Returns `device`.
    """
    if device != "cuda":
        return device
    # Asked for a device that is not open yet, PyTorch would open it here and now.
    index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    pool = ThreadPoolExecutor(1)
    pool.submit(_open_cuda, index)
    pool.shutdown(wait=False)
    return device


def _open_cuda(index: int) -> None:
    with torch.cuda.device(index), torch.inference_mode():
        ones = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
        torch.mm(ones, ones)
