# SPDX-License-Identifier: Apache-2.0
"""The command line: answers on standard output, the rest on standard error, exit codes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from freewheel.cli import main
from freewheel.models.deepseek_v32 import DeepseekV32
from tests.fixtures.closed_form import perm_run


class Ran:
    """What a command line did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        (line,) = self.out.splitlines()
        return json.loads(line)


@pytest.fixture
def freewheel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*args: str | Path, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["freewheel", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return run


FIELDS = {
    "text",
    "token_ids",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "rounds",
    "tokens_per_round",
    "host_reads",
}


def test_generate_prints_one_json_object_with_counted_host_reads(
    freewheel: Any, folders: dict[str, Path]
) -> None:
    ran = freewheel(
        "generate",
        folders["perm"],
        "--prompt",
        "'",
        "--max-tokens",
        "13",
        "--temperature",
        "0",
        "--ignore-eos",
        "--json",
    )
    assert ran.code == 0
    assert ran.json.keys() >= FIELDS
    assert ran.json["token_ids"] == perm_run(7, 13)
    assert (ran.json["rounds"], ran.json["host_reads"]) == (4, 0)
    assert ran.json["finish_reason"] == "length"


def test_a_planted_read_is_counted_in_eager_rounds(
    freewheel: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    ran = freewheel(
        "generate",
        folders["perm"],
        "--prompt",
        "'",
        "--max-tokens",
        "5",
        "--temperature",
        "0",
        "--speculate",
        "0",
        "--graph",
        "eager",
        "--json",
    )
    assert ran.json["host_reads"] == 5


def test_answers_and_messages_take_separate_streams(
    freewheel: Any, folders: dict[str, Path]
) -> None:
    ran = freewheel(
        "generate", folders["perm"], "--max-tokens", "4", "--temperature", "0", stdin="'"
    )
    assert ran.out == "".join(chr(32 + t) for t in perm_run(7, 4)) + "\n"
    assert "loading" in ran.err and "4 tokens in 2 rounds" in ran.err


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--top-p", "3"], "top_p"),
        (["--temperature", "-1"], "temperature"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--speculate", "9"], "speculate"),
        (["--graph", "banana"], "graph"),
        (["--drafter", "oracle"], "drafter"),
        (["--run-ahead", "4"], "run_ahead"),
        (["--chunk", "3"], "chunk"),
        (["--context-len", "1000000"], "context_len"),
        (["--prompt", ""], "prompt"),
        (["--nonsense"], "nonsense"),
        (["--max-tokens", "many"], "max-tokens"),
    ],
)
def test_bad_arguments_exit_2_and_name_the_option(
    freewheel: Any, folders: dict[str, Path], options: list[str], names: str
) -> None:
    ran = freewheel("generate", folders["perm"], "--prompt", "a", *options)
    assert ran.code == 2
    assert names in ran.err and not ran.out


def test_a_bad_model_exits_2_and_says_what_is_wrong(freewheel: Any, tmp_path: Path) -> None:
    missing = freewheel("generate", tmp_path / "nowhere", "--prompt", "a")
    assert missing.code == 2 and "nowhere" in missing.err
    empty = freewheel("inspect", tmp_path)
    assert empty.code == 2 and "config.json" in empty.err


def test_inspect_reads_headers_only_and_its_plan_adds_up(
    freewheel: Any, folders: dict[str, Path]
) -> None:
    found = freewheel("inspect", folders["t32"], "--batch", "2", "--json").json
    group = found["groups"][0]
    assert group["name"] == "history"
    assert group["page_bytes"] * group["pages"] == found["memory"]["cache"]
    assert found["spec"]["indexer"]["topk"] == 16
    text = freewheel("inspect", folders["tg"])
    assert text.code == 0 and "glm_moe_dsa" in text.out


def test_audit_counts_one_letter_each_way_and_one_graph_a_round(
    freewheel: Any, folders: dict[str, Path]
) -> None:
    ran = freewheel("audit", folders["t32"], "--rounds", "200", "--json")
    assert ran.code == 0
    report = ran.json
    assert report["rounds"] >= 200
    assert report["host_reads"] == report["unplanned_copies"] == 0
    for name in ("uploads_per_round", "downloads_per_round", "graph_launches_per_round"):
        assert report[name] == 1


@pytest.mark.parametrize("graph", ["eager", "tape"])
def test_audit_fails_on_a_planted_read_and_names_its_file_and_line(
    freewheel: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, graph: str
) -> None:
    line = plant(monkeypatch)
    ran = freewheel("audit", folders["t32"], "--rounds", "5", "--graph", graph, "--json")
    assert ran.code == 1
    assert ran.json["host_reads"] >= 1
    assert f"test_cli.py:{line}" in ran.err


def plant(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make the model read a device value; returns the line that does."""
    forward = DeepseekV32.forward

    def reading(self: Any, view: Any, cache: Any) -> Any:
        view.kv_lens.max().item()
        return forward(self, view, cache)

    monkeypatch.setattr(DeepseekV32, "forward", reading)
    return reading.__code__.co_firstlineno + 1


def test_chat_keeps_the_conversation_and_answers_every_line(
    freewheel: Any, folders: dict[str, Path]
) -> None:
    refused = freewheel("chat", folders["perm"], stdin="hello\n")
    assert refused.code == 2 and "tokenizer" in refused.err
    ran = freewheel(
        "chat", "demo", "--max-tokens", "6", "--temperature", "0", "--json", stdin="hello\nagain\n"
    )
    first, second = (json.loads(line) for line in ran.out.splitlines())
    assert ran.code == 0
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["completion_tokens"] - 1
