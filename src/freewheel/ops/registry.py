# SPDX-License-Identifier: Apache-2.0
"""Declare an op once: its schema, its specification, its fake; implementations are added beside it.

The decorated body is the specification. It is plain torch, reads no device value, and runs on any
device (dispatch key CompositeExplicitAutograd), so it is also what a device without a kernel of
its own falls back to. `implement` adds a faster body for one device type; tests compare every
implementation with the specification.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from freewheel.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("freewheel", "DEF")

SPECIFICATIONS: dict[str, Callable[..., Any]] = {}
"""Op name -> the body that defines it."""

IMPLEMENTATIONS: dict[tuple[str, str], Callable[..., Any]] = {}
"""(op name, device type) -> a body that must agree with the specification."""

FAKES: dict[str, Callable[..., Any]] = {}
"""Op name -> what gives its outputs' shapes and dtypes without computing."""

_LOADED: dict[str, Callable[[], int]] = {}
"""Device type -> how many kernels were compiled or loaded for it."""

_AHEAD: list[Callable[[Callable[[], object]], int]] = []
"""What `load_ahead` asks to do so, for each device with kernels."""

_LACKING: dict[str, Callable[[], str | None]] = {}
"""Device type -> why some of its kernels have stand-ins on this machine; None if none has."""

_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


def op(schema: str, *, fake: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare `freewheel::<schema>` with the decorated function as its specification.

    `schema` is torch's schema language, mutated arguments annotated `Tensor(a!)`. `fake` gives
    the outputs' shapes and dtypes without computing. Returns the op itself, so that a call goes
    through the dispatcher and a graph records it as one call.
    """
    name = schema.split("(", 1)[0]

    def declare(specification: Callable[P, R]) -> Callable[P, R]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, specification, "CompositeExplicitAutograd")
        torch.library.register_fake(f"freewheel::{name}", fake, lib=_LIBRARY)
        SPECIFICATIONS[name] = specification
        FAKES[name] = fake
        return cast(Callable[P, R], _resolve(name))

    return declare


def implement(name: str, device: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function as op `name` on `device` ("cpu" or "cuda")."""

    def register(body: Callable[P, R]) -> Callable[P, R]:
        if name not in SPECIFICATIONS:
            raise KeyError(f"no op named {name!r} is declared; declared: {sorted(SPECIFICATIONS)}")
        _LIBRARY.impl(name, body, _DISPATCH_KEYS[device])
        IMPLEMENTATIONS[name, device] = body
        return body

    return register


def load_kernels(device: str, cache: str | None = None) -> None:
    """Register the bodies for `device` ("cpu" or "cuda"), if they are not yet.

    `cache`: the folder that keeps what is compiled; None leaves it to the compiler. Raises
    ConfigError if the library that the bodies are written in is missing.
    """
    if device == "cuda":
        try:
            from freewheel.ops import cuda
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"device: the kernels for CUDA need {error.name}; "
                "pip install '.[gpu]' in a clone brings it"
            ) from error
        if "cuda" not in _LOADED:
            _AHEAD.append(cuda.compiling.load_ahead)
        _LOADED["cuda"] = cuda.compiling.loaded
        _LACKING["cuda"] = cuda.native.lacking
        if cache is not None:
            cuda.compiling.keep_in(cache)


def kernels_lack(device: str) -> str | None:
    """Why kernels in CUDA C++ cannot run here and Triton's stand in; None if nothing is lacking.

    Of a device whose kernels `load_kernels` has registered.
    """
    return _LACKING[device]() if device in _LACKING else None


def kernels_loaded() -> int:
    """Kernels that this process compiled or read from disk so far; each made a launch wait."""
    return sum(count() for count in _LOADED.values())


def load_ahead(dry_run: Callable[[], object]) -> int:
    """Load the kernels that `dry_run` would launch, side by side; returns how many that were.

    While it runs, kernels that are not loaded are left out, and what they would have written stays
    as it was. Raises what it and compiling raise.
    """
    return sum(ahead(dry_run) for ahead in _AHEAD)


def _resolve(name: str) -> Callable[..., Any]:
    packet = torch._ops.ops.freewheel.__getattr__(name)
    return packet.default


def nothing(*_: object) -> None:
    """The fake of an op that only mutates its arguments."""
