# SPDX-License-Identifier: Apache-2.0
"""Files of blocks, written and read by a thread of their own.

A file is a header and a slot of host memory as it is:

    8 bytes    MAGIC
    16         the block's key
    16         the key of the block before it
    8          1 if it has the latest pages too
    8          bytes of the slot
    16         a keyed hash of the header so far and of the slot
    zeros up to HEADER_BYTES, then the slot

The folder keeps a secret. From it and from what the pages depend on (the model, how rows are
stored, where they were computed) follows the key of all hashes here, those of blocks included, so
that nobody finds what another model or another folder computed. Files that do not fit are removed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import struct
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from freewheel.errors import ConfigError
from freewheel.spec.filed import KEY_BYTES, Filed
from freewheel.spec.transfer import BlockCopy, Transfer, TransferResult, Way

log = logging.getLogger("freewheel.cache")

MAGIC = b"FWBLOCK1"
HEADER_BYTES = 128
SECRET_BYTES = 32
_FIELDS = struct.Struct(f"<8s{KEY_BYTES}s{KEY_BYTES}sQQ")
_DIGEST_BYTES = 16
_SUFFIX, _UNFINISHED = ".block", ".part"
_KEY_FILE, _LOCK_FILE = "key", "lock"

_STORES: weakref.WeakSet[FileStore] = weakref.WeakSet()
"""Those of this process."""


class FileStore:
    """Blocks of `size` bytes in `folder`, which this process has to itself.

    `identity`: what the blocks depend on. Raises ConfigError if the folder cannot be used.
    """

    def __init__(self, folder: Path, identity: bytes, size: int) -> None:
        self.folder, self.size = folder, size
        try:
            self._lock = _own(folder)
            own = _secret_of(folder)
        except OSError as error:
            raise ConfigError(f"disk_cache_dir: {folder} cannot be used: {error}") from error
        self.secret = blake2b(identity, key=own, digest_size=SECRET_BYTES).digest()
        self._thread = ThreadPoolExecutor(1, "freewheel-files")
        self._under_way: deque[tuple[Transfer, Future[frozenset[int]]]] = deque()
        self._warned = False
        self._close = weakref.finalize(self, _let_go, self._thread, self._lock)
        self.bytes_out = self.bytes_in = 0
        _STORES.add(self)

    @property
    def file_bytes(self) -> int:
        """Of one block."""
        return HEADER_BYTES + self.size

    def scan(self) -> list[Filed]:
        """What lies in the folder once all is done that is under way, the least recently used
        first. Other files of ours are removed."""
        return self._thread.submit(self._scan).result()

    def _scan(self) -> list[Filed]:
        """In the thread: nothing comes or goes meanwhile."""
        found: list[tuple[float, Filed]] = []
        for path in self.folder.iterdir():
            if path.suffix == _UNFINISHED:
                path.unlink(missing_ok=True)
            if path.suffix != _SUFFIX:
                continue
            filed = self._filed(path)
            if filed is None:
                path.unlink(missing_ok=True)
            else:
                found.append((path.stat().st_mtime, filed))
        return [filed for _, filed in sorted(found, key=lambda one: one[0])]

    def start(self, transfer: Transfer, slot: Callable[[int], memoryview]) -> None:
        """It is under way. `slot`: host memory by its number, which nobody else uses meanwhile."""
        future = self._thread.submit(self._carry, transfer, slot)
        self._under_way.append((transfer, future))

    def ended(self, wait: bool = False) -> list[TransferResult]:
        """Transfers that are done, in their order. `wait`: for at least one, if any is under
        way."""
        results: list[TransferResult] = []
        while self._under_way and (self._under_way[0][1].done() or (wait and not results)):
            transfer, future = self._under_way[0]
            damaged = future.result()
            self._under_way.popleft()
            if transfer.blocks:
                results.append(TransferResult(transfer.id, damaged))
        return results

    def close(self) -> None:
        """Once all is done: another process may have the folder."""
        self._close()

    def _carry(self, transfer: Transfer, slot: Callable[[int], memoryview]) -> frozenset[int]:
        """In the thread: the blocks that went wrong."""
        for key in transfer.gone:
            self._path(key).unlink(missing_ok=True)
        damaged: set[int] = set()
        for nth, copy in enumerate(transfer.blocks):
            try:
                whole = self._one(transfer.way, copy, slot(copy.slot))
            except OSError as error:
                whole = False
                self._warn(transfer.way, error)
            if not whole:
                damaged.add(nth)
        return frozenset(damaged)

    def _one(self, way: Way, copy: BlockCopy, slot: memoryview) -> bool:
        assert copy.filed is not None
        if way is Way.DOWN:
            self._write(copy.filed, slot)
            self.bytes_out += self.size
            return True
        self.bytes_in += self.size
        return self._read(copy.filed, slot)

    def _write(self, filed: Filed, slot: memoryview) -> None:
        """A reader finds all of it or nothing."""
        path = self._path(filed.key)
        part = path.with_suffix(_UNFINISHED)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(part, flags, 0o600), "wb") as file:
                file.write(self._header(filed, slot))
                file.write(slot)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _read(self, filed: Filed, slot: memoryview) -> bool:
        """Whether the file is what was written."""
        path = self._path(filed.key)
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
            header = file.read(HEADER_BYTES)
            count = 0
            while count < self.size and (more := file.readinto(slot[count:])):
                count += more
            whole = count == self.size and not file.read(1)
        if whole and header == self._header(filed, slot):
            os.utime(path)
            return True
        path.unlink(missing_ok=True)
        return False

    def _header(self, filed: Filed, slot: memoryview) -> bytes:
        fields = _FIELDS.pack(MAGIC, filed.key, filed.parent, filed.latest, len(slot))
        found = blake2b(fields, key=self.secret, digest_size=_DIGEST_BYTES)
        found.update(slot)
        return (fields + found.digest()).ljust(HEADER_BYTES, b"\0")

    def _filed(self, path: Path) -> Filed | None:
        """What a file says it is; None if it is no block of this store. Its slot is not read."""
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                header = file.read(HEADER_BYTES)
                size = os.fstat(file.fileno()).st_size
        except OSError:
            return None
        if len(header) < HEADER_BYTES or size != self.file_bytes:
            return None
        magic, key, parent, latest, length = _FIELDS.unpack_from(header)
        if magic != MAGIC or length != self.size or self._path(key) != path:
            return None
        return Filed(key, parent, latest == 1)

    def _path(self, key: bytes) -> Path:
        """Names are hashed with the store's secret: blocks of another one have others."""
        name = blake2b(key, key=self.secret, digest_size=KEY_BYTES).hexdigest()
        return self.folder / (name + _SUFFIX)

    def _warn(self, way: Way, error: OSError) -> None:
        if way is Way.DOWN and not self._warned:
            self._warned = True
            log.error("blocks cannot be written to %s: %s", self.folder, error)


def folder_of_rank(place: Path, rank: int) -> Path:
    """A folder in `place`, which is made if need be: one process may have `place` itself later.

    Raises what `make_private` raises.
    """
    make_private(place)
    return place / f"rank-{rank}"


def tell_of_ranks_no_more(place: Path, ranks: int) -> None:
    """Say in the log which folders in `place` are of ranks that an engine of so many has not.

    They stay: an engine of as many ranks as before finds its blocks there. One process has no
    folder of a rank.
    """
    own = {f"rank-{rank}" for rank in range(ranks if ranks > 1 else 0)}
    left = sorted(one.name for one in place.glob("rank-*") if one.name not in own)
    if left:
        log.warning(
            "disk_cache_dir: %s has %s from an engine of another number of ranks; what they hold "
            "serves only such a one and counts towards no limit here: remove them if none is to "
            "come",
            place,
            ", ".join(left),
        )


def retire(folder: Path) -> None:
    """Close what this process has in `folder`, for an engine that the one who leads it let go."""
    for store in tuple(_STORES):
        if store.folder == folder:
            store.close()


def make_private(folder: Path) -> None:
    """Make the folder and those above it, where they are missing, each for its owner alone.

    Raises ConfigError if it cannot be made, is another user's, or is open to others.
    """
    try:
        missing = [one for one in (folder, *folder.parents) if not one.exists()]
        for one in reversed(missing):
            one.mkdir(mode=0o700, exist_ok=True)  # `parents` would make those above by the umask
        found = folder.stat()
    except OSError as error:
        raise ConfigError(f"disk_cache_dir: {folder} cannot be used: {error}") from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"disk_cache_dir: {folder} holds what users asked; it must be yours, and closed to "
            "others (chmod 700)"
        )


def _own(folder: Path) -> int:
    """Make the folder if need be, and lock it: a file descriptor."""
    make_private(folder)
    lock = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ConfigError(
            f"disk_cache_dir: another engine has {folder}; name another folder"
        ) from error
    return lock


def _let_go(thread: ThreadPoolExecutor, lock: int) -> None:
    with suppress(RuntimeError):  # in that very thread, where the last of its work ended
        thread.shutdown(wait=True)
    os.close(lock)


def _secret_of(folder: Path) -> bytes:
    """The folder's own, made when it is first used."""
    path = folder / _KEY_FILE
    if path.exists():
        own = path.read_bytes()
        if len(own) == SECRET_BYTES:
            return own
    own = secrets.token_bytes(SECRET_BYTES)
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        file.write(own)
    return own
