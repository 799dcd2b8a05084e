# SPDX-License-Identifier: Apache-2.0
"""Where compiled kernels are kept, how many this process has loaded, and compiling them together.

A launch compiles its kernel if nothing has yet, and the launch behind it waits. Kernels that are
known before they are needed compile side by side instead: Triton's passes, its assembler and the
compiler of its launchers leave Python's lock alone for most of their time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton

from freewheel.ops.cuda import native

_loaded: list[str] = []
_first: list[Future[Any]] = []

Variant = tuple[Any, str]
"""A kernel, and for which arguments: what its `preload` takes."""


def _note(module: object, function: object, name: str, *_: object) -> None:
    """Called by Triton before it loads a kernel into the device, compiled just now or on disk."""
    _loaded.append(name)


@triton.jit
def _nothing():
    pass


def keep_in(folder: str) -> None:
    """Look compiled kernels up in `folder`, and write them there.

    What Triton does before its first kernel (it hashes itself, builds what talks to the driver)
    begins now, in a thread.
    """
    triton.knobs.cache.dir = folder
    triton.knobs.runtime.kernel_load_start_hook.add(_note)
    if not _first and torch.cuda.is_available():
        pool = ThreadPoolExecutor(1)
        _first.append(pool.submit(lambda: _nothing.warmup(grid=(1,))))
        pool.shutdown(wait=False)


def loaded() -> int:
    """Kernels compiled or read from disk since `keep_in`: each kept its first launch waiting."""
    return len(_loaded) + native.loaded()


@contextmanager
def noted() -> Generator[list[Variant]]:
    """A context in which launches of kernels that are not loaded are listed instead, each once."""
    for first in _first:
        first.result()  # it must not be taken for a launch
    variants: dict[tuple[Any, str], str] = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        variants[fn.jit_function, key] = compile["specialization_data"]
        return True  # neither compile nor launch

    found: list[Variant] = []
    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = note
    try:
        with native.left_out() as others:
            yield found
    finally:
        triton.knobs.runtime.jit_cache_hook = before
        found += [(function, data) for (function, _), data in variants.items()]
    found += others


def load_ahead(dry_run: Callable[[], object]) -> int:
    """Call `dry_run` without its unloaded kernels, then load these; returns how many they are."""
    with noted() as variants:
        dry_run()
    if variants:
        load_together(variants)
    return len(variants)


def load_together(variants: list[Variant], threads: int = len(os.sched_getaffinity(0))) -> None:
    """Compile kernels, or read them from disk, and load them into the current device.

    Raises what compiling raises.
    """
    driver = triton.runtime.driver.active
    own = (driver.get_current_device(),)
    with ThreadPoolExecutor(threads, initializer=driver.set_current_device, initargs=own) as pool:
        kernels = list(pool.map(_compile, *zip(*variants, strict=True)))
    # All launchers are modules of one name, which share what Python keeps under it: of two that are
    # read at once, one may get the other's function. So only one thread reads those to be used.
    for kernel in kernels:
        _load(kernel)


def _compile(function: Any, data: str) -> Any:
    """The kernel, of which the launcher too is on disk from here on."""
    kernel = function.preload(data)
    if not isinstance(kernel, native.Variant):
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def _load(kernel: Any) -> None:
    """Take the launcher and load the code; Triton does both when `run` is first asked for."""
    launcher: Callable[..., None] = kernel.run
    del launcher
