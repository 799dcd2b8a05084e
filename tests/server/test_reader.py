# SPDX-License-Identifier: Apache-2.0
"""The engine by tokens, and the text made of them elsewhere: together they are `LLM.stream`."""

from __future__ import annotations

import random

import pytest

from freewheel import LLM, Piece, SamplingParams
from freewheel.chat import NO_THINK, THINK
from freewheel.engine import Reader, TokenEngine
from freewheel.errors import RequestError
from freewheel.spec import FinishReason

CASES = [
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0.9, seed=3, max_tokens=20),
    SamplingParams(temperature=0, max_tokens=40, stop=("the",)),
    SamplingParams(temperature=0, max_tokens=40, stop=("the",), include_stop_str_in_output=True),
    SamplingParams(temperature=0, max_tokens=40, stop=("the",), min_tokens=20),
    SamplingParams(temperature=1.5, seed=9, max_tokens=40, skip_special_tokens=False),
    SamplingParams(temperature=0, max_tokens=40, stop=("no such text",)),
]


def run(engine: TokenEngine, reader: Reader, prompt: list[int], params: SamplingParams) -> list:
    """All readings of one request."""
    engine.submit("one", prompt, params)
    readings = []
    while engine.busy:
        for step in engine.step():
            readings.append(reader.push(step.tokens, step.accepted, step.finish))
            if readings[-1].cut:
                engine.abort("one")
                break
    return readings


@pytest.mark.parametrize("params", CASES)
def test_tokens_read_elsewhere_are_the_engines_text(llm: LLM, params: SamplingParams) -> None:
    prompt = llm.tokenizer.encode_prompt("Emma was")
    expected = list(llm.stream(prompt, params))
    readings = run(TokenEngine(llm), Reader(llm.tokenizer, params), prompt, params)
    pieces = [piece for reading in readings for piece in reading.said]
    assert pieces == [piece for chunk in expected for piece in chunk.pieces]
    ids = [token for reading in readings for token in reading.token_ids]
    assert ids == [token for chunk in expected for token in chunk.token_ids]
    assert readings[-1].finish == expected[-1].finish_reason
    metrics = expected[-1].metrics
    assert metrics is not None
    assert sum(reading.accepted for reading in readings) == metrics.accepted


@pytest.mark.parametrize("seed", range(8))
def test_thoughts_end_at_their_mark_however_tokens_come(llm: LLM, seed: int) -> None:
    tokenizer, chance = llm.tokenizer, random.Random(seed)
    mark = tokenizer.token_id(NO_THINK)
    assert mark is not None
    before = tokenizer.encode_text("first, some thoughts; über")
    behind = tokenizer.encode_text("then the answer STOP and more")
    params = SamplingParams(stop=("STOP",), max_tokens=100)
    reader = Reader(tokenizer, params, mark)
    left, thought, said = [*before, mark, *behind], "", ""
    while left:
        count = chance.randint(1, 5)
        reading = reader.push(left[:count], 0)
        thought += "".join(piece.text for piece in reading.thought)
        said += "".join(piece.text for piece in reading.said)
        left = left[count:]
        if reading.cut:
            break
    assert (thought, said) == ("first, some thoughts; über", "then the answer ")
    assert reader.thought_tokens == len(before) + 1


def test_accepted_drafts_are_marked_on_both_sides_of_the_mark(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    mark = tokenizer.token_id(NO_THINK)
    assert mark is not None
    (a,), (b,) = tokenizer.encode_text("a"), tokenizer.encode_text("b")
    reader = Reader(tokenizer, SamplingParams(), mark)
    reading = reader.push([a, mark, b, a], accepted=3)
    assert reading.thought == (Piece("a", True, 0),)
    assert reading.said == (Piece("b", True, 2), Piece("a", False, 3))


def test_an_abort_frees_row_and_pages_within_the_rounds_in_flight(llm: LLM) -> None:
    engine, prompt = TokenEngine(llm), llm.tokenizer.encode_prompt("Emma was")
    params = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0)
    engine.submit("stays", prompt, params)
    engine.submit("leaves", prompt, params)
    while engine.load().running < 2 or not engine.load().tokens > 2 * len(prompt) + 8:
        engine.step()
    engine.abort("leaves")
    for _ in range(llm.config.run_ahead + 1):
        engine.step()
    load = engine.load()
    assert load.running == 1
    assert (load.rows.owned, load.rows.quarantined) == (1, 0)
    assert all(pool.quarantined == 0 for pool in load.pages)
    engine.abort("stays")
    load = engine.load()
    assert all(pool.free == pool.total for pool in (load.rows, *load.pages))


def test_a_refused_request_leaves_the_others_alone(llm: LLM) -> None:
    engine, prompt = TokenEngine(llm), llm.tokenizer.encode_prompt("Emma was")
    params = SamplingParams(max_tokens=12, temperature=0)
    engine.submit("good", prompt, params)
    for bad in ([], [llm.spec.vocab_size], [0] * llm.context_len):
        with pytest.raises(RequestError):
            engine.submit("bad", bad, params)
    with pytest.raises(RequestError, match="in use"):
        engine.submit("good", prompt, params)
    ids: list[int] = []
    while engine.busy:
        for step in engine.step():
            ids += step.tokens
    assert tuple(ids) == llm.generate(prompt, params)[0].token_ids


def test_every_round_has_its_times_in_order(llm: LLM) -> None:
    engine, prompt = TokenEngine(llm), llm.tokenizer.encode_prompt("Emma was")
    engine.rounds()
    params = SamplingParams(max_tokens=24, temperature=0)
    engine.submit("one", prompt, params)
    tokens = accepted = 0
    while engine.busy:
        for step in engine.step():
            tokens, accepted = tokens + len(step.tokens), accepted + step.accepted
    rounds = engine.rounds()
    assert sum(one.tokens for one in rounds) == tokens == 24
    assert sum(one.accepted for one in rounds) >= accepted > 0
    for one in rounds:
        times = (one.begun, one.planned, one.launched, one.asked, one.arrived, one.delivered)
        assert list(times) == sorted(times)
    assert engine.rounds() == []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("opens", [True, False])
def test_thinking_that_the_answer_opens_itself_is_thought(llm: LLM, seed: int, opens: bool) -> None:
    tokenizer, chance = llm.tokenizer, random.Random(seed)
    begin, end = tokenizer.token_id(THINK), tokenizer.token_id(NO_THINK)
    assert begin is not None and end is not None
    before, behind = tokenizer.encode_text("some thoughts"), tokenizer.encode_text("the answer")
    ids = [begin, *before, end, *behind] if opens else behind
    reader = Reader(tokenizer, SamplingParams(temperature=0), end, begin)
    thought = said = ""
    counted = 0
    while ids:
        taken = chance.randint(1, 5)
        now, ids = ids[:taken], ids[taken:]
        reading = reader.push(now, 0, None if ids else FinishReason.LENGTH)
        thought += "".join(piece.text for piece in reading.thought)
        said += "".join(piece.text for piece in reading.said)
        counted += len(reading.token_ids)
    assert (thought, said) == ("some thoughts" if opens else "", "the answer")
    assert counted == len(before) * opens + len(behind) + 2 * opens
    assert reader.thought_tokens == (len(before) + 2 if opens else 0)


def test_markup_is_shown_where_other_control_tokens_are_not(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    ids = tokenizer.encode_prompt("<｜DSML｜x<｜User｜>é")[1:]
    dsml = tokenizer.token_id("｜DSML｜")
    assert dsml is not None
    reader = Reader(tokenizer, SamplingParams(temperature=0), shown=frozenset({dsml}))
    pieces = [p.text for one in ids for p in reader.push([one], 0).said]
    pieces += [p.text for p in reader.push([], 0, FinishReason.LENGTH).said]
    assert "".join(pieces) == "<｜DSML｜xé"
