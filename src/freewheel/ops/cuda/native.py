# SPDX-License-Identifier: Apache-2.0
"""Kernels in CUDA C++: compiled at run time, kept on disk beside Triton's, launched by the driver.

What Triton has no word for is written in `sources/`. A kernel is compiled for one chip and for
constants, as Triton's are. Where NVRTC is missing, `lacking` says so, and whoever would launch a
kernel from here launches its stand-in in Triton: the choice is made by what is there, once.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from freewheel.errors import ConfigError
from freewheel.ops.cuda.chain import CHAINED
from freewheel.ops.cuda.nvrtc import find_compiler

SOURCES = Path(__file__).parent / "sources"

SHARED = 232_448
"""Bytes of shared memory that a block may ask for, on Hopper and later."""

_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SERIAL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

_launched: list[str] = []
_left_out: list[dict[str, Kernel]] = []

_ROW_OF_BOX = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_LINES = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B

Argument = ctypes.c_void_p | ctypes.c_int | ctypes.c_float | ctypes.Array[ctypes.c_uint64]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_int * 16)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"device: the driver is missing: {error}") from error


def _check(code: int) -> None:
    if code != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'unknown').decode()} ({code})")


def _enter(device: int) -> None:
    """Make the device's own context current in this thread, if none is."""
    call, context, handle = _driver(), ctypes.c_void_p(), ctypes.c_int()
    _check(call.cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        _check(call.cuDeviceGet(ctypes.byref(handle), device))
        _check(call.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
        _check(call.cuCtxSetCurrent(context))


class Boxes(NamedTuple):
    """A tensor of bytes of which a kernel copies boxes: of five dimensions, innermost first.

    Rows of a box have 128 bytes, and strides are multiples of 16 bytes but the first, which is 1.
    """

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@lru_cache(4096)
def _map_of(boxes: Boxes) -> ctypes.Array[ctypes.c_uint64]:
    """What the driver makes of `boxes`, for a kernel's parameter (cuTensorMapEncodeTiled)."""
    room, found = (ctypes.c_uint64 * 24)(), (ctypes.c_uint64 * 16)()
    start = ctypes.addressof(room)
    start += -start % 64
    long, short = ctypes.c_uint64 * 5, ctypes.c_uint32 * 5
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start), 0, 5, ctypes.c_void_p(boxes.address), long(*boxes.sizes),
        (ctypes.c_uint64 * 4)(*boxes.strides[1:]), short(*boxes.box), short(1, 1, 1, 1, 1),
        0, _ROW_OF_BOX, _LINES, 0,
    )  # fmt: skip
    _check(code)
    ctypes.memmove(found, start, 128)
    return found


LETTERS: dict[str, Callable[[Any], Argument]] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
    "m": _map_of,
}


@cache
def lacking() -> str | None:
    """Why kernels from here cannot run on this machine's device; None if they can."""
    if not CHAINED:
        return "the device is older than Hopper"
    if torch.cuda.get_device_properties().shared_memory_per_block_optin < SHARED:
        return f"a block of the device has less than {SHARED:,} bytes of shared memory"
    try:
        compiler = find_compiler()
        _driver()
    except ConfigError as error:
        return str(error)
    major, minor = torch.cuda.get_device_capability()
    if not compiler.knows(10 * major + minor):
        return f"NVRTC {compiler.version} makes no code for sm_{major}{minor}"
    return None


def code_of(name: str, chip: str, constants: dict[str, int]) -> bytes:
    """Machine code of `sources/NAME.cu` for `chip` (as sm_90), with `constants` defined."""
    files = (*sorted(SOURCES.glob("*.cuh")), SOURCES / f"{name}.cu")
    text = "\n".join(one.read_text() for one in files)
    compiler = find_compiler()
    defined = tuple(f"-D{word}={value}" for word, value in sorted(constants.items()))
    options = (f"--gpu-architecture={chip}", "--std=c++17", "-default-device", *defined)
    key = hashlib.sha256("\0".join((compiler.version, *options, text)).encode()).hexdigest()
    kept = Path(triton.knobs.cache.dir) / "native" / f"{name}-{key[:32]}.cubin"
    if kept.is_file():
        return kept.read_bytes()
    code = compiler.compile(text, options)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
        file.write(code)
    os.replace(file.name, kept)  # whole or not at all, for whoever reads it meanwhile
    return code


@dataclass(frozen=True)
class Variant:
    """A kernel for one set of constants, loaded."""

    function: ctypes.c_void_p

    def run(self, blocks: int, threads: int, shared: int, arguments: Sequence[Argument]) -> None:
        """Launch on the current stream."""
        chained = _Attribute(id=_SERIAL, value=(ctypes.c_int * 16)(1))
        launch = _Launch(
            (ctypes.c_uint * 3)(blocks, 1, 1), (ctypes.c_uint * 3)(threads, 1, 1), shared,
            torch.cuda.current_stream().cuda_stream, ctypes.pointer(chained), 1,
        )  # fmt: skip
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        _check(_driver().cuLaunchKernelEx(ctypes.byref(launch), self.function, places, None))


@dataclass
class Kernel:
    """`sources/NAME.cu`, whose function is named NAME.

    `arguments`: a letter each, p for a tensor, i for an int, f for a float, m for boxes. `chip`:
    the letter behind the chip's number, for instructions that only that chip has.
    """

    name: str
    arguments: str
    chip: str = ""
    variants: dict[tuple[int, str], Variant] = field(default_factory=dict)

    def launch(
        self,
        blocks: int,
        threads: int,
        shared: int,
        *given: torch.Tensor | Boxes | float,
        **constants: int,
    ) -> None:
        """Launch the variant of `constants`, on the current stream; `shared`: bytes a block."""
        data = json.dumps(constants, sort_keys=True)
        key = torch.cuda.current_device(), data
        if key not in self.variants:
            if _left_out:
                _left_out[-1][f"{self.name} {data}"] = self
                return
            self.preload(data)
        places = [
            LETTERS[letter](one.data_ptr() if isinstance(one, torch.Tensor) else one)
            for letter, one in zip(self.arguments, given, strict=True)
        ]
        self.variants[key].run(blocks, threads, shared, places)

    def preload(self, data: str) -> Variant:
        """Compile the variant of constants `data`, or read it from disk, and load it.

        Raises RuntimeError if the compiler or the driver refuses it.
        """
        device = torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(device)
        code = code_of(self.name, f"sm_{major}{minor}{self.chip}", json.loads(data))
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _enter(device)
        _check(_driver().cuModuleLoadData(ctypes.byref(module), code))
        name = self.name.encode()
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name))
        _check(_driver().cuFuncSetAttribute(function, _SHARED_SIZE, SHARED))
        _launched.append(self.name)
        return self.variants.setdefault((device, data), Variant(function))


def loaded() -> int:
    """Variants loaded so far."""
    return len(_launched)


@contextmanager
def left_out() -> Generator[list[tuple[Kernel, str]]]:
    """A context in which launches of variants that are not loaded are listed instead, each once."""
    found: list[tuple[Kernel, str]] = []
    _left_out.append({})
    try:
        yield found
    finally:
        missed = _left_out.pop()
        found += [(kernel, key.partition(" ")[2]) for key, kernel in missed.items()]
