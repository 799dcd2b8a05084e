# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, by the folder's tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from freewheel.errors import CheckpointError


class Tokenizer:
    """The model folder's own tokenizer."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if the folder has no readable tokenizer.json."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; a model folder needs its tokenizer.json")
        text = path.read_text(encoding="utf-8")
        _check_json(path, text)
        self._tokenizer = _Tokenizer.from_str(text)
        self._plain = _Tokenizer.from_str(text)
        self._plain.encode_special_tokens = True

    @property
    def size(self) -> int:
        """Token ids known, special ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode_prompt(self, text: str) -> list[int]:
        """A whole prompt as its author wrote it: control tokens count, a begin token is added."""
        return self._tokenizer.encode(text).ids

    def encode_text(self, text: str) -> list[int]:
        """A stretch of plain text: what looks like a control token is spelt out as characters."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def token_id(self, token: str) -> int | None:
        """The id of a special token, or None."""
        return self._tokenizer.token_to_id(token)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; incomplete characters come out as U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def _check_json(path: Path, text: str) -> None:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict) or "model" not in found:
        raise CheckpointError(f"{path}: not a tokenizer: it has no `model` object")
