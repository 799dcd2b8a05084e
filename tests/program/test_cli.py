# SPDX-License-Identifier: Apache-2.0
"""The command line: answers on standard output, the rest on standard error, exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from freewheel import Chunk, Piece
from freewheel.cli import main
from freewheel.cli.chat import _said
from freewheel.config import find_model
from freewheel.engine import Tokenizer
from freewheel.models.deepseek_v32 import DeepseekV32
from tests.fixtures.closed_form import T32, perm_run, write_json, write_t32


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


def test_a_conversation_is_told_answers_but_not_thoughts() -> None:
    end = find_tokenizer().token_id("</think>")
    assert end is not None
    thought, answer = find_tokenizer().encode_text("hm"), find_tokenizer().encode_text("Yes.")
    llm = SimpleNamespace(tokenizer=find_tokenizer())
    for ids, want in (([*thought, end, *answer], "Yes."), (thought, "")):
        chunk = Chunk((Piece("hmYes.", False),), tuple(ids), None, None)
        assert _said(llm, [chunk], thinking=True) == want  # type: ignore[arg-type]
        assert _said(llm, [chunk], thinking=False) == "hmYes."  # type: ignore[arg-type]


def find_tokenizer() -> Tokenizer:
    return Tokenizer(find_model("demo"))


def shell(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell in which $F is the command and $M a model."""
    names = {"F": f"{sys.executable} -m freewheel", "M": str(folder)}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    set_ = os.environ | names | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(["bash", "-c", script], env=set_, capture_output=True, check=False)


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("$F generate $M --max-tokens 3 <&-", 2, "standard input is closed"),
        ("$F chat demo <&-", 2, "standard input is closed"),
        ("$F generate $M --prompt A --max-tokens 3 >&-", 1, "standard output is closed"),
        ("$F inspect $M --json >/dev/full", 1, "No space left"),
        ("printf 'a\\xff' | PYTHONUTF8=1 $F generate $M", 2, "prompt: is not valid Unicode"),
        ("printf 'a\\xff' | PYTHONIOENCODING=utf-8:strict $F chat demo", 2, "not utf-8"),
        ("$F generate $M --prompt $'a\\xff'", 2, "prompt: is not valid Unicode"),
        ("$F generate '/tmp/[/foo]' --prompt A", 2, "/tmp/[/foo]"),
    ],
)
def test_a_broken_surrounding_ends_in_one_plain_line(
    folders: dict[str, Path], script: str, code: int, says: str
) -> None:
    ran = shell(script, folders["t32"])
    errors = ran.stderr.decode()
    assert (ran.returncode, ran.stdout) == (code, b"")
    assert says in errors.replace("\n", " ") and "Traceback" not in errors


def test_a_reader_that_leaves_ends_the_run_silently(folders: dict[str, Path]) -> None:
    script = "$F generate $M --prompt A --max-tokens 90 --ignore-eos | head -c 1; exit $PIPESTATUS"
    ran = shell(script, folders["perm"])
    assert ran.returncode in (0, 1) and len(ran.stdout) == 1  # 0 if it was done before
    assert b"Traceback" not in ran.stderr and b"Exception" not in ran.stderr


def test_letters_that_the_output_lacks_are_spelt_out(folders: dict[str, Path]) -> None:
    options = "--prompt A --max-tokens 30 --temperature 0 --ignore-eos"
    plain = shell(f"$F generate $M {options} --json", folders["t32"])
    text = json.loads(plain.stdout)["text"]
    assert not text.isascii()
    in_ascii = shell(f"$F generate $M {options} --json", folders["t32"], PYTHONIOENCODING="ascii")
    assert in_ascii.stdout.isascii() and json.loads(in_ascii.stdout)["text"] == text
    spelt = shell(f"$F generate $M {options}", folders["t32"], PYTHONIOENCODING="ascii")
    assert spelt.returncode == 0
    assert spelt.stdout == text.encode("ascii", "backslashreplace") + b"\n"


def test_inspect_refuses_what_could_not_be_loaded(freewheel: Any, tmp_path: Path) -> None:
    folder = write_t32(tmp_path / "t32")
    write_json(folder / "config.json", T32 | {"kv_lora_rank": 64})
    ran = freewheel("inspect", folder)
    assert ran.code == 2 and "kv_a_layernorm" in ran.err and not ran.out
