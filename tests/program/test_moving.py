# SPDX-License-Identifier: Apache-2.0
"""Names of vLLM and SGLang: the page has what the commands and errors answer, and all of it is
true of the options that there are."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from freewheel import LLM, SamplingParams, config
from freewheel.cli.app import app
from freewheel.config import EngineConfig
from freewheel.errors import ConfigError, RequestError
from freewheel.server.routes.chat import ChatRequest
from freewheel.server.routes.completions import CompletionRequest
from freewheel.spec.elsewhere import Row, deployment, hint, hints, option_hint, requests, service
from tests.program.moving_tables import expected, written
from tests.program.test_cli_panels import COMMANDS, options_of

ROOT = Path(__file__).parents[2]
SERVE = set(options_of(COMMANDS["serve",])) | {"model"}
ENGINE = {one.name for one in fields(EngineConfig)}
WISHES = {one.name for one in fields(SamplingParams)}
ARGUMENTS = {
    name for one in (LLM.generate, LLM.stream, LLM.chat) for name in signature(one).parameters
}
BODIES = {
    field.alias or name
    for body in (ChatRequest, CompletionRequest)
    for name, field in body.model_fields.items()
}
OPTIONS = [row for _, rows in hints.SECTIONS for row in rows]
EVERY = [
    *OPTIONS,
    *(row for section in (deployment.BENCH, requests.PARAMS) for row in section[1]),
    *(row for section in (requests.ARGUMENTS, requests.FIELDS) for row in section[1]),
    *requests.PROMPTS[1],
    *(row for section in (service.ADDRESSES, service.METRICS) for row in section[1]),
    *(row for section in (service.ENVIRONMENT, service.COMMANDS) for row in section[1]),
]


def ours(rows: Any) -> set[str]:
    return {name for row in rows for name in row.ours.split()}


def exact(rows: Any) -> list[tuple[str, Row]]:
    """Names of theirs without patterns, each with its row."""
    return [(name, row) for row in rows for name in row.theirs if "*" not in name]


def test_the_page_has_these_tables() -> None:
    """`python -m tests.program.moving_tables` writes them."""
    assert written() == expected()


def test_what_is_named_as_ours_is_there() -> None:
    assert ours(OPTIONS) - hints.PYTHON_ONLY <= SERVE
    assert hints.PYTHON_ONLY <= ENGINE - SERVE
    assert ours(deployment.BENCH[1]) <= {*options_of(COMMANDS["bench", "serve"])}
    assert ours(requests.PARAMS[1]) <= WISHES
    assert ours(requests.ARGUMENTS[1]) <= ARGUMENTS
    assert ours(requests.FIELDS[1]) <= BODIES
    assert {row.ours for row in service.COMMANDS[1] if row.ours} <= {*map(" ".join, COMMANDS)}
    source = Path(config.__file__).read_text("utf-8")
    assert all(f'"{name}"' in source for name in ours(service.ENVIRONMENT[1]))


def test_nothing_is_called_absent_that_is_there() -> None:
    for rows, known in (
        (OPTIONS, ENGINE | SERVE),
        (requests.PARAMS[1], WISHES),
        (requests.ARGUMENTS[1], ARGUMENTS),
        (requests.FIELDS[1], BODIES - {"suffix", "best_of"}),  # refused by name
        (deployment.BENCH[1], {*options_of(COMMANDS["bench", "serve"])}),
    ):
        assert [name for name, row in exact(rows) if name in known and not row.ours] == []


def test_a_field_that_is_also_ours_is_told_itself() -> None:
    known = BODIES - {"separate_reasoning", "stream_reasoning"}  # taken if they change nothing
    for name, row in exact(requests.FIELDS[1]):
        assert name not in known or not row.ours or name in row.ours.split()
    assert hints.field_hint("format", BODIES) == "use response_format"
    assert hints.field_hint("structured_output", BODIES) == "use structured_outputs"


def test_every_row_says_something_once() -> None:
    assert [row for row in EVERY if not row.ours and not row.note] == []
    for _, rows in (*hints.SECTIONS, deployment.BENCH, requests.PARAMS, requests.FIELDS):
        for side in ([row.vllm for row in rows], [row.sglang for row in rows]):
            names = " ".join(side).split()
            assert sorted(set(names)) == sorted(names)


def test_options_pages_and_files_that_notes_name_are_there() -> None:
    notes = " ".join(row.note for row in EVERY)
    known = {
        name
        for command in COMMANDS.values()
        for one in command.params
        for name in (*one.opts, *one.secondary_opts)
    }
    assert set(re.findall(r"--[a-z][a-z-]+", notes)) <= known
    assert all((ROOT / name).is_file() for name in re.findall(r"docs/[a-z-]+\.md", notes))
    for number in re.findall(r"decisions? (\d+)(?: and (\d+))?", notes):
        for one in filter(None, number):
            assert list((ROOT / "docs" / "decisions").glob(f"{int(one):04}-*.md")), one


@pytest.mark.parametrize(("name", "row"), exact(OPTIONS), ids=lambda one: str(one)[:30])
def test_every_option_of_theirs_is_answered_by_command_and_engine(name: str, row: Row) -> None:
    known = {one: f"--{one.replace('_', '-')}" for one in SERVE - {"model"}}
    if name in known:
        assert row.ours == name
        return
    flag = f"--{name.replace('_', '-')}"
    said = option_hint(flag, known, {"model": "freewheel serve MODEL"})
    wanted = {"model": "the model stands", "": row.note}.get(
        row.ours, known.get(row.ours, row.ours)
    )
    assert wanted in said
    assert (row.ours or row.note) in hint(name, ENGINE) or row.ours not in ENGINE


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve demo --tensor-parallel-size 8", "use --tp"),
        ("serve demo --mem-fraction-static=0.9", "use --cache-bytes: in bytes, not a share"),
        ("serve demo -tp 8", "No such option: -tp; use --tp"),
        ("serve demo --ep 8", "--ep is a switch, which takes no value"),
        ("serve demo --no-enable-log-requests", "a request is one line"),
        ("serve demo --max-lora-rank 8", "there are no adapters"),
        ("serve demo --max-loras 8", "there are no adapters"),
        ("serve demo --temperature 1", "a request has it: temperature"),
        ("serve demo --decode-context-parallel-size 2", "in Python only: LLM(split_scan=..)"),
        ("serve --model-path x", "freewheel serve x"),
        ("generate demo --otlp-traces-endpoint x", "freewheel serve --otlp-endpoint"),
        ("generate demo --guided-json x", "use --schema"),
        ("bench decode --max-num-seqs 4", "use --batch"),
        ("bench serve --random-input-len 5", "use --prompt-tokens"),
        ("bench offline --num-prompts 4", "use --requests"),
        ("serve demo other", "unexpected extra argument"),
        ("serve demo --tp", "requires an argument"),
    ],
)
def test_commands_answer_names_of_theirs(line: str, said: str) -> None:
    done = CliRunner().invoke(app, line.split(), prog_name="freewheel", env={"COLUMNS": "300"})
    assert done.exit_code == 2 and said in done.output


def test_a_command_line_of_theirs_is_answered_at_once() -> None:
    line = (
        "serve X --tensor-parallel-size 8 --max-num-seqs 64 --port --host --enable-auto-tool-choice"
        " --trust-remote-code --nothing=-1 --max-num-seqs 3 -dp 2"
    )
    done = CliRunner().invoke(app, line.split(), prog_name="freewheel", env={"COLUMNS": "300"})
    said = dict(re.findall(r"No such option: ([\w-]+)(.*?) *│", done.output))
    assert done.exit_code == 2 and done.output.count("No such option") == 6
    assert [*said.values()][:2] == ["; use --tp", "; use --max-batch"]
    assert "built in" in said["--enable-auto-tool-choice"]
    assert "ever run" in said["--trust-remote-code"]
    assert (said["--nothing"], said["-dp"]) == ("", "; use --dp")


def test_engines_and_parameters_answer_names_of_theirs() -> None:
    options: dict[str, Any] = {"otlp_traces_endpoint": "x"}
    with pytest.raises(ConfigError, match="freewheel serve --otlp-endpoint"):
        LLM("demo", **options)
    options = {"max_num_seqs": 4, "trust_remote_code": True, "max_batch": 4, "tqdm": 1}
    with pytest.raises(ConfigError) as told:
        LLM("demo", **options)
    lines = str(told.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "max_num_seqs",
        "trust_remote_code",
        "tqdm",
    ]
    assert "use max_batch" in lines[0] and "ever run" in lines[1]
    wish: dict[str, Any] = {"structural_tag": "{}", "max_new_tokens": 4}
    with pytest.raises(RequestError, match=r"grammar_trigger\n.*use max_tokens$") as refused:
        SamplingParams(**wish)
    assert refused.value.field == "structural_tag"


@pytest.mark.parametrize("option", ["--colorado", "--explora", "--floral-size"])
def test_words_that_only_hold_the_letters_of_a_pattern_are_no_options_of_others(
    option: str,
) -> None:
    assert "adapters" not in option_hint(option, {"tp": "--tp"}, {})
