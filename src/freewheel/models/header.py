# SPDX-License-Identifier: Apache-2.0
"""Reads the header of a safetensors file: what it holds, and where each tensor's bytes lie.

Eight bytes give the length of a JSON object; behind it lie the tensors, and `data_offsets` count
from there. Every byte behind the header belongs to exactly one tensor.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from freewheel.errors import CheckpointError

LARGEST_HEADER = 100_000_000
"""Bytes that safetensors allows."""

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of an element, by safetensors' name of its dtype."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file's header describes it. `dtype` is safetensors' name: BF16, F32, ...

    `start`: where its bytes begin in the file; `size`: how many they are.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    size: int


class _Span(NamedTuple):
    begin: int
    end: int
    name: str


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Every tensor of the file, by name.

    Raises CheckpointError, naming the file and the tensor, if it cannot be read, is cut short, or
    contradicts itself.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or 8 + length > size:
                raise CheckpointError(f"{file}: truncated: {size} bytes do not hold its header")
            if length > LARGEST_HEADER:
                raise CheckpointError(f"{file}: not a safetensors file: {length} bytes of header")
            raw = handle.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    entries = _parse(file, raw)
    tensors = {name: _entry(file, name, value, 8 + length) for name, value in entries.items()}
    _check_spans(file, tensors, 8 + length, size)
    return tensors


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a safetensors file: its header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: not a safetensors file: its header is no JSON object")
    header.pop("__metadata__", None)
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice} occurs twice")
    return found


def _entry(file: Path, name: str, value: Any, data: int) -> StoredTensor:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{file}: {name}: the header must give dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in BITS:
        raise CheckpointError(f"{file}: {name}: unknown dtype {dtype!r}")
    if not _are_whole(shape) or not _are_whole(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{file}: {name}: shape and data_offsets must be whole numbers")
    begin, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (end - begin):
        raise CheckpointError(
            f"{file}: {name}: {dtype} {list(shape)} takes {bits / 8:g} bytes, its data_offsets "
            f"{begin} to {end} hold {end - begin}"
        )
    return StoredTensor(file, tuple(shape), dtype, data + begin, end - begin)


def _are_whole(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values
    )


def _check_spans(file: Path, tensors: dict[str, StoredTensor], data: int, size: int) -> None:
    """Spans follow one another without gap or overlap, and end where the file ends."""
    spans = sorted(_Span(t.start, t.start + t.size, name) for name, t in tensors.items())
    at, before = data, "the header"
    for begin, end, name in spans:
        if begin < at:
            raise CheckpointError(f"{file}: {name} overlaps {before}")
        if begin > at:
            raise CheckpointError(f"{file}: {begin - at} bytes before {name} belong to no tensor")
        at, before = end, name
    if at > size:
        missing = f"{at - size} bytes of {before} are missing"
        raise CheckpointError(f"{file}: truncated: {missing}")
    if at < size:
        raise CheckpointError(f"{file}: {size - at} bytes behind {before} belong to no tensor")
