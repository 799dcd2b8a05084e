# SPDX-License-Identifier: Apache-2.0
"""Engines that share a key prove to one another that they have it, on every line.

    reader   "hello", and a number used once
    post     another one, and a proof: a code of both numbers by the key
    reader   from here on, as the post, adds to each message a code of it, of its number and of who
             says it, by a key that follows from both numbers

Codes are HMAC-SHA256 (RFC 2104) and compared in constant time. Nothing is encrypted, and pages are
no messages: whoever can change bytes under way can change those, which only checksums guard.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path
from typing import Any

from freewheel.errors import ConfigError
from freewheel.spec.private import warn_of_readers
from freewheel.transfer.line import Line, WireError

SHORTEST, LONGEST = 16, 4096
"""Bytes of a key."""

NUMBER = 32
"""Hexadecimal digits of a number used once."""

KEYLESS = "this engine wants a key: start both with --kv-key-file"
UNASKED = "this engine has no key, and the other one asks for it: start both with --kv-key-file"


class Key:
    """What engines share. It shows itself to nobody."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "Key(..)"

    def meet(self, line: Line) -> None:
        """As the reader. Raises WireError if the other end does not have the key."""
        own = secrets.token_hex(NUMBER // 2)
        line.say({"hello": own})
        told = line.hear()
        if "refused" in told:
            raise WireError(f"the other engine: {told['refused']}")
        other, proof = told.get("number"), told.get("proof")
        if not isinstance(other, str) or not isinstance(proof, str) or not _is_number(other):
            raise WireError("the other engine has no key; start both with --kv-key-file")
        session = self._session(own, other)
        if not proof.isascii() or not hmac.compare_digest(proof, _proof(session)):
            raise WireError("the other engine has another key; give both one --kv-key-file")
        line.seal(session, "reader", "post")

    def admit(self, line: Line, first: dict[str, Any]) -> dict[str, Any]:
        """As the post: the reader's next message behind `first`. Raises WireError without a key."""
        other = first.get("hello")
        if not isinstance(other, str) or not _is_number(other):
            line.say({"refused": KEYLESS})
            raise WireError("a reader without a key")
        own = secrets.token_hex(NUMBER // 2)
        session = self._session(other, own)
        line.say({"number": own, "proof": _proof(session)})
        line.seal(session, "post", "reader")
        return line.hear()

    def _session(self, reader: str, post: str) -> bytes:
        return hmac.digest(self._secret, f"freewheel pages {reader} {post}".encode(), "sha256")


def read_key(path: str | None, warns: bool = True) -> Key | None:
    """The key in a file, without white space around it; None where there is no file. `warns`: of a
    file that others may read.

    Raises ConfigError, which says nothing of what is in it.
    """
    if path is None:
        return None
    try:
        secret = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"kv_key_file: {path} cannot be read: {error.strerror}") from error
    if not SHORTEST <= len(secret) <= LONGEST:
        raise ConfigError(
            f"kv_key_file: the key in {path} must have {SHORTEST} to {LONGEST} bytes; make one "
            "with `openssl rand -hex 32`"
        )
    if warns:
        warn_of_readers("kv_key_file", Path(path).expanduser())
    return Key(secret)


def _proof(session: bytes) -> str:
    return hmac.digest(session, b"post has it", "sha256").hex()


def _is_number(told: str) -> bool:
    return len(told) == NUMBER and all(letter in "0123456789abcdef" for letter in told)
