# SPDX-License-Identifier: Apache-2.0
"""The command line: answers on standard output, the rest on standard error, exit codes."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from rich.console import Console

from freewheel import LLM, Chunk, Piece
from freewheel.audit import AuditReport, ProfilerCounts
from freewheel.chat import Ask, Prompt
from freewheel.cli import audit, chat, generate, main, terminal
from freewheel.cli.chat import _said, _thought_pieces
from freewheel.cli.terminal import log_to_terminal
from freewheel.config import find_model
from freewheel.engine import Tokenizer
from freewheel.engine.output import Arrival, Metrics
from freewheel.models.deepseek_v32 import DeepseekV32
from tests.fixtures.closed_form import T32, perm_run, write_json, write_t32
from tests.waiting import PATIENCE


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
    def run(*args: str | Path, stdin: str | io.StringIO = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["freewheel", *map(str, args)])
        source = io.StringIO(stdin) if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", source)
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        out, err = capsys.readouterr()
        return Ran(code, out, err)

    return run


class Typed(io.StringIO):
    """Standard input that somebody types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both streams are terminals with colours."""
    for name, stderr in (("answers", False), ("messages", True)):
        screen = Console(
            stderr=stderr,
            force_terminal=True,
            color_system="standard",
            no_color=False,
            width=200,
            soft_wrap=True,
            highlight=False,
        )
        for module in (terminal, generate, chat, audit):
            if name in vars(module):
                monkeypatch.setattr(module, name, screen)


DIM, GREEN = "\x1b[2m{}\x1b[0m", "\x1b[32m{}\x1b[0m"

FIELDS = {
    "text",
    "token_ids",
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "cached_host_tokens",
    "cached_disk_tokens",
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


def test_a_seed_that_was_drawn_is_told_and_gives_the_answer_again(
    freewheel: Any, folders: dict[str, Path]
) -> None:
    asked = [
        "generate",
        folders["t32"],
        "--prompt",
        "a",
        "--max-tokens",
        "12",
        "--temperature",
        "1",
    ]
    first = freewheel(*asked, "--json").json
    again = freewheel(*asked, "--seed", str(first["seed"]))
    assert again.out.rstrip("\n") == first["text"].rstrip("\n") and "--seed" not in again.err
    drawn = freewheel(*asked)
    seed = drawn.err.partition("--seed ")[2].split()[0]
    assert freewheel(*asked, "--seed", seed).out == drawn.out
    greedy = freewheel(*asked[:-1], "0", "--json")
    assert greedy.json["seed"] is None


@pytest.mark.parametrize(
    ("seconds", "rate"),
    [
        ((0.5,), None),  # one letter, at whatever time
        ((0.5, 0.5006), None),  # two that were read at once
        ((0.5, 0.501, 0.502, 0.503), None),  # as many as are under way at most
        ((0.5, 1.5), 3.0),
        ((0.5, 0.51, 0.52, 0.53, 0.54, 0.55), 300.0),
        ((0.5,) * 9, None),
    ],
)
def test_a_rate_is_said_where_time_passed_between_rounds(
    seconds: tuple[float, ...], rate: float | None
) -> None:
    arrivals = tuple(Arrival(one, 3 if at else 1, 0, 0) for at, one in enumerate(seconds))
    tokens = sum(one.tokens for one in arrivals)
    found = Metrics(2, 0, tokens, 0, 0, seconds[0], seconds[-1], arrivals)
    assert generate.rate_after_first(found) == (rate and pytest.approx(rate))
    said = "tokens/s" in generate.summary(found).plain
    assert said is (rate is not None)


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
        (["--top-p", "3"], "--top-p:"),
        (["--temperature", "-1"], "temperature"),
        (["--max-tokens", "0"], "--max-tokens:"),
        (["--speculate", "9"], "speculate"),
        (["--graph", "banana"], "graph"),
        (["--device", "gpu"], "device"),
        (["--drafter", "oracle"], "drafter"),
        (["--run-ahead", "4"], "--run-ahead:"),
        (["--chunk", "3"], "chunk"),
        (["--context-len", "1000000"], "--context-len:"),
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
    assert "loading" not in ran.err or names == "--context-len:"  # that one the folder decides


@pytest.mark.parametrize(
    ("command", "option", "hint"),
    [
        ("serve", "--tensor-parallel-size", "use --tp"),
        ("serve", "--max-model-len=4096", "use --context-len"),
        ("serve", "--gpu-memory-utilization", "use --cache-bytes: in bytes, not a share"),
        ("serve", "--mem-fraction-static", "use --cache-bytes: in bytes, not a share"),
        ("serve", "--max-num-batched-tokens", "use --chunk: prompt tokens of each request"),
        ("serve", "--enable-prefix-caching", "use --prefix-cache: on unless"),
        ("serve", "--disable-radix-cache", "--no-prefix-cache"),
        ("serve", "--speculative-config", "use --speculate"),
        ("serve", "--served-model-name", "use --served-name"),
        ("generate", "--served-model-name", "freewheel serve --served-name"),
        ("generate", "--trust-remote-code", "no code of a checkpoint is ever run"),
        ("serve", "--tool-call-parser", "built in, and read from the model's folder"),
        ("serve", "--reasoning-parser=x", "built in, and read from the model's folder"),
        ("serve", "--enable-auto-tool-choice", "built in, and read from the model's folder"),
        ("serve", "--chat-template", "built in, and read from the model's folder"),
        ("serve", "--disable-log-requests", "nothing to switch off"),
        ("serve", "--cpu-offload-gb", "weights stay on the devices"),
        ("serve", "--model=my-model", "the model stands without an option: "),
        ("serve", "--model-path=my-model", "serve my-model"),
        ("bench", "--speculative-num-steps", "use --speculate"),
        ("bench", "--num-prompts", "use --requests"),
    ],
)
def test_options_of_other_engines_are_told_ours(
    freewheel: Any, command: str, option: str, hint: str
) -> None:
    ran = freewheel(*(("bench", "offline") if command == "bench" else (command,)), "demo", option)
    said = " ".join(ran.err.replace("\u2502", " ").split())
    assert ran.code == 2 and "No such option" in said
    assert hint in said and "Traceback" not in said


def test_a_load_on_a_server_is_told_how_many_requests_are_named(freewheel: Any) -> None:
    ran = freewheel("bench", "serve", "--requests", "4")
    assert ran.code == 2 and "use --num-prompts" in " ".join(ran.err.split())


def test_a_name_that_shares_one_word_alone_is_not_suggested(freewheel: Any) -> None:
    ran = freewheel("serve", "--log-requests")
    assert ran.code == 2 and "use --" not in ran.err


@pytest.mark.parametrize("verb", ["throughput", "latency", "offlien"])
def test_a_verb_of_bench_that_there_is_not_is_answered_with_those_there_are(
    freewheel: Any, verb: str
) -> None:
    ran = freewheel("bench", verb, "demo")
    said = " ".join(ran.err.replace("\u2502", " ").split())
    assert ran.code == 2 and f"No such verb: {verb}" in said
    assert "decode, kernels, offline, picture, serve" in said


def test_a_config_alone_is_no_model_to_inspect_and_who_takes_it_is_said(freewheel: Any) -> None:
    config = Path(__file__).parents[2] / "benchmarks" / "configs" / "v32.json"
    ran = freewheel("inspect", config)
    assert ran.code == 2 and "give the folder" in ran.err and "freewheel plan" in ran.err


def test_log_lines_have_a_time_and_a_level(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("freewheel")
    before = logger.handlers
    try:
        log_to_terminal()
        logging.getLogger("freewheel.canary").error("page %d changed", 7)
    finally:
        logger.handlers = before
    line = capsys.readouterr().err
    assert re.fullmatch(r"[0-9]{4}-[0-9-]+ [0-9:,]+ ERROR page 7 changed\n", line)


@pytest.mark.parametrize("command", ["generate", "chat", "audit"])
@pytest.mark.parametrize(
    "options", [["--speculate", "9"], ["--device", "gpu"], ["--graph", "x"], ["--chunk", "4"]]
)
def test_no_command_says_that_it_loads_before_its_options_are_checked(
    freewheel: Any, folders: dict[str, Path], command: str, options: list[str]
) -> None:
    for model, args in ((folders["perm"], options), ("nowhere", [])):
        ran = freewheel(command, model, *args, stdin="a")
        assert ran.code == 2 and "loading" not in ran.err and not ran.out


def test_an_empty_prompt_is_served_if_the_tokenizer_begins_it(
    freewheel: Any, folders: dict[str, Path]
) -> None:
    begun = freewheel("generate", "demo", "--prompt", "", "--max-tokens", "2", "--json")
    assert begun.code == 0 and begun.json["prompt_tokens"] == 1
    refused = freewheel("generate", folders["perm"], "--prompt", "")
    assert refused.code == 2 and "--prompt: is empty" in refused.err
    nothing = freewheel("generate", folders["perm"])
    assert nothing.code == 2 and "--prompt" in nothing.err and "loading" not in nothing.err


@pytest.mark.usefixtures("on_a_terminal")
def test_on_a_terminal_the_dim_prompt_reads_on_and_green_is_explained(
    freewheel: Any, folders: dict[str, Path]
) -> None:
    options = ("--prompt", "'", "--max-tokens", "4", "--temperature", "0")
    ran = freewheel("generate", folders["perm"], *options)
    first, *drafts, last = (chr(32 + t) for t in perm_run(7, 4))
    text = DIM.format("'") + first + "".join(map(GREEN.format, drafts)) + last
    assert ran.out == text + "\n"
    assert GREEN.format("drafts accepted") in ran.err
    quiet = freewheel("generate", folders["perm"], *options, "--json")
    assert quiet.json["text"] == "".join((first, *drafts, last))


@pytest.mark.usefixtures("on_a_terminal")
def test_progress_shows_no_bar_before_the_size_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.loading("a model"):
        pass
    before = capsys.readouterr().err
    assert "loading a model" in before and "bytes" not in before and "━" not in before
    with terminal.loading("a model") as progress:
        progress(512, 1024)
    assert "0.5/1.0 kB" in capsys.readouterr().err
    with terminal.counting("rounds", 8, lambda: 9):
        pass
    assert "8/8" in capsys.readouterr().err


def test_off_a_terminal_counting_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.counting("rounds", 8, lambda: 4):
        pass
    assert capsys.readouterr() == ("", "")


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


def test_inspect_says_what_it_chose_in_plain_words(freewheel: Any) -> None:
    rows = [line.split(maxsplit=1) for line in freewheel("inspect", "demo").out.splitlines()]
    said = {row[0]: row[1] for row in rows if len(row) == 2}
    assert said["pages"] == "1,024 of history: 8 requests of 8192 tokens"
    assert said["history"].startswith("1,025 pages") and "scratch" in said["history"]
    assert said["drafter"] == "mtp: the checkpoint has a multi-token-prediction layer"
    assert said["graph"].startswith(("tape: ", "cuda: "))


@pytest.mark.parametrize("name", ["t32", "tg", "t4"])
def test_inspect_lists_what_each_graph_calls(
    freewheel: Any, folders: dict[str, Path], name: str
) -> None:
    options = ("--batch", "2", "--chunk", "16", "--dtype", "float32", "--device", "cpu")
    ladder = freewheel("inspect", folders[name], *options, "--graph", "--json").json["ladder"]
    layers = freewheel("inspect", folders[name], "--json").json["spec"]["layers"]
    assert len(ladder) == 6
    for shape in ladder:
        calls = shape["calls"]
        assert calls["freewheel::apply_inbox"] == calls["freewheel::commit"] == 1
        assert calls["freewheel::choose"] == 1 + shape["depth"]
        assert calls.get("freewheel::write_draft", 0) == shape["depth"]
        assert not {"aten::t", "aten::view", "aten::select.int"} & calls.keys()
        assert sum(calls.values()) > 10 * layers
    said = freewheel("inspect", folders[name], *options, "--graph").out
    assert said.count("graph of ") == 6 and "freewheel::commit" in said
    assert "calls" not in freewheel("inspect", folders[name], "--json").json["ladder"][0]


def test_inspect_keeps_its_lines_short_and_counts_in_words(freewheel: Any) -> None:
    lines = freewheel("inspect", "demo-v4", "--graph").out.splitlines()
    assert max(map(len, lines)) <= 100
    (table,) = (line for line in lines if line.endswith("ffn.gate.tid2eid"))
    assert "1 tensor (stored as I64)" in table
    calls = [line for line in lines if line.endswith("  freewheel::commit")]
    assert calls and all(line.split() == ["1", "freewheel::commit"] for line in calls)


def test_inspect_gives_each_group_of_the_v4_demo_its_bytes(freewheel: Any) -> None:
    lines = freewheel("inspect", "demo-v4").out.splitlines()
    groups = ("window", "compressed4", "tail4", "compressed128", "tail128")
    places = [next(i for i, line in enumerate(lines) if line.split()[0] == g) for g in groups]
    said = [lines[at + 2].strip() for at in places]
    assert said == [
        "10 KiB a token, 2.5 MiB a request; keeps the last 128 tokens",
        "1.25 KiB a token, 10 MiB a request; keeps all tokens",
        "20 KiB a token, 640 KiB a request; keeps the last 8 tokens",
        "32 B a token, 256 KiB a request; keeps all tokens",
        "8 KiB a token, 2 MiB a request; keeps the last 128 tokens",
    ]


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
    assert report["profiler"] is None and report["kernels_per_round"] > 100


def test_audit_ends_with_its_verdict(freewheel: Any, folders: dict[str, Path]) -> None:
    ran = freewheel("audit", folders["t32"], "--rounds", "5")
    assert ran.code == 0
    assert ran.out.splitlines()[-1] == (
        "passed: no host read, one letter each way, one graph a round"
    )
    failed = AuditReport(8, 2, 0, 1.0, 1.5, 1.0, None, 9, ("item at a.py:1",))
    assert not failed.passed
    assert failed.verdict == "failed: host reads: 2, not 0; downloads a round: 1.5, not 1"
    seen = ProfilerCounts(10, 1.0, 1.0, 1.1, 3)
    failed = AuditReport(8, 0, 0, 1.0, 1.0, 1.0, 300, 9, (), seen)
    assert failed.failures == (
        "graph launches a round by the profiler: 1.1, not 1",
        "waits by the profiler: 3, not 0",
    )


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
    assert refused.code == 2 and "tokenizer" in refused.err and "loading" not in refused.err
    unknown = freewheel("chat", folders["tg"], stdin="hello\n")
    assert unknown.code == 2 and "glm_moe_dsa" in unknown.err and "loading" not in unknown.err
    ran = freewheel(
        "chat", "demo", "--max-tokens", "6", "--temperature", "0", "--json", stdin="hello\nagain\n"
    )
    first, second = (json.loads(line) for line in ran.out.splitlines())
    assert ran.code == 0
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["completion_tokens"] - 1


def test_a_turn_that_does_not_fit_is_refused_and_the_conversation_goes_on(freewheel: Any) -> None:
    options = ("--context-len", "40", "--max-tokens", "3", "--temperature", "0", "--dtype", "auto")
    limits = ("--top-k", "5", "--min-p", "0", "--stop", "\n\n")
    lines = f"hello\n{'hello ' * 90}\nagain\n"
    ran = freewheel("chat", "demo", *options, *limits, "--json", stdin=lines)
    first, refused, third = (json.loads(line) for line in ran.out.splitlines())
    assert ran.code == 0
    assert refused.keys() == {"error"} and "context of 40" in refused["error"]
    assert "refused" in ran.err
    without = freewheel("chat", "demo", *options, *limits, "--json", stdin="hello\nagain\n")
    same = ("text", "token_ids", "prompt_tokens")
    for mine, line in zip((first, third), without.out.splitlines(), strict=True):
        assert [mine[name] for name in same] == [json.loads(line)[name] for name in same]


@pytest.mark.usefixtures("on_a_terminal")
def test_a_typed_chat_says_how_it_ends_and_shows_thoughts_dim(freewheel: Any) -> None:
    options = ("--max-tokens", "1", "--temperature", "0", "--thinking")
    ran = freewheel("chat", "demo", *options, stdin=Typed("hello\n\n"))
    assert ran.code == 0
    assert "an empty line or Ctrl-D ends" in ran.err
    assert ran.out.startswith("\x1b[2m")


class Interrupting(LLM):
    """Ctrl-C comes while its answers are under way: before the first chunk, then after two."""

    seen: ClassVar[list[int]] = []

    def stream(self, prompt: Any, *given: Any, **named: Any) -> Generator[Chunk]:
        self.seen.append(len(prompt))
        stream = super().stream(prompt, *given, **named)
        for _ in range({1: 0, 2: 2}.get(len(self.seen), 1000)):
            if (chunk := next(stream, None)) is None:
                return
            yield chunk
        raise KeyboardInterrupt


@pytest.mark.usefixtures("on_a_terminal")
def test_ctrl_c_stops_an_answer_and_the_conversation_keeps_what_was_said(
    freewheel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "engine", SimpleNamespace(LLM=Interrupting))
    monkeypatch.setattr(Interrupting, "seen", [])
    options = ("--max-tokens", "9", "--temperature", "0", "--speculate", "0", "--json")
    ran = freewheel("chat", "demo", *options, stdin=Typed("hello\nhello\nand\n\n"))
    assert ran.code == 0
    silent, stopped, whole = (json.loads(line) for line in ran.out.splitlines())
    assert silent == {"text": "", "token_ids": [], "finish_reason": "abort"}
    assert stopped["finish_reason"] == "abort" and len(stopped["token_ids"]) == 2
    assert whole["finish_reason"] == "length"
    first, second, third = Interrupting.seen
    assert second == first < third  # the first turn is gone, the second is there
    told = ran.err.count("\x1b[1m> ")
    assert told == 4  # after each of them it asked again


@pytest.mark.usefixtures("on_a_terminal")
def test_ctrl_c_at_the_prompt_ends_a_chat_and_leaves_a_line_of_its_own(
    freewheel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaving(Typed):
        def readline(self, *_: object) -> str:
            raise KeyboardInterrupt

    ran = freewheel("chat", "demo", "--max-tokens", "1", stdin=Leaving())
    assert ran.code == 130 and ran.err.endswith("\x1b[?25h\n")


def test_what_an_interrupt_found_being_written_is_not_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Torn(io.StringIO):
        whole = False

        def flush(self) -> None:
            if not self.whole:
                self.whole = True
                raise KeyboardInterrupt

    file = Torn()
    monkeypatch.setattr(terminal, "answers", Console(file=file, force_terminal=True))
    with pytest.raises(KeyboardInterrupt):
        terminal.answers.print("Hello")
    terminal.drop_unwritten()
    terminal.answers.print("again")
    assert file.getvalue() == "Hello\nagain\n"


def test_ctrl_c_ends_a_chat_whose_input_nobody_types(
    freewheel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "engine", SimpleNamespace(LLM=Interrupting))
    monkeypatch.setattr(Interrupting, "seen", [])
    ran = freewheel("chat", "demo", "--max-tokens", "9", stdin="hello\nagain\n")
    assert (ran.code, ran.out, len(Interrupting.seen)) == (130, "", 1)


def test_long_work_has_lines_off_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.01)
    asked = threading.Event()

    def done() -> int:
        asked.set()
        return 7

    with terminal.counting("rounds, at least", 5, done, "running 5 rounds or more"):
        assert asked.wait(PATIENCE)
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert (first, second) == ("running 5 rounds or more", "rounds, at least 5/5")


def test_thoughts_reach_up_to_the_mark_that_ends_them() -> None:
    pieces = tuple(Piece(text, False, at) for at, text in enumerate(("so", "</think>", "Yes")))
    chunk = Chunk(pieces, (1, 2, 3), None, None)
    assert _thought_pieces(chunk, None) == 3
    assert _thought_pieces(chunk, 2) == 2
    silent = (pieces[0], pieces[2])
    assert _thought_pieces(Chunk(silent, (1, 2, 3), None, None), 2) == 1
    assert _thought_pieces(Chunk(pieces[2:], (2,), None, None), 2) == 0


def test_a_conversation_is_told_answers_but_not_thoughts() -> None:
    end = find_tokenizer().token_id("</think>")
    assert end is not None
    thought, answer = find_tokenizer().encode_text("hm"), find_tokenizer().encode_text("Yes.")
    llm = SimpleNamespace(tokenizer=find_tokenizer())
    for ids, want in (([*thought, end, *answer], "Yes."), (thought, "")):
        chunk = Chunk((Piece("hmYes.", False, 0),), tuple(ids), None, None)
        assert _said(llm, [chunk], Prompt([0], end)) == want  # type: ignore[arg-type]
        assert _said(llm, [chunk], Prompt([0])) == "hmYes."  # type: ignore[arg-type]
        assert _said(llm, [chunk], Prompt([0], end, 5)) == "hmYes."  # type: ignore[arg-type]


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


def test_capturing_makes_every_graph_and_says_so(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM(str(folders["perm"]), max_batch=1, prefill_batch=1, chunk=9)
    terminal.capture(llm)
    shapes = llm.built.ladder.shapes()
    assert all(llm.executor.calls(shape) for shape in shapes)
    assert f"capturing {len(shapes)} graphs" in capsys.readouterr().err


def test_what_to_give_instead_is_said_as_the_command_line_has_it(
    freewheel: Any, folders: dict[str, Path]
) -> None:
    prompt = ("generate", folders["perm"], "--device", "cpu", "--prompt", "'")
    for options, said in (
        ((*prompt, "--deterministic"), "on the CPU, --dtype float64 gives"),
        (
            ("serve", folders["perm"], "--tp", "4", "--role", "prefill", "--kv-port", "65533"),
            "--kv-port: 65533",
        ),
    ):
        ran = freewheel(*options)
        assert (ran.code, ran.out) == (2, "") and said in ran.err
        assert "loading" not in ran.err and ran.err.count("error") == 1


def test_an_interrupt_while_libraries_load_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    ran = subprocess.run(
        [sys.executable, "-m", "freewheel", "inspect", "demo"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, b"", b"")


def test_chat_thinks_as_much_as_it_is_told(freewheel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ask] = []
    monkeypatch.setattr(chat, "_encoding", lambda _: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(chat, "open_llm", lambda **_: None)
    monkeypatch.setattr(chat, "_converse", lambda *told: asked.append(told[4]))
    for arguments, want in (
        ([], Ask(thinking=False)),
        (["--thinking"], Ask(thinking=True)),
        (["--effort", "max"], Ask(thinking=True, effort="max")),
    ):
        asked.clear()
        assert freewheel("chat", "demo", *arguments, stdin="").code == 0
        assert asked == [want]
    assert freewheel("chat", "demo", "--effort", "huge", stdin="").code == 2


def test_a_long_prompt_is_read_under_a_bar_and_no_chunk_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(terminal, "messages", Console(file=screen, force_terminal=True, width=90))
    llm: Any = SimpleNamespace(config=SimpleNamespace(chunk=16), computed=40)
    chunks = [Chunk((), (token,), None, None) for token in range(3)]
    assert list(terminal.read_first(llm, 64, iter(chunks))) == chunks
    assert screen.getvalue() == ""
    assert list(terminal.read_first(llm, 200, iter(chunks))) == chunks
    assert "reading the prompt" in screen.getvalue() and "40/200" in screen.getvalue()


def test_more_tokens_than_the_context_has_room_for_are_refused(
    freewheel: Any, folders: dict[str, Path]
) -> None:
    ran = freewheel("generate", str(folders["t32"]), "--prompt", "abc", "--max-tokens", "999")
    assert ran.code == 2 and ran.out == ""
    assert "--max-tokens: 999 asked for" in ran.err
