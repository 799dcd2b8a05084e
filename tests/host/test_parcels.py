# SPDX-License-Identifier: Apache-2.0
"""Blocks that change engines: only those of the request's own tokens, and no slot is lost."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from freewheel.host import Arriving, Parcels, Request
from freewheel.host.tier import Kept
from freewheel.spec import Piece
from tests.host.device import solo
from tests.host.engine import Engine, Setup, history, window
from tests.host.test_prefix import TOKENS, run

LEFT, RIGHT = TOKENS[:30], TOKENS[30:60]
KINDS = {
    "history": {"groups": (history(),), "pages": (40,)},
    "and a window": {"groups": (history(), window(4, 6)), "pages": (40, 40)},
}


def made(kind: str = "history", slots: int = 50) -> Engine:
    usual: dict[str, Any] = {"rows": 3, "context_len": 44, "row_width": 44}
    return Engine(Setup(**(usual | KINDS[kind]), host_slots=slots))


def parcels(engine: Engine) -> Parcels:
    reserved = engine.scheduler.roster.reservations
    assert reserved.prefix is not None and reserved.moves is not None
    return Parcels(reserved.prefix, reserved.moves)


def packed(engine: Engine, request: Request) -> tuple[list[Kept], list[Piece]]:
    """All of an ended request's prompt, held."""
    for _ in range(20):
        held = parcels(engine).pack(request, late=False)
        if held is not None:
            return held, parcels(engine).pieces(request, held, [0] * len(held))
        engine.drain()
        for transfer in engine.scheduler.transfers():
            engine.scheduler.transferred(engine.device.move(transfer))
    raise AssertionError("the prompt never came to host memory")


def carry(source: Engine, to: Engine, blocks: list[Arriving]) -> None:
    """What a wire does, and the change of labels behind it."""
    for block in blocks:
        slot = source.device.slots[block.piece.slot]
        assert slot.label == block.piece.label
        to.device.slots[block.kept.slot] = replace(slot, label=block.label)


def check(*engines: Engine) -> None:
    for engine in engines:
        engine.scheduler.roster.reservations.check()


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_prompt_from_another_engine_is_found_as_from_an_earlier_request(kind: str) -> None:
    """`run` compares the answer with that of the request alone."""
    first, second = made(kind), made(kind)
    held, pieces = packed(first, run(first, "computed", LEFT))
    assert len(pieces) == 7 and pieces[-1].latest
    request = second.setup.request("answered", LEFT)
    assert parcels(second).wanted(request) == (0, 7)
    blocks = parcels(second).expect(request, 0, pieces)
    carry(first, second, blocks)
    parcels(second).arrived(blocks, whole=True)
    parcels(first).release(held)
    assert parcels(second).wanted(request) == (7, 7)
    stats = run(second, "answered", LEFT).stats
    assert (stats.cached_tokens, stats.host_tokens) == (28, 28)
    assert all(not kept.busy for kept in held)
    check(first, second)


def test_only_blocks_of_the_requests_own_tokens_are_taken() -> None:
    first, second = made(), made()
    _, pieces = packed(first, run(first, "computed", (*LEFT[:13], *RIGHT[:17])))
    request = second.setup.request("answered", LEFT)
    blocks = parcels(second).expect(request, 0, pieces)
    assert [block.piece for block in blocks] == pieces[:3]
    assert parcels(second).expect(second.setup.request("other", RIGHT), 0, pieces) == []
    parcels(second).arrived(blocks, whole=False)
    check(second)


def test_of_one_salt_only_those_of_the_same_are_taken() -> None:
    """As in one engine: who salts otherwise does not learn by the time what others have asked."""
    first, second = made(), made()
    computed = run(first, "computed", LEFT)
    _, pieces = packed(first, computed)
    request = second.setup.request("answered", LEFT)
    request.cache_salt = "another"
    assert parcels(second).expect(request, 0, pieces) == []
    assert not set(parcels(first).digests(computed)) & set(parcels(second).digests(request))
    check(second)


def test_where_a_window_is_missing_nothing_behind_the_last_whole_one_is_taken() -> None:
    first, second = made("and a window"), made("and a window")
    _, pieces = packed(first, run(first, "computed", LEFT))
    latest = [at in (2, 3) for at in range(len(pieces))]
    told = [replace(piece, latest=own) for piece, own in zip(pieces, latest, strict=True)]
    request = second.setup.request("answered", LEFT)
    blocks = parcels(second).expect(request, 0, told)
    assert len(blocks) == 4
    parcels(second).arrived(blocks, whole=False)
    assert parcels(second).expect(request, 0, [replace(p, latest=False) for p in pieces]) == []
    check(second)


def test_blocks_on_their_way_are_not_sent_for_twice() -> None:
    first, second = made(), made()
    _, pieces = packed(first, run(first, "computed", LEFT))
    one, other = (second.setup.request(name, LEFT) for name in ("one", "other"))
    blocks = parcels(second).expect(one, 0, pieces)
    assert len(blocks) == 7 and parcels(second).expect(other, 0, pieces) == []
    parcels(second).arrived(blocks, whole=False)
    assert run(second, "other", LEFT).stats.cached_tokens == 0
    check(second)


def test_a_request_waits_for_blocks_that_come_for_another() -> None:
    """Nothing is in flight meanwhile, and nothing is wrong."""
    first, second = made(), made()
    _, pieces = packed(first, run(first, "computed", LEFT))
    blocks = parcels(second).expect(second.setup.request("one", LEFT), 0, pieces)
    other = second.add(second.setup.request("other", LEFT, 3))
    assert second.scheduler.plan() is None and not second.scheduler.moving
    carry(first, second, blocks)
    parcels(second).arrived(blocks, whole=True)
    second.drain()
    assert other.output == solo(other)[0] and other.stats.host_tokens == 28
    check(second)


def test_held_blocks_outlive_what_drives_others_out() -> None:
    """While they are read, their slots are given to nobody, though all is forgotten."""
    first = made(slots=8)
    held, _ = packed(first, run(first, "computed", LEFT))
    labels = {kept.slot: first.device.slots[kept.slot].label for kept in held}
    run(first, "other", RIGHT)
    reserved = first.scheduler.roster.reservations
    assert reserved.prefix is not None
    reserved.prefix.clear()
    run(first, "another", TOKENS[20:50])
    assert all(first.device.slots[slot].label == label for slot, label in labels.items())
    parcels(first).release(held)
    check(first)


@pytest.mark.parametrize("seed", range(12))
def test_no_slot_is_lost_whatever_comes_between(seed: int) -> None:
    """Arrivals that fail or are forgotten meanwhile, in too few slots, beside running requests."""
    draw = random.Random(seed)
    kind = draw.choice(list(KINDS))
    first, second = (
        made(kind, slots=draw.choice((7, 50))),
        made(kind, slots=draw.choice((3, 8, 50))),
    )
    open_blocks: list[list[Arriving]] = []
    for turn in range(12):
        start = draw.randrange(0, 20)
        prompt = tuple(TOKENS[start : start + draw.randrange(5, 32)])
        held, pieces = packed(first, run(first, f"{turn}", prompt))
        request = second.setup.request(f"{turn}", prompt)
        begin, most = parcels(second).wanted(request)
        if begin < most:
            blocks = parcels(second).expect(request, begin, pieces[begin:])
            carry(first, second, blocks)
            open_blocks.append(blocks)
        parcels(first).release(held)
        if draw.random() < 0.2:
            reserved = second.scheduler.roster.reservations
            assert reserved.prefix is not None
            reserved.prefix.clear()
        while open_blocks and draw.random() < 0.7:
            own = open_blocks.pop(draw.randrange(len(open_blocks)))
            parcels(second).arrived(own, whole=draw.random() < 0.7)
        check(first, second)
        if not open_blocks:
            run(second, f"{turn}", prompt)
    for own in open_blocks:
        parcels(second).arrived(own, whole=False)
    run(second, "last", LEFT)
    check(first, second)
