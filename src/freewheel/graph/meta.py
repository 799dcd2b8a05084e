# SPDX-License-Identifier: Apache-2.0
"""`trace_on_meta`: run a function on tensors without memory.

What runs there has static shapes, stays on one device and depends on no value; and it does so at
production dimensions, in milliseconds and in no memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from freewheel.errors import CaptureError, HostSync
from freewheel.graph.callsite import calling_site, raising_site
from freewheel.graph.dispatch import (
    Args,
    DataDependentOutputException,
    DispatchMode,
    DynamicOutputShapeException,
    FakeTensorMode,
    OpOverload,
    UnsupportedOperatorException,
    is_view,
    op_name,
    tensors_in,
)
from freewheel.graph.guard import no_host_sync

__all__ = ["calls_on_meta", "trace_on_meta"]

T = TypeVar("T")


class _OneDevice(DispatchMode):
    """Raises if an operator takes or makes a tensor elsewhere than on `meta`; 0-d is a number."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((*args, *kwargs.values())):
            self._judge(func, "takes", tensor)
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            self._judge(func, "makes", tensor)
        return out

    def _judge(self, func: OpOverload, verb: str, tensor: Tensor) -> None:
        if tensor.device.type != "meta" and tensor.dim() > 0:
            raise CaptureError(
                f"{op_name(func)} {verb} a tensor on {tensor.device} among tensors on meta, at "
                f"{calling_site()}; pass device="
            )


def trace_on_meta(fn: Callable[..., T], *args: Any) -> T:
    """Call `fn(*args)`, all of whose tensors, closed over or made inside, are on device `meta`.

    Returns its output: tensors with shape, dtype and device, but no values. Custom operators run
    their `register_fake`.

    Raises:
        HostSync: a value was read, or a shape depends on one.
        CaptureError: a tensor is on another device, or an operator cannot tell its output's shape.
    Both name the operator and the caller's file and line.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        try:
            with no_host_sync(), _OneDevice():
                return fn(*args)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            site = raising_site(error)
            raise HostSync(f"{error.func} depends on a device value, at {site}") from error
        except UnsupportedOperatorException as error:
            site = raising_site(error)
            raise CaptureError(f"{error.func} has no fake implementation, at {site}") from error


# A view that the schema calls a new tensor.
_WITHOUT_WORK = {torch.ops.aten._unsafe_view.default}


class _Counting(DispatchMode):
    """Counts operators by name, but for those that only make another view of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "prim" and func not in _WITHOUT_WORK and not is_view(func):
            self.counts[op_name(func)] += 1
        return func(*args, **(kwargs or {}))


def calls_on_meta(fn: Callable[[], object]) -> Counter[str]:
    """Operators that `fn` calls, by name; views are not counted. Runs it as `trace_on_meta` does.

    A custom operator counts as one, whatever kernels it takes. Raises what `trace_on_meta` raises.
    """
    counting = _Counting()

    def counted() -> None:
        with counting:
            fn()

    trace_on_meta(counted)
    return counting.counts
