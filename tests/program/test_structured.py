# SPDX-License-Identifier: Apache-2.0
"""Answers of a stated form: whatever the drafts, the company, and what was thought before."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, FinishReason, Output, SamplingParams
from freewheel.audit import audit
from freewheel.config import find_model
from freewheel.engine import Tokenizer
from freewheel.errors import RequestError
from freewheel.host import TextStream
from freewheel.spec import Grammar, StepPlan
from tests.program.schemas import schemas
from tests.program.whitebox import ScriptedDrafts, engine, prompts, watch_requests
from tests.waiting import PATIENCE

jsonschema = pytest.importorskip("jsonschema")
worker = pytest.importorskip("freewheel.structured.worker")

BYTES = [bytes([byte]) for byte in range(256)]
THINK, END_THINK, EOS = 261, 262, 257
DEMO_END_THINK = 6
DEMO: dict[str, Any] = {"context_len": 512, "dtype": "float64", "max_batch": 8}
DEMO |= {"grammar_seconds": PATIENCE}
SMALL = {"type": "object", "properties": {"a": {"enum": [1, 22, True]}}, "required": ["a"]}


def walk(grammar: Grammar, tokens: list[int], vocabulary: int = 256) -> int:
    """The state after `tokens`; -1 once one was not allowed."""
    table = memoryview(grammar.table).cast("h")
    state = grammar.start
    for token in tokens:
        if state >= 0:
            state = table[vocabulary + state * (grammar.classes + 1) + table[token]]
    return state


def may_end(grammar: Grammar, state: int, vocabulary: int = 256) -> bool:
    table = memoryview(grammar.table).cast("h")
    return state >= 0 and table[vocabulary + state * (grammar.classes + 1) + grammar.classes] == 1


@pytest.mark.parametrize(
    "regex",
    [
        "ab|abc", "a*b+c?", "(yes|no)( |-)?[0-9]{2,4}", "[^a]", "é+|日本", r"\$\.\*", "x(y(z)?)?",
        r"(-)?(0|[1-9][0-9]*)(\.[0-9]+)?", "^anchored$", "(ab){2,3}", ".*",
    ],
)  # fmt: skip
def test_a_grammar_is_its_regular_expression(regex: str) -> None:
    """Compared with `re` on texts that are made to nearly match."""
    grammar = worker.compiled("regex", regex, BYTES)
    rng = random.Random(regex)
    letters = sorted({*regex.replace("\\", ""), *"abcxyz019.- "})
    for _ in range(1500):
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(6)))
        state = walk(grammar, list(text.encode()))
        assert may_end(grammar, state) == (re.fullmatch(regex, text) is not None), text


def test_tokens_of_several_bytes_lead_where_their_bytes_lead() -> None:
    vocabulary = [*BYTES, b"abc", b"bc", b"a ", None, b"1.5", b"\xe6\x97"]
    grammar = worker.compiled("regex", "(abc|a 1\\.5|日)*", vocabulary)
    bytewise = worker.compiled("regex", "(abc|a 1\\.5|日)*", BYTES)
    rng = random.Random(1)
    for _ in range(2000):
        tokens = [rng.choice([*b"abc 1.5", *range(256, 262)]) for _ in range(rng.randrange(5))]
        said = [vocabulary[token] for token in tokens]
        state = walk(grammar, tokens, 262)
        if None in said:
            assert state == -1
            continue
        whole = walk(bytewise, list(b"".join(one for one in said if one is not None)))
        assert (state >= 0) == (whole >= 0)
        assert may_end(grammar, state, 262) == may_end(bytewise, whole)


def test_no_state_is_a_dead_end() -> None:
    """Without a token for `c`, nothing may begin that needs one."""
    vocabulary = [None if byte == ord("c") else bytes([byte]) for byte in range(256)]
    grammar = worker.compiled("regex", "abc|ab|xyc", vocabulary)
    assert may_end(grammar, walk(grammar, list(b"ab")))
    assert walk(grammar, list(b"x")) == -1
    with pytest.raises(worker.Refusal, match="no text"):
        worker.compiled("regex", "c", vocabulary)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "number", "multipleOf": 3}, "'multipleOf'"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "'uniqueItems'"),
        ({"allOf": [{"type": "null"}, {"pattern": "^a$"}, {"pattern": "b"}]}, "'allOf'"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "'oneOf'"),
        ({"type": "number", "not": {"const": 1}}, "'not'"),
        ({"type": "object"}, "properties"),
        ({"type": "object", "properties": {'a"b': {"type": "null"}}}, "escape"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]}, "'b'"),
        ({"type": "string", "pattern": "^.*$"}, "escape"),
        ({"type": "string", "pattern": "abc"}, r"\^"),
        ({"type": "string", "format": "hostname"}, "'hostname'"),
        ({"type": "strange"}, "'strange'"),
        ({"$ref": "#/$defs/x"}, "not there"),
        ({"$defs": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}},
          "$ref": "#/$defs/n"}, "recursive"),
        ({"enum": [{"a": 1}]}, "simple"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_schema_that_a_grammar_would_not_keep_is_refused(schema: Any, word: str) -> None:
    with pytest.raises(worker.Refusal, match=word):
        worker.compiled("json_schema", json.dumps(schema), BYTES)


@pytest.fixture(scope="module")
def t32(folders: dict[str, Path]) -> LLM:
    return engine(folders["t32"], speculate=3)


@pytest.mark.parametrize(
    ("field", "wish"),
    [
        ("regex", {"regex": "(a"}),
        ("regex", {"regex": ""}),
        ("regex", {"regex": "(?=a)b"}),
        ("json_schema", {"json_schema": "{"}),
        ("json_schema", {"json_schema": [1]}),
        ("json_schema", {"json_schema": {"not": {"type": "integer"}}}),
        ("choice", {"choice": ()}),
        ("choice", {"choice": "yes"}),
        ("regex", {"regex": "a", "json_schema": SMALL}),
        ("ignore_eos", {"regex": "a", "ignore_eos": True}),
        ("min_tokens", {"regex": "a", "min_tokens": 3}),
        ("thinking_token_budget", {"thinking_token_budget": -1}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_wish_is_refused_by_name_and_harms_nobody(
    t32: LLM, field: str, wish: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as caught:
        t32.generate([[1]], SamplingParams(**wish))
    assert caught.value.field == field
    output = t32.generate([[1]], SamplingParams(choice=("yes", "no"), seed=1))[0]
    assert output.text in ("yes", "no")


def mixed(count: int, seed: int, vocabulary: int) -> list[tuple[list[int], SamplingParams]]:
    """Structured requests, each followed by an unconstrained neighbour."""
    found: list[tuple[list[int], SamplingParams]] = []
    for index, schema in enumerate(schemas(count, seed)):
        prompt = prompts(index, 1, 12, vocabulary)[0]
        warm: dict[str, Any] = {"temperature": (0.0, 0.7, 1.0)[index % 3], "seed": index}
        warm["frequency_penalty"] = 2.0  # or a greedy model never ends a number
        found.append((prompt, SamplingParams(**warm, json_schema=schema, max_tokens=150)))
        if index % 3 == 0:
            found.append((prompt, SamplingParams(**warm, max_tokens=30, ignore_eos=True)))
    return found


def answer_of(llm: LLM, output: Output) -> Any:
    """The JSON of an answer that ended. A random prompt may leave thinking open: it is behind."""
    ids = output.token_ids
    begin = ids.index(DEMO_END_THINK) + 1 if DEMO_END_THINK in ids else 0
    return json.loads(llm.tokenizer.decode(list(ids[begin:-1])))


def check_schemas(count: int, seed: int) -> tuple[int, int]:
    """(answers that ended, schemas on the device): all that ended validate, the same at depths 0
    and 3."""
    ended = on_device = 0
    by_depth: list[list[tuple[int, ...]]] = []
    for depth in (0, 3):
        llm = LLM("demo", **DEMO, speculate=depth)
        requests = mixed(count, seed, llm.spec.vocab_size)
        outputs = llm.generate([p for p, _ in requests], [s for _, s in requests])
        by_depth.append([output.token_ids for output in outputs])
        for (_, params), output in zip(requests, outputs, strict=True):
            if params.structure is None:
                assert output.metrics.completion_tokens == 30
            elif output.finish_reason is FinishReason.STOP:
                ended += depth == 3
                jsonschema.validate(answer_of(llm, output), json.loads(params.structure[1]))
            else:
                assert output.finish_reason is FinishReason.LENGTH
            on_device += depth == 3 and output.metrics.form == "device"
    assert by_depth[0] == by_depth[1]
    plain = LLM("demo", **DEMO, speculate=0)
    free = [n for n, (_, params) in enumerate(requests) if params.structure is None]
    alone = plain.generate([requests[n][0] for n in free], [requests[n][1] for n in free])
    assert [output.token_ids for output in alone] == [by_depth[1][n] for n in free]
    return ended, on_device


def test_answers_validate_against_their_schemas_and_neighbours_do_not_change() -> None:
    ended, on_device = check_schemas(5, seed=1)
    assert ended >= 4 and on_device == 5


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(10))
def test_answers_to_500_schemas_validate_and_neighbours_do_not_change(part: int) -> None:
    ended, on_device = check_schemas(50, seed=20 + part)
    print(f"{on_device} of 50 schemas ran on the device; {ended} answers ended by themselves")
    assert ended >= 45 and on_device == 50


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_share_of_500_schemas_that_runs_on_the_device() -> None:
    """Each of them is compiled alone, with the demo's tokens."""
    tokenizer = Tokenizer(find_model("demo"))
    vocabulary = tokenizer.token_bytes(tokenizer.size)
    found = [json.dumps(one) for part in range(10) for one in schemas(50, 20 + part)]
    forms = [worker.form_of("json_schema", source, vocabulary) for source in found]
    share = sum(isinstance(form, Grammar) for form in forms) / len(forms)
    print(f"{share:.1%} of {len(forms)} schemas run on the device")
    assert share == 1.0


@pytest.mark.parametrize("right", [0, 1, 3])
def test_a_row_s_state_is_that_of_its_computed_tokens(folders: dict[str, Path], right: int) -> None:
    """Whatever was drafted: wrong drafts break the grammar, right ones follow it."""
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=60, regex="([a-f]{3}[0-9] )*end")
    prompt = prompts(seed=3, count=1, longest=20)[0]
    want = engine(folders["t32"], speculate=0).generate([prompt], params)[0]
    assert re.fullmatch(r"([a-f]{3}[0-9] )*end", want.text) or len(want.token_ids) == 60
    llm = engine(folders["t32"], speculate=3, run_ahead=0, max_batch=1, prefill_batch=1)
    drafts = ScriptedDrafts(llm)
    drafts.script, drafts.right = [*prompt, *want.token_ids, *[0] * 8], right
    launch, seen = llm.executor.launch, 0
    requests = watch_requests(llm)

    def watch(plan: StepPlan) -> None:
        nonlocal seen
        launch(plan)
        state = llm.executor.state
        for row in plan.rows:
            output = state.tokens[row, len(prompt) : int(state.computed_lens[row])].tolist()
            assert requests[0].grammar is not None
            expected = walk(requests[0].grammar, output, llm.spec.vocab_size)
            assert int(state.adjust.grammar_states[row]) == expected
            seen += 1

    llm.executor.launch = watch  # type: ignore[method-assign]
    assert llm.generate([prompt], params)[0].token_ids == want.token_ids
    assert seen > 5


@pytest.mark.parametrize("speculate", [1, 3])
def test_the_form_begins_behind_the_end_of_thinking(
    folders: dict[str, Path], speculate: int
) -> None:
    prompt = [5, 6, THINK, 10]
    params = [
        SamplingParams(
            temperature=1.0, seed=budget, max_tokens=100, json_schema=SMALL,
            thinking_token_budget=budget, logit_bias={END_THINK: 3.0},
        )
        for budget in (0, 1, 4, 40)
    ]  # fmt: skip
    requests, neighbour = [prompt, prompt, prompt, prompt, [1, 2]], SamplingParams(seed=1)
    outputs = engine(folders["t32"], speculate=speculate).generate(requests, [*params, neighbour])
    plain = engine(folders["t32"], speculate=0, max_batch=1, prefill_batch=1)
    want = plain.generate(requests, [*params, neighbour])
    assert [output.token_ids for output in outputs] == [output.token_ids for output in want]
    for wish, output in zip(params, outputs, strict=False):
        thought = output.token_ids.index(END_THINK)
        assert wish.thinking_token_budget is not None and thought <= wish.thinking_token_budget
        assert EOS not in output.token_ids[:thought] and output.token_ids[-1] == EOS
        answer = bytes(output.token_ids[thought + 1 : -1])
        jsonschema.validate(json.loads(answer), SMALL)


def test_a_thinking_budget_alone_leaves_the_answer_free(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"], speculate=3)
    params = SamplingParams(temperature=1, seed=1, max_tokens=12, thinking_token_budget=3)
    free = SamplingParams(temperature=1, seed=1, max_tokens=12)
    closed = [THINK, 7, END_THINK, 8]
    forced, same, want = llm.generate([[4, THINK], closed, closed], [params, params, free])
    assert forced.token_ids[3] == END_THINK and END_THINK not in forced.token_ids[:3]
    assert same.token_ids == want.token_ids


def test_grammars_take_turns_where_there_is_room_for_one(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"], speculate=3, max_grammars=1)
    pieces: list[int] = []
    launch = llm.executor.launch

    def watch(plan: StepPlan) -> None:
        if plan.table is not None:
            pieces.append(plan.table.start)
        launch(plan)

    llm.executor.launch = watch  # type: ignore[method-assign]
    regexes = ["a{3}", "a{3}", "b{4}", "a{3}", "c{2}"]
    params = [SamplingParams(regex=regex, seed=1) for regex in regexes]
    outputs = llm.generate([[1]] * 5, params)
    assert [output.text for output in outputs] == ["aaa", "aaa", "bbbb", "aaa", "cc"]
    assert len(pieces) == 4
    llm.generate([[1]], params[-1])
    assert len(pieces) == 4  # it still lies there


def test_a_table_may_come_in_pieces(folders: dict[str, Path]) -> None:
    llm = engine(folders["t32"], speculate=3)
    llm._session._scheduler.copies[0].roster.shelf._piece = 100
    output = llm.generate([[1]], SamplingParams(regex="(abcd|xyz){5}[0-9]{4}", seed=2))[0]
    assert re.fullmatch("(abcd|xyz){5}[0-9]{4}", output.text)


@pytest.mark.parametrize("run_ahead", [0, 3])
def test_structured_requests_survive_preemption(folders: dict[str, Path], run_ahead: int) -> None:
    params = [
        SamplingParams(temperature=1, seed=n, regex="([a-z]{5} ){8}", frequency_penalty=0.5)
        for n in range(4)
    ]
    requests = prompts(seed=8, count=4, longest=8)
    plain = engine(folders["t32"], speculate=0, max_batch=1, prefill_batch=1)
    want = [plain.generate([p], s)[0].text for p, s in zip(requests, params, strict=True)]
    page_bytes = sum(group.page_bytes for group in plain.built.groups)
    llm = engine(
        folders["t32"], speculate=3, max_batch=4, context_len=64, cache_bytes=32 * page_bytes,
        run_ahead=run_ahead,
    )  # fmt: skip
    seen = watch_requests(llm)
    assert [output.text for output in llm.generate(requests, params)] == want
    assert sum(request.stats.preemptions for request in seen) > 0


def test_everything_at_once_still_reads_nothing_and_sends_one_letter_each_way() -> None:
    llm = LLM("demo", speculate=3, max_batch=3, context_len=256, chunk=64, guard=True)
    report = audit(llm, 180)
    assert report.passed, report.verdict
    assert report.kernels_per_round is not None
    lanes = llm.executor._lanes
    assert {0, 1, 2, 3} <= {shape.extras for shape in lanes}
    assert any(shape.tables for shape in lanes) and any(shape.guided for shape in lanes)


@pytest.mark.parametrize("places", [1, 2])
def test_more_grammars_than_places_wait_for_each_other_whatever_their_priorities(
    folders: dict[str, Path], places: int
) -> None:
    """Tables are brought while rows are taken; whoever comes then with a better priority, and
    another grammar, goes first all the same."""
    llm = engine(folders["t32"], speculate=3, max_batch=1, prefill_batch=1, max_grammars=places)
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    held = [SamplingParams(temperature=0, max_tokens=9, regex=f"[{c}]{{4}}") for c in "abcd"]
    session = llm._session
    waiting = [session.add(llm._request([5], plain, ""), TextStream(lambda ids: ""))]
    for rank, params in enumerate(held):
        for _ in range(4):
            session.step()
        made = llm._request([5], params, "", priority=-rank)
        waiting.append(session.add(made, TextStream(lambda ids: "")))
    while session.busy:
        session.step()
    assert [bytes(one.request.output[:4]) for one in waiting[1:]] == [
        4 * letter for letter in (b"a", b"b", b"c", b"d")
    ]


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("a(?=b)b", "look-ahead, (?= at character 2"),
        ("(?!x)a", "look-ahead, (?! at character 1"),
        ("[a-z&&[^b]]", r"an intersection of classes, && at character 5"),
        ("x[a[b]]", r"a class in a class, [ at character 4"),
        ("[a-z--b]", r"a difference of classes, -- at character 5"),
        ("ab(?<=b)", "look-behind, (?<= at character 3"),
        ("(?<!a)b", "look-behind, (?<! at character 1"),
        (r"(a)b\1", "a reference to a group, \\1 at character 5"),
        ("[]x](?>a)", "an atomic group, (?> at character 5"),
    ],
)
def test_what_an_expression_of_another_dialect_has_is_named_with_its_place(
    regex: str, words: str
) -> None:
    with pytest.raises(worker.Refusal, match=re.escape(words)):
        worker.form_of("regex", regex, BYTES)


@pytest.mark.parametrize("regex", [r"\(\?=a", "[(?=]b", r"[^](?!]c", "(?:a)(?i:b)", r"\\[0-9]"])
def test_what_only_looks_like_look_around_is_compiled(regex: str) -> None:
    assert worker.form_of("regex", regex, BYTES)
