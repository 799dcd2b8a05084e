# SPDX-License-Identifier: Apache-2.0
"""The one place of this package that touches PyTorch's private names, and what it asks of them.

PyTorch keeps its dispatch modes, `OpOverload` and the fake-tensor mode under underscored modules.
They have been stable for years but are not promised; a change there is mended here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DataDependentOutputException",
    "DispatchMode",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "OpOverload",
    "StorageSet",
    "TorchFunctionMode",
    "UnsupportedOperatorException",
    "decompose",
    "direct",
    "is_inplace_view",
    "is_view",
    "mutates",
    "op_name",
    "returns_host_value",
    "returns_nothing",
    "storage_key",
    "tensors_in",
    "written_tensors",
]

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class DispatchMode(TorchDispatchMode):
    """Base of our modes: without PyTorch's wrapper for `torch.compile`, which takes a second."""

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def op_name(op: OpOverload) -> str:
    """The operator's own name: `aten::add.Tensor`, `freewheel::topk_slots`."""
    return op.name()


def direct(op: OpOverload) -> Callable[..., Any]:
    """The operator without its Python wrapper, which is a tenth of the price of a small call."""
    return op._op if type(op) is OpOverload else op  # pyright: ignore[reportPrivateUsage]


def tensors_in(tree: object) -> Iterator[Tensor]:
    """Every tensor among an operator's arguments or results; these nest lists and tuples only."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in cast(Iterable[object], tree):
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in cast(dict[str, object], tree).values():
            yield from tensors_in(item)


@cache
def _written_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that the operator's schema declares it writes."""
    arguments = enumerate(op._schema.arguments)  # pyright: ignore[reportPrivateUsage]
    return tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write)


def mutates(op: OpOverload) -> bool:
    return bool(_written_arguments(op))


def written_tensors(op: OpOverload, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """The tensors that this call writes in place, `out=` included."""
    written = [
        args[position] if position < len(args) else kwargs.get(name)
        for position, name in _written_arguments(op)
    ]
    return list(tensors_in(written))


@cache
def returns_host_value(op: OpOverload) -> bool:
    """Whether the operator hands Python a number instead of a tensor."""
    returns = op._schema.returns  # pyright: ignore[reportPrivateUsage]
    return any(str(r.type) in ("int", "float", "bool", "number", "Scalar", "str") for r in returns)


@cache
def returns_nothing(op: OpOverload) -> bool:
    return not op._schema.returns  # pyright: ignore[reportPrivateUsage]


def is_inplace_view(op: OpOverload) -> bool:
    """Whether the operator changes the shape of the very tensor object that it is given."""
    return torch.Tag.inplace_view in op.tags


def is_view(op: OpOverload) -> bool:
    """Whether the operator only gives memory that exists another shape."""
    return bool(op.is_view)


@cache
def _is_composite(op: OpOverload) -> bool:
    if op.namespace == "prim":  # these live outside the dispatcher
        return False
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)  # pyright: ignore


def decompose(op: OpOverload) -> Callable[..., Any] | None:
    """The parts of a composite operator; inference mode passes these to modes whole.

    The dispatcher's own, as it runs without a mode. `OpOverload.decompose` prefers PyTorch's Python
    versions, which were made for its compiler; they import half of it, and differ in strides.
    """
    if not _is_composite(op):
        return None
    return partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)  # pyright: ignore


def storage_key(tensor: Tensor) -> int:
    """Identity of a tensor's storage; unique for as long as a `StorageSet` knows the storage."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


class StorageSet:
    """A set of storages. It does not keep their memory, but no new storage can take a key in it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, torch.dtype, torch.device]] = {}

    def add(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._known:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._known[key] = (reference, tensor.dtype, tensor.device)

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._known

    def alive(self) -> Iterator[Tensor]:
        """A flat tensor over the whole of each storage that something still refers to."""
        for reference, dtype, device in self._known.values():
            if reference.expired():
                continue
            pointer = cast(int, reference.cdata)  # pyright: ignore[reportUnknownMemberType]
            storage = torch.UntypedStorage._new_with_weak_ptr(pointer)  # pyright: ignore
            flat: Any = torch.empty(0, dtype=dtype, device=device)
            yield flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,))
