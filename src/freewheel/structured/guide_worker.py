# SPDX-License-Identifier: Apache-2.0
"""The process that follows grammars. Reads answers' tokens, writes the masks behind them.

First a line of JSON with the lengths of all tokens (-1: no text), and their bytes. Then a line for
each question; each gets a line back, and a mask's bytes behind it.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

try:
    from freewheel.structured.following import mask_of, matcher_of, tokenizer_of
except ModuleNotFoundError as missing:
    sys.stdin.buffer.readline()
    cure = "pip install 'freewheel[structured]'"
    reason = f"it needs {missing.name}; install Freewheel with its structured extra: {cure}"
    sys.stdout.write(json.dumps({"error": reason}) + "\n")
    sys.exit(1)

from freewheel.structured.schema import Refusal
from freewheel.structured.vocabulary import read_vocabulary

MEMORY = 4 << 30
"""Bytes of address space that the process may take."""


class Follower:
    """All answers that are under way, by number."""

    def __init__(self, vocabulary: list[bytes | None]) -> None:
        self._size = len(vocabulary)
        self._tokenizer = tokenizer_of(vocabulary)
        self._open: dict[int, tuple[Any, list[int]]] = {}

    def answer(self, question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """The reply to one question, and the mask."""
        number = int(question["id"])
        if question.get("closed"):
            self._open.pop(number, None)
            return {"id": number}, b""
        try:
            if "source" in question:
                matcher = matcher_of(question["source"], self._tokenizer)
                self._open[number] = matcher, question["stop_ids"]
            matcher, stop_ids = self._open[number]
            for token in question["tokens"]:
                if not matcher.consume_token(token):
                    raise Refusal(f"token {token} does not follow: {matcher.get_error().strip()}")
            mask = mask_of(matcher, stop_ids, self._size)
        except Refusal as refusal:
            return {"id": number, "error": str(refusal)}, b""
        return {"id": number, "turn": question["turn"], "bytes": len(mask)}, mask


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    follower = Follower(read_vocabulary(stdin))
    stdout.write(b"{}\n")
    stdout.flush()
    for line in stdin:
        said, mask = follower.answer(json.loads(line))
        stdout.write(json.dumps(said).encode() + b"\n" + mask)
        stdout.flush()


if __name__ == "__main__":
    main()
