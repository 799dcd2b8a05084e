# SPDX-License-Identifier: Apache-2.0
"""Errors of a command name its options, whatever the fields behind them are called."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from freewheel.cli.app import app
from freewheel.cli.hinting import Hinting
from freewheel.cli.naming import OTHERWISE, Option, as_options, by_field
from freewheel.spec import SamplingParams
from tests.program.test_cli_panels import COMMANDS

CONFIG = Path(__file__).parents[2] / "benchmarks" / "configs" / "v32_tp8shard.json"
NO_OPTION = {"calls", "grammar_trigger", "skip_special_tokens", "include_stop_str_in_output"}
"""Fields of SamplingParams that the command line has no option for."""

KNOWN = by_field(
    [
        ("cache_bytes", Option("--cache-bytes")),
        ("tp", Option("--tp")),
        ("guard", Option("--guard")),
        ("prefix_cache", Option("--prefix-cache", "--no-prefix-cache")),
        ("schema", Option("--schema")),
    ]
)


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_every_option_of_every_command_is_named_as_it_is_written(name: tuple[str, ...]) -> None:
    command: Any = COMMANDS[name]
    assert isinstance(command, Hinting)
    named = command.by_field()
    for option in (one for one in command.params if one.param_type_name == "option"):
        said = as_options(f"{option.name}: is wrong", named).removesuffix(": is wrong")
        assert said in option.opts and said.startswith("--")
        field = max(option.opts, key=len).removeprefix("--").replace("-", "_")
        assert field in {
            option.name,
            *(f for f, own in OTHERWISE.items() if own == option.name),
        } | {str(option.name).removesuffix("s")}


def test_every_wish_of_a_request_has_an_option() -> None:
    command: Any = COMMANDS["generate",]
    named = command.by_field()
    wishes = {one.name for one in fields(SamplingParams)}
    assert wishes - named.keys() == NO_OPTION
    assert all(as_options(f"{one}: x", named).startswith("--") for one in wishes - NO_OPTION)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("cache_bytes: 5 is too little", "--cache-bytes: 5 is too little"),
        ("json_schema: no", "--schema: no"),
        ("tp: use tp=1, or lower cache_bytes", "--tp: use --tp 1, or lower --cache-bytes"),
        ("x: (prefix_cache=False), guard=True", "x: (--no-prefix-cache), --guard"),
        ("x: raise it, or lower tp", "x: raise it, or lower --tp"),
        ("x: guard=False", "x: guard=False"),
        ("x: tp and a guard; kept_tp=1 /tp=1", "x: tp and a guard; kept_tp=1 /tp=1"),
        ("x: got 'my cache_bytes', \"tp=1\"", "x: got 'my cache_bytes', \"tp=1\""),
        ("x: the model's cache_bytes, not others'", "x: the model's --cache-bytes, not others'"),
        ("/a/cache_bytes.json: cache_bytes.py", "/a/cache_bytes.json: cache_bytes.py"),
        ("max_batch: not of this command", "max_batch: not of this command"),
    ],
)
def test_names_become_options_and_what_was_given_stays(message: str, said: str) -> None:
    assert as_options(message, KNOWN) == said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("generate", "demo", "--prompt", "a", "--schema", "nowhere"), "--schema: nowhere"),
        (("generate", "demo", "--prompt", "a", "--bad-word", ""), "--bad-word: "),
        (("generate", "demo", "--prompt", "a", "--stop-token-id", "-1"), "--stop-token-id: "),
        (("serve", "demo", "--api-key-file", "nowhere"), "--api-key-file: nowhere"),
        (("serve", "demo", "--kv-peer", "a:b:c"), "--kv-peer: "),
        (("simulate", "trace", "--make", "cows=4"), "--make: 'cows'"),
        (("plan", "no/config.json"), "model: 'no/config.json' does not exist"),
        (("inspect", str(CONFIG)), f"model: '{CONFIG}' is a file, and a folder is taken here"),
        (("bench", "decode", "--slow-host", "x"), "--slow-host: "),
        (("audit", "demo", "--speculate", "9"), "--speculate: "),
    ],
)
def test_commands_say_so(
    line: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, line)
    told = done.output + capfd.readouterr().err
    assert done.exit_code == 2 and f"error: {said}" in told
