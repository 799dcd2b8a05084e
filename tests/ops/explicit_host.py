# SPDX-License-Identifier: Apache-2.0
"""Runs the text of kernels with their layouts written out (Gluon) on any machine, with tensors.

A program's threads act as one here, but nothing arrives before the text has waited for it: a copy
into shared memory is there behind `wait_group` and `barrier`, a store behind `fence_async_shared`
and `barrier`, a product reads its operands when it is waited for. What was asked to change and has
not yet is NaN. Loads and stores outside of a tensor are refused.

What this cannot show: layouts (the compiler checks those) and barriers inside one copy or store.
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Words = dict[str, Callable[..., Any]]


class Block(torch.Tensor):
    """A tensor with the two members of Gluon's that PyTorch's spell otherwise."""

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Block:
        return block(self.view(dtype) if bitcast else super().to(dtype))


def block(value: Any) -> Block:
    """A number is a block of no dimensions, of 32 bits as a kernel's arguments are."""
    if isinstance(value, Block):
        return value
    if isinstance(value, int):
        value = torch.tensor(value, dtype=torch.int32)
    return torch.as_tensor(value).as_subclass(Block)


class Pointer:
    """Places in a flat tensor."""

    def __init__(self, flat: Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = flat, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.flat, self.offset + more)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.flat.dtype)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """(int64 offsets of the places that `mask` names, in its order; the mask), refusing others
        than the tensor has."""
        offset = torch.as_tensor(self.offset).as_subclass(Tensor).long()
        there = torch.as_tensor(True if mask is None else mask).as_subclass(Tensor).bool()
        offset, there = torch.broadcast_tensors(offset, there)
        named = offset[there]
        if named.numel() and not 0 <= int(named.min()) <= int(named.max()) < self.flat.numel():
            raise IndexError(f"{int(named.min())} to {int(named.max())} of {self.flat.numel()}")
        return named, there


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Block:
    named, there = pointer.places(mask)
    found = torch.full(there.shape, 0 if other is None else other, dtype=pointer.flat.dtype)
    found[there] = pointer.flat[named]
    return block(found)


def store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    named, there = pointer.places(mask)
    assert value.dtype == pointer.flat.dtype
    pointer.flat[named] = value.as_subclass(Tensor).expand(there.shape)[there]


def where(chosen: Any, one: Any, other: Any) -> Any:
    """Of numbers, blocks, or (if there is one choice) pointers."""
    if isinstance(one, Pointer):
        return one if bool(chosen) else other
    return torch.where(block(chosen), one, other)


class Shared:
    """Shared memory of one program, or a view of it."""

    def __init__(self, machine: Machine, memory: Tensor) -> None:
        self.machine, self.memory = machine, memory

    def index(self, at: Any) -> Shared:
        return Shared(self.machine, self.memory[int(at)])

    @property
    def shape(self) -> list[int]:
        return list(self.memory.shape)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.machine, self.memory.permute(order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.machine, self.memory.narrow(dim, start, length))

    def load(self, layout: Any) -> Block:
        return block(self.memory.clone())

    def store(self, value: Tensor) -> None:
        assert value.shape == self.memory.shape and value.dtype == self.memory.dtype
        self.spoil()
        self.machine.stored.append((self.memory, value.as_subclass(Tensor).clone()))

    def spoil(self) -> None:
        self.memory.fill_(torch.nan if self.memory.is_floating_point() else 0xA5)


class Product:
    """One that is under way: it reads shared memory when it ends."""

    def __init__(self, left: Any, right: Shared, into: Any) -> None:
        self.left, self.right, self.into = left, right, into

    def end(self) -> Block:
        into = self.into.end() if isinstance(self.into, Product) else self.into
        left = self.left.memory if isinstance(self.left, Shared) else self.left
        return block(left.float() @ self.right.memory.float() + into)


class Machine:
    """One program: its place in the grid, its shared memory, and what is on its way there."""

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self.place, self.grid = place, grid
        self.copies: list[Callable[[], object]] = []
        self.groups: list[list[Callable[[], object]]] = []
        self.landed: list[Callable[[], object]] = []
        self.stored: list[tuple[Tensor, Tensor]] = []
        self.fenced: list[tuple[Tensor, Tensor]] = []

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        shared = Shared(self, torch.empty(shape, dtype=dtype))
        shared.spoil()
        return shared

    def copy(self, to: Shared, pointer: Pointer, mask: Any = None) -> None:
        to.spoil()
        self.copies.append(lambda: to.memory.copy_(load(pointer, mask, 0)))

    def commit(self) -> None:
        self.groups.append(self.copies)
        self.copies = []

    def wait(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            self.landed += self.groups.pop(0)

    def fence(self) -> None:
        self.fenced += self.stored
        self.stored = []

    def barrier(self) -> None:
        for copy in self.landed:
            copy()
        for memory, value in self.fenced:
            memory.copy_(value)
        self.landed, self.fenced = [], []


def product(
    left: Any, right: Shared, into: Any, use_acc: bool = True, is_async: bool = False
) -> Any:
    """Of registers on the left, their contents now."""
    started = Product(left, right, into if use_acc else 0)
    return started if is_async else started.end()


def ended(outstanding: int, deps: tuple[Product, ...]) -> Any:
    assert outstanding == 0
    found = [one.end() for one in deps]
    return tuple(found) if len(found) > 1 else found[0]


def raw_fp8(codes: Tensor) -> Block:
    """e4m3 by its bits alone, as kernels do: NaN's code is 480."""
    bits = codes.as_subclass(Tensor).int()
    exponent, rest = bits >> 3 & 15, bits & 7
    size = torch.where(exponent > 0, (8 + rest) * 2.0 ** (exponent - 10), rest * 2.0**-9)
    return block(torch.where(bits > 127, -size, size).bfloat16())


def _language(machine: Machine) -> SimpleNamespace:
    """`gl`, of one program."""
    dtypes = ("float32", "bfloat16", "int64", "int32", "int16", "uint8")
    return SimpleNamespace(
        **{name: getattr(torch, name) for name in dtypes},
        constexpr=lambda value: value,
        SliceLayout=lambda *_: None,
        program_id=lambda axis: block(machine.place[axis]),
        num_programs=lambda axis: machine.grid[axis],
        arange=lambda start, end, layout=None: block(torch.arange(start, end, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout=None: block(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout=None: block(torch.full(shape, value, dtype=dtype)),
        load=load,
        store=store,
        where=where,
        minimum=lambda one, other: torch.minimum(block(one), block(other)),
        maximum=lambda one, other: torch.maximum(block(one), block(other)),
        exp=torch.exp,
        max=lambda values, axis: values.amax(axis),
        sum=lambda values, axis: values.sum(axis),
        cdiv=lambda one, other: (one + other - 1) // other,
        static_range=range,
        broadcast=torch.broadcast_tensors,
        reshape=lambda value, shape: value.reshape(shape),
        split=lambda value: value.unbind(-1),
        join=lambda one, other: torch.stack((one, other), -1),
        convert_layout=lambda value, layout, assert_trivial=False: value,
        permute=lambda value, order: value.permute(order),
        allocate_shared_memory=machine.allocate,
    )


def _rebound(function: Any, machine: Machine, words: Words) -> Callable[..., Any]:
    """A kernel's function whose names mean what they do here; `words`: of its helpers."""
    text: FunctionType = function.fn
    known = {
        "gl": _language(machine),
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=machine.copy,
            commit_group=machine.commit,
            wait_group=machine.wait,
        ),
        "fence_async_shared": machine.fence,
        "barrier": machine.barrier,
        "warpgroup_mma": product,
        "warpgroup_mma_wait": ended,
        "float": float,
        "range": lambda *ends: range(*(int(end) for end in ends)),
        **words,
    }
    names = dict(text.__globals__)
    for name, value in text.__globals__.items():
        if name in known:
            continue
        if hasattr(value, "fn") and isinstance(value.fn, FunctionType):
            names[name] = _Later(value, machine, words)
        elif type(value).__name__ == "constexpr":
            names[name] = value.value
    return FunctionType(
        text.__code__, names | known | {"__builtins__": vars(builtins)}, text.__name__
    )


class _Later:
    """A helper, rebound when it is called."""

    def __init__(self, function: Any, machine: Machine, words: Words) -> None:
        self.given = function, machine, words

    def __call__(self, *args: Any) -> Any:
        return _rebound(*self.given)(*args)


class OnHost:
    """Stands for a compiled kernel: `OnHost(kernel)[grid](*args, **constants)`."""

    def __init__(self, kernel: Any, **words: Callable[..., Any]) -> None:
        self.kernel, self.launches = kernel, 0
        self.words: Words = {"widen_fp8": raw_fp8, "follow": lambda chained: None, **words}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, launch_pdl: bool, **constants: Any) -> None:
            self.launches += 1
            given = [Pointer(a.view(-1)) if isinstance(a, Tensor) else a for a in args]
            for place in itertools.product(*(range(size) for size in grid)):
                machine = Machine(place, grid)
                _rebound(self.kernel, machine, self.words)(*given, **constants)

        return launch


def stand_in(module: ModuleType, **words: Callable[..., Any]) -> OnHost:
    """For the `_attend` of a module of kernels."""
    return OnHost(module._attend, **words)
