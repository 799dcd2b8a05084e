# SPDX-License-Identifier: Apache-2.0
"""The only way from the host to the device: one letter, one copy, a round."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from freewheel.errors import CapacityError
from freewheel.ops.constraining import GUIDED
from freewheel.runtime.counters import Counters
from freewheel.runtime.streams import Streams
from freewheel.spec.adjustments import MAX_BAD_WORDS, MAX_BIASES, Adjustments
from freewheel.spec.mesh import Share
from freewheel.spec.plan import Admission, StepPlan
from freewheel.spec.sampling import MAX_STOP_IDS
from freewheel.state import InboxLayout
from freewheel.state.letters import ADJUST_WORDS, ADMISSION_WORDS, NOWHERE, PAGE_WRITE_WORDS

ONLY = Share()


class Uplink:
    """Packs plans into staging buffers that no round in flight still reads, and posts them.

    `depth` letters may be under way at once, so `depth + 1` buffers take turns.
    """

    def __init__(
        self,
        layout: InboxLayout,
        inbox: Tensor,
        depth: int,
        streams: Streams,
        counters: Counters,
        tell: Callable[[Tensor], None] = lambda letter: None,
        replica: Share = ONLY,
    ) -> None:
        """inbox: int32 [layout.words], static, on the device.

        `tell` shows each letter, int32 [copies, layout.words] on the host, to the other ranks.
        `replica`: to which of the model's copies the inbox belongs.
        """
        self._tell = tell
        self._layout = layout
        self._inbox = inbox
        self._staging = [streams.pages(replica.count, layout.words) for _ in range(depth + 1)]
        self._own = [staging[replica.index] for staging in self._staging]  # the same memory
        self._letters = [np.asarray(staging) for staging in self._staging]  # the same memory
        self._taken = [streams.mark() for _ in self._staging]
        self._turn = 0
        self._streams = streams
        self._counters = counters

    def post(self, plan: StepPlan) -> None:
        """In the stream of rounds: copy the plan's letter to the device."""
        self._next()
        letters = self._letters[self._turn]
        letters[len(plan.each) :] = 0  # copies that idle
        for own, letter in zip(plan.each, letters, strict=False):
            pack(own, self._layout, letter)
        self._tell(self._staging[self._turn])
        self._send()

    def relay(self, fill: Callable[[Tensor], None]) -> None:
        """As `post`, of a letter that another rank packed and `fill` brings."""
        self._next()
        fill(self._staging[self._turn])
        self._send()

    def _next(self) -> None:
        self._turn = (self._turn + 1) % len(self._letters)
        self._taken[self._turn].wait()  # long passed: its round's letter came home

    def _send(self) -> None:
        self._streams.copy(self._inbox, self._own[self._turn])
        self._taken[self._turn].set()
        self._counters.uploads += 1


def pack(plan: StepPlan, layout: InboxLayout, letter: NDArray[np.int32]) -> None:
    """Write `plan` into `letter`, int32 [layout.words], as InboxLayout says.

    Raises CapacityError if the plan writes more pages than a letter of its shape holds.
    """
    letter[: layout.feed_tokens] = 0  # behind a feed's own tokens nothing is read
    letter[layout.writes :] = 0
    letter[: len(plan.rows)] = plan.rows
    admissions = letter[layout.admissions : layout.feed_spans].reshape(layout.batch, -1)
    spans = letter[layout.feed_spans : layout.feed_tokens].reshape(layout.batch, 2)
    tokens = letter[layout.feed_tokens : layout.writes].reshape(layout.batch, layout.feed_width)
    for index, admission in enumerate(plan.admissions):
        if admission is not None:
            admissions[index] = admission_words(admission)
    pack_adjustments(plan, layout, letter)
    for index, feed in enumerate(plan.feeds):
        if feed is not None:
            spans[index] = feed.start, len(feed.tokens)
            tokens[index, : len(feed.tokens)] = feed.tokens
    if len(plan.page_writes) > layout.page_writes:
        raise CapacityError(
            "page_writes",
            f"{len(plan.page_writes)} in one round; {layout.page_writes} fit its letter",
        )
    pack_masks(plan, layout, letter)
    if plan.table is not None:
        cells = letter[layout.table + 2 : layout.masks].view(np.int16)
        given = np.frombuffer(plan.table.cells, dtype=np.int16)
        letter[layout.table : layout.table + 2] = plan.table.start, len(given)
        cells[: len(given)] = given
    writes = letter[layout.writes : layout.adjustments].reshape(
        layout.page_writes, PAGE_WRITE_WORDS
    )
    for index, write in enumerate(plan.page_writes):
        writes[index] = write.row, write.group, write.column, write.page


def pack_masks(plan: StepPlan, layout: InboxLayout, letter: NDArray[np.int32]) -> None:
    """Write the plan's masks. Raises CapacityError if its shape has no room for them.

    A new tenant without one loses that of the tenant before: a position may come again.
    """
    rows = letter[layout.masks :].reshape(layout.batch, layout.mask_words)
    for index, mask in enumerate(plan.masks):
        if mask is None:
            if layout.mask_words and plan.admissions[index] is not None:
                rows[index, 0] = NOWHERE
            continue
        if not layout.mask_words:
            raise CapacityError("masks", f"sent in a round of {plan.shape}")
        rows[index, 0] = mask.length
        rows[index, 1:] = np.frombuffer(mask.bits, dtype=np.int32)


def pack_adjustments(plan: StepPlan, layout: InboxLayout, letter: NDArray[np.int32]) -> None:
    """Write the plan's adjustments. Raises CapacityError if its shape has no room for them."""
    rows = letter[layout.adjustments : layout.table].reshape(layout.batch, layout.adjust_words)
    for index, admission in enumerate(plan.admissions):
        if admission is None or admission.adjustments is None:
            continue
        if not layout.adjust_words:
            raise CapacityError("adjustments", f"admitted in a round of {plan.shape}")
        adjust_words(admission.adjustments, rows[index])


def adjust_words(adjustments: Adjustments, words: NDArray[np.int32]) -> None:
    """Fill `words`, int32 [ADJUST_WORDS + a bit for each token], zero before."""
    words[:2] = adjustments.uses, adjustments.prompt_len
    penalties = (adjustments.presence, adjustments.frequency, adjustments.repetition)
    words[2:5] = np.array(penalties, dtype=np.float32).view(np.int32)
    classes, start = _automaton(adjustments)
    length = -2 if adjustments.optional else -1
    if adjustments.budget >= 0:
        length = adjustments.prompt_len + adjustments.budget
    words[5:10] = adjustments.base, classes, start, adjustments.trigger, length
    ids, values = words[10 : 10 + MAX_BIASES], words[10 + MAX_BIASES : 10 + 2 * MAX_BIASES]
    ids.fill(-1)
    for index, (token, bias) in enumerate(adjustments.biases):
        ids[index] = token
        values[index] = np.float32(bias).view(np.int32)
    sequences = words[10 + 2 * MAX_BIASES : ADJUST_WORDS].reshape(MAX_BAD_WORDS, -1)
    sequences.fill(-1)
    for index, tokens in enumerate(adjustments.bad_words):
        sequences[index, -len(tokens) :] = tokens
    if adjustments.allowed is not None:
        allowed = np.array(adjustments.allowed, dtype=np.int64)
        bits = words[ADJUST_WORDS:].view(np.uint32)
        np.bitwise_or.at(bits, allowed // 32, np.uint32(1) << (allowed % 32).astype(np.uint32))


def _automaton(adjustments: Adjustments) -> tuple[int, int]:
    """(classes, start) of what the row follows; see `ops.constraining`."""
    if adjustments.guided:
        return 1, GUIDED
    grammar = adjustments.grammar
    return (0, 0) if grammar is None else (grammar.classes, grammar.start)


def admission_words(admission: Admission) -> NDArray[np.int32]:
    """int32 [ADMISSION_WORDS]: floats as their bits, the seed in two halves."""
    words = np.zeros(ADMISSION_WORDS, dtype=np.int32)
    words[:5] = 1, admission.known, admission.computed, admission.limit, admission.minimum
    words[6] = admission.top_k
    floats = np.array([admission.temperature, admission.top_p, admission.min_p], dtype=np.float32)
    words[[5, 7, 8]] = floats.view(np.int32)
    words[9:11] = np.array([admission.seed], dtype=np.int64).view(np.int32)
    stops = admission.stop_ids
    words[11] = 0 if admission.adjustments is None else admission.adjustments.uses
    words[12:] = [*stops, *[-1] * (MAX_STOP_IDS - len(stops))]
    return words
