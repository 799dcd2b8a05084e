# SPDX-License-Identifier: Apache-2.0
"""`no_host_sync`: a context in which bringing a device value to the host is an error.

Two PyTorch modes work together. The *function* mode sees what the user wrote (`x.tolist()`,
`torch.tensor([..])`), some of which never reaches an operator. The *dispatch* mode sees operators,
whoever calls them (`x[:n]` with a tensor `n`, `torch.unique`, a read inside a library).

What counts, and stays legal:

- A read: a value (`item`, `bool`, `tolist`, `numpy`, `print`), or a shape that depends on values
  (`nonzero`, `x[mask]`, `unique`), reaches the host.
- A copy: a tensor moves between devices, or a Python list becomes one (`torch.tensor`). A pinned,
  `non_blocking` copy is recorded and never raises: nobody waits for it.
- Legal: shapes, `len(x)`, `for v in x` (the reads inside are not), and `x[0] = 3`: a Python number
  travels inside the kernel's launch. `x[0] = torch.tensor(3)` is not legal, and neither is
  `x[mask] = v`, whatever `v`: the form counts the mask; write `masked_fill_` or `where`.

Limits. Modes are thread-local: a thread started inside is not guarded, and needs its own context.
The body of a `torch.library` operator is opaque, as a CUDA kernel is. `arange` without `device=`
looks innocent where the CPU is the device; `trace_on_meta` finds it. Streams and events
(`torch.cuda.synchronize`) are not tensors; use `torch.cuda.set_sync_debug_mode` for these.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from freewheel.errors import HostSync
from freewheel.graph.callsite import calling_site
from freewheel.graph.dispatch import (
    Args,
    DispatchMode,
    OpOverload,
    TorchFunctionMode,
    decompose,
    op_name,
    returns_host_value,
    tensors_in,
)

__all__ = ["DeviceCopy", "HostRead", "SyncLog", "count_host_reads", "no_host_sync"]

aten = torch.ops.aten

_tensor, _torch = cast(Any, Tensor), cast(Any, torch)  # half of their members lack types
# Methods that bring a value home.
_READERS: dict[Any, str] = {
    _tensor.item: "Tensor.item",
    _tensor.tolist: "Tensor.tolist",
    _tensor.numpy: "Tensor.numpy",
    _tensor.cpu: "Tensor.cpu",
    _tensor.__array__: "Tensor.__array__",
    _tensor.__dlpack__: "Tensor.__dlpack__",
    _tensor.__reduce_ex__: "Tensor.__reduce_ex__",
    _tensor.__bool__: "Tensor.__bool__",
    _tensor.__int__: "Tensor.__int__",
    _tensor.__float__: "Tensor.__float__",
    _tensor.__complex__: "Tensor.__complex__",
    _tensor.__index__: "Tensor.__index__",
    _tensor.__contains__: "Tensor.__contains__",
    _tensor.__repr__: "Tensor.__repr__",
    _tensor.__format__: "Tensor.__format__",
}
# Methods that copy if they are given another device.
_MOVERS: dict[Any, str] = {_tensor.to: "Tensor.to", _tensor.cuda: "Tensor.cuda"}
# Functions that do so to a tensor, and that upload anything else.
_CONVERTERS: dict[Any, str] = {
    _torch.as_tensor: "torch.as_tensor",
    _torch.asarray: "torch.asarray",
}
# Functions that make a tensor of host values.
_UPLOADERS: dict[Any, str] = {
    **_CONVERTERS,
    _torch.tensor: "torch.tensor",
    _torch.from_numpy: "torch.from_numpy",
    _torch.frombuffer: "torch.frombuffer",
    _tensor.new_tensor: "Tensor.new_tensor",
}
_READING_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
# Operators that read although no tag says so.
_UNTAGGED_READERS = {aten._linalg_check_errors.default}
# Operators tagged as reading that read only if an index is a mask.
_INDEXING_OPS = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class HostRead:
    """A device value reached the host in `op`, called from `file`:`line`."""

    op: str
    file: str
    line: int


@dataclass(frozen=True)
class DeviceCopy:
    """`op`, called from `file`:`line`, moved data from device `source` to device `target`."""

    op: str
    source: str
    target: str
    file: str
    line: int


@dataclass
class SyncLog:
    """What a guarded block did, in order."""

    reads: list[HostRead] = field(default_factory=list[HostRead])
    copies: list[DeviceCopy] = field(default_factory=list[DeviceCopy])


class _Verdict:
    """What both modes share: whose reads count, the log, and whether to raise."""

    def __init__(self, log: SyncLog, raise_: bool, device: str | None) -> None:
        self.log, self.raise_, self.device = log, raise_, device
        self.muted = False  # a call that the function mode logged is one event, not two

    def watches(self, device: torch.device) -> bool:
        return self.device is None or device.type == self.device

    def watches_any(self, tree: object) -> bool:
        return any(self.watches(t.device) for t in tensors_in(tree))

    def read(self, op: str, why: str = "reads a device value on the host") -> None:
        if self.muted:
            return
        site = calling_site()
        self.log.reads.append(HostRead(op, site.file, site.line))
        if self.raise_:
            raise HostSync(f"{op} {why}, at {site}")

    def copy(self, op: str, source: torch.device, target: torch.device, waits: bool = True) -> None:
        if self.muted:
            return
        site = calling_site()
        self.log.copies.append(DeviceCopy(op, str(source), str(target), site.file, site.line))
        if self.raise_ and waits:
            raise HostSync(
                f"{op} copies from {source} to {target} and waits for it, at {site}; "
                "make the tensor on its device once, outside"
            )


class _FunctionGuard(TorchFunctionMode):
    def __init__(self, verdict: _Verdict) -> None:
        super().__init__()
        self._verdict = verdict

    def __torch_function__(
        self, func: Any, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._judge(func, args, kwargs):
            return func(*args, **kwargs)
        was, self._verdict.muted = self._verdict.muted, True
        try:
            return func(*args, **kwargs)
        finally:
            self._verdict.muted = was

    def _judge(self, func: Any, args: Args, kwargs: dict[str, Any]) -> bool:
        """Log or raise; True if `func` was one of those that this mode looks after."""
        if func in _READERS:
            if self._verdict.watches(args[0].device):
                self._verdict.read(_READERS[func])
            return True
        if func in _MOVERS or (func in _CONVERTERS and isinstance(next(iter(args), None), Tensor)):
            return self._judge_move(func, args, kwargs)
        if func in _UPLOADERS:
            return self._judge_upload(_UPLOADERS[func], args, kwargs)
        return False

    def _judge_upload(self, op: str, args: Args, kwargs: dict[str, Any]) -> bool:
        target = _named_device(args, kwargs)
        if target is None:
            like = next(tensors_in(args), None)
            target = torch.get_default_device() if like is None else like.device
        if self._verdict.watches(target):
            self._verdict.copy(op, torch.device("cpu"), target)
        return True

    def _judge_move(self, func: Any, args: Args, kwargs: dict[str, Any]) -> bool:
        target = _target_device(func, args, kwargs)
        source: torch.device = args[0].device
        if target is None or not (self._verdict.watches(source) or self._verdict.watches(target)):
            return False
        op = _MOVERS.get(func) or _CONVERTERS[func]
        if target.type == "cpu":
            # Where the CPU is the device this is no copy; on an accelerator the same line is one.
            self._verdict.read(op)
        elif not _same_device(source, target):
            pinned = bool(kwargs.get("non_blocking")) and args[0].is_pinned()
            self._verdict.copy(op, source, target, waits=not pinned)
        return True


def _named_device(args: Args, kwargs: dict[str, Any]) -> torch.device | None:
    named = (v for v in (*args[1:], *kwargs.values()) if isinstance(v, (str, torch.device)))
    return next(map(torch.device, named), None)


def _target_device(func: Any, args: Args, kwargs: dict[str, Any]) -> torch.device | None:
    """Where a move would put its result; None if it only casts."""
    target = _named_device(args, kwargs)
    if target is None and func is Tensor.cuda:
        return torch.device("cuda")
    other = next(tensors_in((*args[1:], *kwargs.values())), None)  # x.to(other)
    if target is None and other is not None and other.device != args[0].device:
        return other.device
    return target


def _same_device(a: torch.device, b: torch.device) -> bool:
    """Whether two devices are one; a device without an index is the current one of its type."""
    either: list[int | None] = [a.index, b.index]
    return a.type == b.type and (a.index == b.index or None in either)


class _DispatchGuard(DispatchMode):
    def __init__(self, verdict: _Verdict) -> None:
        super().__init__()
        self._verdict = verdict

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        parts = decompose(func)
        if parts is not None:
            with self:  # a composite hides what it reads
                return parts(*args, **kwargs)
        self._judge(func, args, kwargs)
        return func(*args, **kwargs)

    def _judge(self, func: OpOverload, args: Args, kwargs: dict[str, Any]) -> None:
        if func in _INDEXING_OPS:
            masks = [i for i in args[1] if i is not None and i.dtype in _MASKS]
            if self._verdict.watches_any(masks):
                self._verdict.read(op_name(func), "counts a boolean mask (use where, masked_fill)")
        elif _reads(func, kwargs):
            if self._verdict.watches_any((*args, *kwargs.values())):
                self._verdict.read(op_name(func))
        elif func is aten.lift_fresh.default:
            # `torch.Tensor([..])`. A 0-d one is the number in `x[0] = 3`.
            if args[0].dim() > 0 and self._verdict.watches(args[0].device):
                self._verdict.copy("torch.Tensor", torch.device("cpu"), args[0].device)
        else:
            self._judge_copy(func, args, kwargs)

    def _judge_copy(self, func: OpOverload, args: Args, kwargs: dict[str, Any]) -> None:
        if func is aten.copy_.default:
            target, source = args[0], args[1]
            asynchronous = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            host_side = source if source.device.type == "cpu" else target
            waits = not (asynchronous and host_side.is_pinned())
            self._moved(op_name(func), source.device, target.device, waits)
        elif func is aten._to_copy.default and kwargs.get("device") is not None:
            self._moved(op_name(func), args[0].device, torch.device(kwargs["device"]), True)

    def _moved(self, op: str, source: torch.device, target: torch.device, waits: bool) -> None:
        if _same_device(source, target):
            return
        if self._verdict.watches(source) or self._verdict.watches(target):
            self._verdict.copy(op, source, target, waits)


def _reads(op: OpOverload, kwargs: dict[str, Any]) -> bool:
    if op is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if op.namespace != "aten":
        return returns_host_value(op)
    return op in _UNTAGGED_READERS or any(tag in op.tags for tag in _READING_TAGS)


@contextmanager
def no_host_sync(
    *, raise_: bool = True, log: SyncLog | None = None, device: str | None = None
) -> Generator[SyncLog]:
    """Raise `HostSync` at every host read or blocking copy inside; also a decorator.

    `raise_=False` only records. `log` receives the events; without it the context yields a new
    `SyncLog`. `device` is the device type whose values count, say "cuda"; None means all of them,
    so that on a machine without an accelerator the CPU stands for one.

    Raises:
        HostSync: naming the operation and the caller's file and line.
    """
    events = SyncLog() if log is None else log
    verdict = _Verdict(events, raise_, device)
    with _FunctionGuard(verdict), _DispatchGuard(verdict):
        yield events


@contextmanager
def count_host_reads(device: str | None = None) -> Generator[SyncLog]:
    """Record host reads and device copies without raising: `len(log.reads)` after the block."""
    with no_host_sync(raise_=False, device=device) as log:
        yield log
