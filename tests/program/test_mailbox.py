# SPDX-License-Identifier: Apache-2.0
"""The mailbox survives a host that is interrupted while it waits for a letter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from freewheel.runtime.counters import Counters
from freewheel.runtime.mailbox import Mailbox, outbox_shape
from freewheel.runtime.streams import NoStreams
from freewheel.spec import StepPlan, StepShape
from tests.program.whitebox import GREEDY, answers, engine

SHAPE = StepShape(1, 4, 3)


class ImpatientMark:
    """Waiting for it is interrupted every other time."""

    def __init__(self) -> None:
        self.waits = 0

    def set(self) -> None: ...

    def follow(self) -> None: ...

    def wait(self) -> None:
        self.waits += 1
        if self.waits % 2:
            raise KeyboardInterrupt


class ImpatientStreams(NoStreams):
    def mark(self) -> ImpatientMark:
        return ImpatientMark()


def plan(round_id: int) -> StepPlan:
    return StepPlan(round_id, SHAPE, (1,), (None,), (None,), ())


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_interrupted_wait_loses_neither_the_letter_nor_its_slot(depth: int) -> None:
    mailbox = Mailbox(depth, ImpatientStreams(), Counters())
    mailbox.open(SHAPE)
    read: list[int] = []
    for index in range(12):
        outbox = torch.zeros(outbox_shape(SHAPE), dtype=torch.int32)
        outbox[0, 2] = 100 + index
        mailbox.post(plan(index), outbox)
        if len(mailbox) > depth:
            with pytest.raises(KeyboardInterrupt):
                mailbox.collect()
            result = mailbox.collect()
            assert result.rows[0].computed == 100 + result.round_id
            read.append(result.round_id)
    assert read == list(range(12 - depth))


def test_an_engine_answers_as_before_after_many_interrupts(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"], run_ahead=2)
    wanted = answers(llm, [[1, 2, 3]])
    collect, calls = llm._session._executor._mailbox.collect, 0

    def impatient() -> object:
        nonlocal calls
        calls += 1
        if calls % 5 == 3:
            raise KeyboardInterrupt
        return collect()

    llm._session._executor._mailbox.collect = impatient  # type: ignore[method-assign]
    for _ in range(8):
        try:
            found = answers(llm, [[1, 2, 3]], GREEDY)
        except KeyboardInterrupt:
            calls = 0
            continue
        assert found == wanted
    llm._session._executor._mailbox.collect = collect  # type: ignore[method-assign]
    assert answers(llm, [[1, 2, 3]]) == wanted
