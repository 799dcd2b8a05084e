# SPDX-License-Identifier: Apache-2.0
"""The only way from the device to the host, and where a device value becomes an int."""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from freewheel.runtime.counters import Counters
from freewheel.runtime.streams import Mark, Streams
from freewheel.spec.picks import PickedLayers
from freewheel.spec.plan import RowResult, StepPlan, StepResult, TokenScore
from freewheel.spec.sampling import MAX_LOGPROBS, FinishReason
from freewheel.spec.shape import StepShape
from freewheel.spec.violation import VerdictLayout
from freewheel.state import OutboxLayout
from freewheel.state.letters import (
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    RESULT_WORDS,
    SCORE_WORDS,
)

_FINISH = {
    FINISH_NONE: None,
    FINISH_STOP: FinishReason.STOP,
    FINISH_LENGTH: FinishReason.LENGTH,
    FINISH_ERROR: FinishReason.ERROR,
}


@dataclass(frozen=True)
class _Slot:
    """Host memory for one letter of a shape."""

    words: Tensor  # int32 [copies * B, words]  on the host
    written: Mark  # the round has filled its outbox
    arrived: Mark  # the letter is here


class Mailbox:
    """Letters home, oldest first. A slot is used again only after its letter was read.

    Which letters wait is the only thing it remembers, so an interrupt of the host at any line, in
    the midst of a wait too, leaves every slot either waiting or free.
    """

    def __init__(
        self,
        depth: int,
        streams: Streams,
        counters: Counters,
        copies: int = 1,
        picked: PickedLayers | None = None,
        verdicts: VerdictLayout | None = None,
    ) -> None:
        """`depth`: letters that may wait unread while another round is launched.

        `copies`: of the model, whose letters come home together. `picked`: the model's. `verdicts`:
        of a canary, whose words are the last ones of each row.
        """
        self._depth, self._copies, self._verdicts = depth, copies, verdicts
        self._picked = picked or PickedLayers()
        self._streams = streams
        self._counters = counters
        self._waiting: deque[tuple[StepPlan, _Slot]] = deque()
        self._slots: dict[StepShape, list[_Slot]] = {}
        self._latest: dict[StepShape, _Slot] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def open(self, shape: StepShape) -> None:
        """Make the slots of a shape: none is made while rounds run."""
        new = [self._new_slot(shape) for _ in range(self._depth + 1)]
        self._slots[shape], self._latest[shape] = new, new[0]

    def make_way(self, shape: StepShape) -> None:
        """In the stream of rounds, before a round of `shape`: its outbox may be overwritten."""
        self._latest[shape].arrived.follow()

    def post(self, plan: StepPlan, outbox: Tensor) -> None:
        """In the stream of rounds, after the round: its letter goes home.

        outbox: int32 [copies * B, words].
        """
        if len(self._waiting) > self._depth:
            raise RuntimeError(
                f"{len(self._waiting)} letters wait unread; at most {self._depth} may"
            )
        slot = self._latest[plan.shape] = self._free_slot(plan.shape)
        slot.written.set()
        with self._streams.copies():
            slot.written.follow()
            self._streams.copy(slot.words, outbox)
            slot.arrived.set()
        self._counters.downloads += 1
        self._waiting.append((plan, slot))

    def collect(self) -> StepResult:
        """The oldest letter, as ints, once it is here. Raises IndexError if none is under way."""
        plan, slot = self._waiting[0]
        slot.arrived.wait()
        words, batch = slot.words.tolist(), plan.shape.batch
        self._waiting.popleft()
        first, *others = (
            StepResult(plan.round_id, self._rows(one, words[at * batch : (at + 1) * batch]))
            for at, one in enumerate(plan.each)
        )
        return replace(first, others=tuple(others))

    def _rows(self, plan: StepPlan, words: list[list[int]]) -> tuple[RowResult, ...]:
        """What came of the plan's rows, of which `words` are a batch."""
        if self._verdicts is None:
            return self._results(plan, words)
        size, read = self._verdicts.words, self._verdicts.read
        rows = self._results(plan, [own[:-size] for own in words])
        return tuple(
            replace(row, violation=read(own[-size:])) for row, own in zip(rows, words, strict=False)
        )

    def _results(self, plan: StepPlan, words: list[list[int]]) -> tuple[RowResult, ...]:
        shape = plan.shape
        rows = tuple(_row_result(row, one) for row, one in zip(plan.rows, words, strict=False))
        if not (shape.reports or shape.shows):
            return rows
        layout, pairs = OutboxLayout.of(shape, self._picked.words), zip(rows, words, strict=False)
        if shape.shows:
            return tuple(self._with_picks(row, one[layout.picks :]) for row, one in pairs)
        return tuple(with_scores(row, one, layout) for row, one in pairs)

    def _with_picks(self, row: RowResult, words: list[int]) -> RowResult:
        """`row` with the keys that `words` name, layer by layer."""
        topk = self._picked.topk
        starts = range(0, len(words), max(topk, 1))
        found = (tuple(one for one in words[at : at + topk] if one >= 0) for at in starts)
        return replace(row, picks=tuple(found))

    def _free_slot(self, shape: StepShape) -> _Slot:
        """A slot of `shape` whose letter was read; fewer wait than there are slots."""
        busy = [slot for _, slot in self._waiting]
        return next(slot for slot in self._slots[shape] if all(slot is not b for b in busy))

    def _new_slot(self, shape: StepShape) -> _Slot:
        batch, width = outbox_shape(shape, self._picked.words, self._verdicts)
        words = self._streams.pages(self._copies * batch, width)
        return _Slot(words, self._streams.mark(), self._streams.mark())


def digest_of(tensors: Iterable[Tensor], streams: Streams) -> bytes:
    """16 bytes that stand for what the tensors hold behind the rounds queued so far.

    The host waits for these: for finding faults only.
    """
    found = hashlib.blake2b(digest_size=16)
    with streams.rounds():
        for tensor in tensors:
            found.update(tensor.cpu().numpy().tobytes())
    return found.digest()


def _row_result(row: int, words: list[int]) -> RowResult:
    count, finish, computed, drafted, agreed = words[:RESULT_WORDS]
    tokens = tuple(words[RESULT_WORDS : RESULT_WORDS + count])
    return RowResult(row, tokens, _FINISH[finish], computed, drafted, agreed)


def with_scores(row: RowResult, words: list[int], layout: OutboxLayout) -> RowResult:
    """`row` with the scores of its tokens, and of the positions that its round echoes."""
    reported = _scores(words[layout.scores : layout.echo][: len(row.tokens) * SCORE_WORDS])
    return replace(row, scores=reported, echo=_scores(words[layout.echo : layout.picks]))


def _scores(words: list[int]) -> tuple[TokenScore, ...]:
    """Scores out of [N * SCORE_WORDS] words."""
    floats = struct.unpack(f"{len(words)}f", struct.pack(f"{len(words)}i", *words))
    return tuple(
        TokenScore(
            floats[at],
            tuple(
                (words[at + n], floats[at + n + MAX_LOGPROBS]) for n in range(1, MAX_LOGPROBS + 1)
            ),
        )
        for at in range(0, len(words), SCORE_WORDS)
    )


def outbox_shape(
    shape: StepShape, picked: int = 0, verdicts: VerdictLayout | None = None
) -> tuple[int, int]:
    """Shape of the int32 outbox of rounds of `shape`. `picked`: words of one query's picks."""
    layout = OutboxLayout.of(shape, picked)
    return layout.batch, layout.row_words + (0 if verdicts is None else verdicts.words)
