# SPDX-License-Identifier: Apache-2.0
"""The process that follows grammars. Reads answers' tokens, writes the masks behind them.

First a line of JSON with the lengths of all tokens (-1: no text), and their bytes. Then a line for
each question; each gets a line back, and a mask's bytes behind it.
"""

from __future__ import annotations

import json
from typing import Any

from freewheel.structured.serving import give_up, serve

try:
    from freewheel.structured.following import mask_of, matcher_of, tokenizer_of
except ModuleNotFoundError as missing:
    give_up(missing)

from freewheel.structured.schema import Refusal


class Follower:
    """All answers that are under way, by number."""

    def __init__(self, vocabulary: list[bytes | None]) -> None:
        self._size = len(vocabulary)
        self._tokenizer = tokenizer_of(vocabulary)
        self._open: dict[int, tuple[Any, list[int]]] = {}

    def answer(self, line: bytes) -> tuple[dict[str, Any], bytes]:
        """The reply to one question, and the mask."""
        question = json.loads(line)
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


if __name__ == "__main__":
    serve(lambda vocabulary: Follower(vocabulary).answer)
