# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, by the folder's tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer

from freewheel.errors import CheckpointError, RequestError, UnsupportedModel


class Tokenizer:
    """The model folder's own tokenizer.

    Two copies: one that knows the control tokens (every added token, whether the file calls it
    special or not), one that has never heard of them.
    """

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if the folder has no readable byte-level tokenizer.json."""
        path = folder / "tokenizer.json"
        found = _read(path)
        _check_decoder(path, found.get("decoder"))
        # A length limit would cut prompts, and padding would lengthen them, without a word.
        found |= {"truncation": None, "padding": None}
        self._tokenizer = _make(path, found)
        self._bytes = _token_bytes(found)
        added = found.get("added_tokens") or ()
        self._control = {str(token["content"]): int(token["id"]) for token in added}
        self._plain = _make(path, _without_control_tokens(found))
        self._special = frozenset(token.get("id") for token in added if token.get("special"))

    @property
    def size(self) -> int:
        """One more than the largest token id known, special ones included."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode_prompt(self, text: str) -> list[int]:
        """A whole prompt as its author wrote it: control tokens count, a begin token is added.

        Raises RequestError if `text` is not valid Unicode.
        """
        _check_text(text)
        return self._tokenizer.encode(text).ids

    def encode_text(self, text: str) -> list[int]:
        """A stretch of plain text: what looks like a control token is spelt out as characters.

        Raises RequestError if `text` is not valid Unicode.
        """
        _check_text(text)
        return self._plain.encode(text, add_special_tokens=False).ids

    def token_id(self, token: str) -> int | None:
        """The id of a special token, or None."""
        return self._tokenizer.token_to_id(token)

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """The id of every added token, by its text."""
        return self._control

    def token_bytes(self, count: int) -> list[bytes | None]:
        """What each of `count` token ids says; None for control tokens and ids without a token."""
        return [self._bytes.get(token) for token in range(count)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; incomplete characters come out as U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_with(self, shown: Set[int], ids: Sequence[int]) -> str:
        """The text of `ids`, of special tokens only that of those `shown`."""
        kept = [token for token in ids if token in shown or token not in self._special]
        return self._tokenizer.decode(kept, skip_special_tokens=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes() if path.is_file() else None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if raw is None:
        raise CheckpointError(f"{path}: missing; a model folder needs its tokenizer.json")
    try:
        found = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also a number too long, brackets too deep
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise CheckpointError(f"{path}: not a tokenizer: it has no `model` object")
    return found


def _make(path: Path, found: Mapping[str, Any]) -> _Tokenizer:
    try:
        return _Tokenizer.from_buffer(json.dumps(found).encode())
    except ValueError as error:
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error


def _check_decoder(path: Path, decoder: object) -> None:
    """Streamed text is put together by bytes: no other decoder's text could be (`host.text`)."""
    kinds = [decoder]
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence":
        kinds = decoder.get("decoders") or [None]
    if any(not isinstance(kind, dict) or kind.get("type") != "ByteLevel" for kind in kinds):
        found = decoder.get("type") if isinstance(decoder, dict) else decoder
        raise UnsupportedModel(f"{path}: decoder {found!r} is not supported; supported: ByteLevel")


def _without_control_tokens(found: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer without its added tokens, of which text could otherwise spell one.

    Files may list them in the vocabulary as well, where whole words are looked up.
    """
    added = {token.get("content") for token in found.get("added_tokens") or ()}
    model = dict(found["model"])
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {t: i for t, i in model["vocab"].items() if t not in added}
    return {**found, "model": model, "added_tokens": []}


def _token_bytes(found: Mapping[str, Any]) -> dict[int, bytes]:
    """The bytes of every token that text can hold, by id.

    Byte-level vocabularies write each byte as one printable letter: itself where it is printable
    in Latin-1, and otherwise one from U+0100 on, in order (OpenAI's GPT-2 encoder).
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    letters |= {chr(256 + place): byte for place, byte in enumerate(others)}
    added = {token.get("id") for token in found.get("added_tokens") or ()}
    vocabulary = found["model"].get("vocab")
    if not isinstance(vocabulary, dict):
        return {}
    return {
        index: bytes(letters[letter] for letter in token)
        for token, index in vocabulary.items()
        if index not in added and all(letter in letters for letter in token)
    }


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            "prompt", f"is not valid Unicode: {error.reason} at character {error.start}"
        ) from error
