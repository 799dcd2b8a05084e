# SPDX-License-Identifier: Apache-2.0
"""The dispatch mode that writes a capture down as `Call`s."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from freewheel.errors import CaptureError
from freewheel.graph.audit import CaptureAudit
from freewheel.graph.callsite import calling_site
from freewheel.graph.dispatch import (
    Args,
    DispatchMode,
    OpOverload,
    direct,
    is_inplace_view,
    mutates,
    op_name,
    returns_nothing,
    storage_key,
    tensors_in,
)
from freewheel.graph.poison import poison_
from freewheel.graph.program import Call, Register
from freewheel.graph.tree import leaves, repeated_dims

__all__ = ["Recorder"]

aten = torch.ops.aten
_UNINITIALISED = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted),
    *(aten.new_empty, aten.new_empty_strided),
}

# A tensor is what it shows of which storage. Its Python object does not identify it: PyTorch makes
# a new one for a view on the way back from a dispatch mode.
_Key = tuple[object, ...]


def _key(t: Tensor) -> _Key:
    flags = (t.dtype, t.is_conj(), t.is_neg())
    return (storage_key(t), t.storage_offset(), tuple(t.shape), t.stride(), *flags)


class Recorder(DispatchMode):
    """Records the calls of a context in `calls`: a tensor made inside becomes a `Register`.

    A static tensor, or a view of one, has a fixed address; it is recorded as itself, and making the
    view is not recorded at all. Expects `audit` to be the next mode inside.
    """

    def __init__(self, audit: CaptureAudit, poison: bool) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._audit, self._poison = audit, poison
        self._aliases: dict[_Key, Tensor] = {}
        self._registers: dict[_Key, Register] = {}
        self._made = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_inplace_view(func):
            return self._reshape_in_place(func, args, kwargs)
        operands = tuple(self._operand(value) for value in args)
        named = {key: self._operand(value) for key, value in kwargs.items()}
        given = {storage_key(t) for t in tensors_in((*args, *kwargs.values()))}
        out = func(*args, **kwargs)

        results = self._result(out)
        if results is None and not mutates(func) and not returns_nothing(func):
            return out  # a view of a static tensor, a tensor known already, or a shape
        pure_view = results is not None and not mutates(func)
        pure_view = pure_view and all(storage_key(t) in given for t in tensors_in(out))
        self.calls.append(_call(func, operands, named, results, pure_view))
        if self._poison and func.overloadpacket in _UNINITIALISED:
            self.calls.append(Call("poison_", poison_, (results,), {}))
        return out

    def output_calls(self, output: object) -> list[Call]:
        """Calls that refresh the tensors of `output`, the captured function's result, in place.

        Raises:
            CaptureError: an output is neither static nor made in the capture.
        """
        calls: list[Call] = []
        for path, tensor in leaves(output, "output"):
            if self._is_fixed(tensor):
                continue
            register = self._registers.get(_key(tensor))
            if register is None:
                raise CaptureError(f"{path} is neither static nor made in this graph")
            target, source = tensor.detach(), register
            for dim in repeated_dims(tensor):
                target, first = target.narrow(dim, 0, 1), (source, dim, 0, 1)
                source = self._new_register()
                calls.append(_call(aten.slice.Tensor, first, {}, source, pure_view=True))
            calls.append(_call(aten.copy_.default, (target, source), {}))
        return calls

    def _reshape_in_place(self, func: OpOverload, args: Args, kwargs: dict[str, Any]) -> Any:
        """`x.unsqueeze_(0)` and its like change a tensor object, not memory: reshape an alias."""
        before, alias = self._operand(args[0]), self._new_register()
        out = func(*args, **kwargs)
        self._registers[_key(out)] = alias
        self.calls.append(_call(aten.alias.default, (before,), {}, alias, pure_view=True))
        self.calls.append(_call(func, (alias, *args[1:]), kwargs))
        return out

    def _is_fixed(self, tensor: Tensor) -> bool:
        return tensor in self._audit.static or tensor in self._audit.frozen

    def _operand(self, value: object) -> object:
        if isinstance(value, (list, tuple)):
            return [self._operand(item) for item in cast(Iterable[object], value)]
        return self._tensor(value) if isinstance(value, Tensor) else value

    def _tensor(self, tensor: Tensor) -> Tensor | Register:
        key = _key(tensor)
        if self._is_fixed(tensor):
            if key not in self._aliases:  # ours, so that no one reshapes it in place
                self._aliases[key] = tensor.detach()
            return self._aliases[key]
        if key not in self._registers:
            raise CaptureError(f"an alias unseen by the dispatcher is used, at {calling_site()}")
        return self._registers[key]

    def _result(self, out: object) -> object:
        """`out` with a register for each tensor that is new; None if none is."""
        if isinstance(out, (list, tuple)):
            parts = tuple(self._result(item) for item in cast(Iterable[object], out))
            return None if all(part is None for part in parts) else parts
        if not isinstance(out, Tensor) or self._is_fixed(out) or _key(out) in self._registers:
            return None
        register = self._registers[_key(out)] = self._new_register()
        return register

    def _new_register(self) -> Register:
        self._made += 1
        return Register(self._made)


def _call(
    op: OpOverload,
    args: Args,
    kwargs: dict[str, Any],
    results: object = None,
    pure_view: bool = False,
) -> Call:
    return Call(op_name(op), direct(op), args, kwargs, results, pure_view)
