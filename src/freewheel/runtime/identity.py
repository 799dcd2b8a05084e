# SPDX-License-Identifier: Apache-2.0
"""What the contents of cached pages depend on, in a few bytes."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from freewheel.spec.cache import CacheGroup

PACKAGE = Path(__file__).parents[1]

SAMPLES, SAMPLE_BYTES = 16, 1 << 16
"""Of each weight file, so many stretches of so many bytes are read: whole checkpoints take
minutes. With sizes and times of change, that tells one training from another."""


def cache_identity(
    folder: Path, groups: tuple[CacheGroup, ...], choices: Iterable[object]
) -> bytes:
    """32 bytes: the same for engines that write the same pages for the same tokens.

    `folder`: the model's; `choices`: whatever else an engine was told that changes what it
    writes. This package's own files count too: its kernels round as they do.
    """
    found = blake2b(digest_size=32)
    for part in (repr(groups), *map(repr, choices)):
        found.update(part.encode() + b"\0")
    for path in sorted(PACKAGE.rglob("*.py")):
        about = path.stat()
        found.update(f"{path.relative_to(PACKAGE)} {about.st_size} {about.st_mtime_ns}\0".encode())
    for path in sorted((folder / "config.json", *folder.glob("*.safetensors"))):
        size, changed = path.stat().st_size, path.stat().st_mtime_ns
        found.update(f"{path.name} {size} {changed}".encode())
        with path.open("rb") as file:
            for nth in range(SAMPLES):
                file.seek(nth * size // SAMPLES)
                found.update(file.read(SAMPLE_BYTES))
    return found.digest()
