# SPDX-License-Identifier: Apache-2.0
"""The only way from the device to the host, and the only file where a device value becomes an int."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel.runtime.counters import Counters
from freewheel.spec.plan import RowResult, StepPlan, StepResult
from freewheel.spec.sampling import FinishReason
from freewheel.spec.shape import StepShape
from freewheel.state import OutboxLayout
from freewheel.state.letters import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, RESULT_WORDS

_FINISH = {
    FINISH_NONE: None,
    FINISH_STOP: FinishReason.STOP,
    FINISH_LENGTH: FinishReason.LENGTH,
}


@dataclass(frozen=True)
class _Letter:
    plan: StepPlan
    words: Tensor  # int32 [B, words]  on the host


class Mailbox:
    """Letters home, oldest first. A slot is reused only after its letter was read."""

    def __init__(self, depth: int, counters: Counters) -> None:
        """`depth`: letters that may wait unread."""
        self._depth = depth
        self._counters = counters
        self._waiting: deque[_Letter] = deque()
        self._slots: dict[StepShape, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def post(self, plan: StepPlan, outbox: Tensor) -> None:
        """Copy the round's outbox, int32 [B, words], to a host slot of its shape."""
        if len(self._waiting) > self._depth:
            raise RuntimeError(f"{len(self._waiting)} letters wait unread; at most {self._depth} may")
        slots = self._slots.setdefault(plan.shape, [])
        words = slots.pop() if slots else torch.empty(outbox.shape, dtype=torch.int32)
        words.copy_(outbox, non_blocking=True)
        self._counters.downloads += 1
        self._waiting.append(_Letter(plan, words))

    def collect(self) -> StepResult:
        """The oldest letter, as ints. Raises IndexError if none waits."""
        letter = self._waiting.popleft()
        words = letter.words.tolist()
        self._slots[letter.plan.shape].append(letter.words)
        rows = (_row_result(row, fields) for row, fields in zip(letter.plan.rows, words, strict=False))
        return StepResult(letter.plan.round_id, tuple(rows))


def _row_result(row: int, words: list[int]) -> RowResult:
    count, finish, computed, drafted, agreed = words[:RESULT_WORDS]
    tokens = tuple(words[RESULT_WORDS : RESULT_WORDS + count])
    return RowResult(row, tokens, _FINISH[finish], computed, drafted, agreed)


def outbox_shape(shape: StepShape) -> tuple[int, int]:
    """Shape of the int32 outbox of rounds of `shape`."""
    layout = OutboxLayout.of(shape)
    return layout.batch, layout.row_words
