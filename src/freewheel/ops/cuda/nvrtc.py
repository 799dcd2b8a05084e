# SPDX-License-Identifier: Apache-2.0
"""NVRTC, the compiler of CUDA C++ that comes with PyTorch's CUDA builds, called as it is.

Its interface is C and has not changed since CUDA 11.1 but for additions (NVRTC's manual, "NVRTC
API"): a program is made of a text, compiled with options, and gives machine code of one chip.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from freewheel.errors import ConfigError


@dataclass(frozen=True)
class Compiler:
    """`version`: as 13.0."""

    library: ctypes.CDLL
    version: str

    def compile(self, source: str, options: tuple[str, ...]) -> bytes:
        """Machine code of `source`, CUDA C++. Raises RuntimeError with the compiler's report."""
        call, program = self.library, ctypes.c_void_p()
        text, given = source.encode(), [option.encode() for option in options]
        self._check(call.nvrtcCreateProgram(ctypes.byref(program), text, None, 0, None, None))
        try:
            words = (ctypes.c_char_p * len(given))(*given)
            if call.nvrtcCompileProgram(program, len(given), words) != 0:
                report = self._taken(program, "ProgramLog").rstrip(b"\0").decode()
                raise RuntimeError(f"NVRTC {self.version}: {report}")
            return self._taken(program, "CUBIN")
        finally:
            call.nvrtcDestroyProgram(ctypes.byref(program))

    def knows(self, chip: int) -> bool:
        """Whether it makes code of `chip`, as 90 of sm_90: a device may be newer than it is."""
        count = ctypes.c_int()
        self._check(self.library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        chips = (ctypes.c_int * count.value)()
        self._check(self.library.nvrtcGetSupportedArchs(chips))
        return chip in list(chips)

    def _taken(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(self.library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)))
        found = ctypes.create_string_buffer(size.value)
        self._check(self.library[f"nvrtcGet{what}"](program, found))
        return found.raw

    def _check(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"NVRTC {self.version}: error {code}")


def _candidates(major: str) -> Iterator[str]:
    """Where PyTorch's wheels keep it, then the loader's own places, then the toolkit's."""
    name = f"libnvrtc.so.{major}"
    nvidia = find_spec("nvidia")
    roots = [] if nvidia is None else [Path(p) for p in nvidia.submodule_search_locations or ()]
    for root in roots:
        for folder in (f"cu{major}", "cuda_nvrtc"):
            yield str(root / folder / "lib" / name)
    yield str(Path(torch.__file__).parent / "lib" / name)
    yield name
    yield f"/usr/local/cuda/lib64/{name}"


def _load_builtins(path: Path) -> None:
    """NVRTC asks the loader for it by name alone, which finds what is loaded already."""
    if path.is_file():
        ctypes.CDLL(str(path))


@cache
def find_compiler(cuda: str | None = torch.version.cuda) -> Compiler:
    """NVRTC of the CUDA release that PyTorch was built for, as 13.0.

    Raises ConfigError where there is none, which says how to install it.
    """
    if cuda is None:
        raise ConfigError("device: this PyTorch was built without CUDA; install a build with it")
    major = cuda.split(".")[0]
    for path in _candidates(major):
        try:
            library = ctypes.CDLL(path)
            numbers = ctypes.c_int(), ctypes.c_int()
            library.nvrtcVersion(*(ctypes.byref(one) for one in numbers))
            version = ".".join(str(one.value) for one in numbers)
            _load_builtins(Path(path).parent / f"libnvrtc-builtins.so.{version}")
        except OSError:
            continue
        return Compiler(library, version)
    package = "nvidia-cuda-nvrtc" if int(major) > 12 else f"nvidia-cuda-nvrtc-cu{major}"
    raise ConfigError(f"device: libnvrtc.so.{major} was not found; install {package}")
