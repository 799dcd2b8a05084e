# SPDX-License-Identifier: Apache-2.0
"""SHA256SUMS: what every file of a folder should hold, as `sha256sum` writes it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from freewheel.errors import CheckpointError

MANIFEST = "SHA256SUMS"

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all)."""

PIECE = 1 << 24


def write_manifest(folder: Path) -> None:
    """Sum up every file that lies in `folder` itself."""
    files = sorted(f for f in folder.iterdir() if f.is_file() and f.name != MANIFEST)
    lines = [f"{_sum(file, lambda _: None)}  {file.name}\n" for file in files]
    (folder / MANIFEST).write_text("".join(lines), encoding="utf-8")


def verify_manifest(folder: Path, progress: Progress | None = None) -> int:
    """How many files are as SHA256SUMS says.

    Raises CheckpointError, naming the files, if there is no manifest, if it lists what is missing
    or differs, or if it does not list a weight file.
    """
    sums = _read(folder / MANIFEST)
    missing = [name for name in sums if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: files of {MANIFEST} are missing: {', '.join(missing)}")
    unlisted = sorted({f.name for f in folder.glob("*.safetensors")} - sums.keys())
    if unlisted:
        raise CheckpointError(f"{folder}: {MANIFEST} does not list {', '.join(unlisted)}")
    total, done = sum((folder / name).stat().st_size for name in sums), 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    wrong = [name for name, digest in sums.items() if _sum(folder / name, count) != digest]
    if wrong:
        raise CheckpointError(
            f"{folder}: not what {MANIFEST} says: {', '.join(wrong)}; fetch the files again"
        )
    return len(sums)


def _read(file: Path) -> dict[str, str]:
    """File name -> digest."""
    if not file.is_file():
        raise CheckpointError(
            f"{file}: the file is missing, so there is nothing to verify against; make one with "
            "sha256sum, where the files are known to be good"
        )
    return dict(_lines(file))


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        digest, _, name = line.partition(" ")
        name = name.removeprefix(" ").removeprefix("*")
        if len(digest) != 64 or Path(name).name != name or not name:
            raise CheckpointError(f"{file}: line {number} is not a digest and a file name")
        yield name, digest.lower()


def _sum(file: Path, count: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while piece := handle.read(PIECE):
            digest.update(piece)
            count(len(piece))
    return digest.hexdigest()
