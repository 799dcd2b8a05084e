# SPDX-License-Identifier: Apache-2.0
"""What a capture touched: every tensor that it reads must be registered as static or made inside.

A graph freezes addresses. A tensor that the function happened to close over, and that nobody keeps
alive or refills, is the classic way to replay garbage; here it is an error at capture.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from freewheel.errors import CaptureError
from freewheel.graph.callsite import calling_site
from freewheel.graph.dispatch import (
    Args,
    DispatchMode,
    OpOverload,
    StorageSet,
    op_name,
    tensors_in,
    written_tensors,
)
from freewheel.graph.tree import leaves

__all__ = ["CaptureAudit"]

aten = torch.ops.aten
_RESHAPERS = {aten.set_, aten.resize_, aten.resize_as_}  # they replace or resize a storage


class CaptureAudit(DispatchMode):
    """A context that raises at the first stray tensor, and counts operators.

    `static` is a tree of the tensors that outlive the graph (see `tree.leaves`). `counts` maps an
    operator's name (`aten::add.Tensor`, `freewheel::topk_slots`) to how often it was called; an
    operator's body is opaque, and under inference mode so is a composite (`aten::linear` is one).

    Raises:
        CaptureError: naming the operator, the tensor and the caller's file and line.
    """

    def __init__(self, static: object) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.static = StorageSet()
        self.frozen = StorageSet()  # Python numbers that PyTorch wrapped, as in `x[0] = 3`
        self.made = StorageSet()
        self._kept_alive = [tensor for _, tensor in leaves(static, "static")]
        for tensor in self._kept_alive:
            self.static.add(tensor)

    def knows(self, tensor: Tensor) -> bool:
        return tensor in self.static or tensor in self.made or tensor in self.frozen

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.lift_fresh.default and not self.knows(args[0]):
            self.frozen.add(args[0])
        self._judge(func, args, kwargs)
        fixed = [t for t in written_tensors(func, args, kwargs) if t in self.static]
        addresses = [_address(t) for t in fixed]
        out = func(*args, **kwargs)
        if addresses != [_address(t) for t in fixed]:
            raise CaptureError(f"{op_name(func)} moved a static tensor, at {calling_site()}")
        for tensor in tensors_in(out):
            if not self.knows(tensor):
                self.made.add(tensor)
        self.counts[op_name(func)] += 1
        return out

    def _judge(self, func: OpOverload, args: Args, kwargs: dict[str, Any]) -> None:
        for tensor in tensors_in((*args, *kwargs.values())):
            if not self.knows(tensor):
                raise CaptureError(
                    f"{op_name(func)} uses {_describe(tensor)} that is neither static nor made in "
                    f"this graph, at {calling_site()}; register it as static, or make it inside"
                )
        if func.overloadpacket in _RESHAPERS:
            raise CaptureError(
                f"{op_name(func)} gives a tensor another storage, at {calling_site()}; a graph "
                "freezes addresses, so make a new tensor instead"
            )
        if any(t in self.frozen for t in written_tensors(func, args, kwargs)):
            raise CaptureError(
                f"{op_name(func)} writes to a constant that Python made, at {calling_site()}; make "
                "it with torch.full, which every replay repeats"
            )


def _describe(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"a tensor {dtype} {list(tensor.shape)} on {tensor.device}"


def _address(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
