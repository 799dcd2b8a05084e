# SPDX-License-Identifier: Apache-2.0
"""Where compiled kernels are kept, and how many this process has loaded."""

from __future__ import annotations

import triton

_loaded: list[str] = []


def _note(module: object, function: object, name: str, *_: object) -> None:
    """Called by Triton before it loads a kernel into the device, compiled just now or on disk."""
    _loaded.append(name)


def keep_in(folder: str) -> None:
    """Look compiled kernels up in `folder`, and write them there."""
    triton.knobs.cache.dir = folder
    triton.knobs.runtime.kernel_load_start_hook.add(_note)


def loaded() -> int:
    """Kernels compiled or read from disk since `keep_in`: each kept its first launch waiting."""
    return len(_loaded)
