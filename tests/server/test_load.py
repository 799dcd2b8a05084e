# SPDX-License-Identifier: Apache-2.0
"""Load on a server: what is sent when, and that the figures are those of the streams."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from freewheel.bench.client import Asking, Reply
from freewheel.bench.load import Load, LoadRun
from freewheel.bench.prompts import PLAIN_IDS, Prompt, random_prompts, read_prompts, starts
from freewheel.bench.scrape import DraftCounts, draft_summary, read_counts
from freewheel.bench.served import most_at_once, read_goals, served_summary
from freewheel.errors import ConfigError, RequestError
from tests.server.running import Running
from tests.waiting import PATIENCE

MODEL = Asking("demo", "completions", {})


def run_command(*options: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "freewheel", "bench", "serve", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def test_a_run_counts_every_token_that_the_server_made(server: Running) -> None:
    code, found, said = run_command(
        *("--url", server.url, "--num-prompts", "5", "--prompt-tokens", "7", "--max-tokens", "9"),
        *("--max-concurrency", "2", "--save-detailed"),
    )
    assert code == 0, said
    assert (found["completed"], found["failed"], found["model_id"]) == (5, 0, "demo")
    assert found["total_input_tokens"] == 5 * 7 and found["total_output_tokens"] == 5 * 9
    assert found["input_lens"] == [7] * 5 and found["output_lens"] == [9] * 5
    assert found["max_concurrent_requests"] <= 2
    assert found["mean_ttft_ms"] == pytest.approx(1000 * statistics.fmean(found["ttfts"]))
    assert all(found["generated_texts"]) and not any(found["errors"])
    rates = found["spec_decode_per_position_acceptance_rates"]
    assert rates == sorted(rates, reverse=True)
    length, count = found["spec_decode_acceptance_length"], found["spec_decode_num_drafts"]
    assert length == pytest.approx(1 + found["spec_decode_accepted_tokens"] / count)


def test_texts_of_a_file_can_be_asked_as_a_chat(server: Running, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "Hello.", "output_tokens": 3}, {"prompt": "Who is Emma?"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    code, found, said = run_command(
        *("--url", server.url, "--endpoint", "chat", "--prompt-file", str(file)),
        *("--max-tokens", "6", "--save-detailed", "--goodput", "e2el:6000000"),
    )
    assert code == 0, said
    assert found["output_lens"] == [3, 6]
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])


def test_a_refused_request_is_counted_and_told(server: Running) -> None:
    code, found, said = run_command(
        *("--url", server.url, "--num-prompts", "2", "--prompt-tokens", "40000"),
        *("--num-warmups", "0"),
    )
    assert code == 1, said
    assert (found["completed"], found["failed"]) == (0, 2)
    ((error, times),) = found["errors"].items()
    assert times == 2 and error.startswith("status 400") and "40000" in error


def test_no_server_is_one_line() -> None:
    code, found, said = run_command("--url", "http://127.0.0.1:9")
    assert code == 1 and not found
    assert said.count("\n") == 1 and "start a server there" in said


BROKEN = {
    "ends early": b'data: {"choices": [{"text": "a"}]}\n\n',
    "fails midway": b'data: {"choices": [{"text": "a"}]}\n\ndata: {"error": {"code": 1}}\n\n',
    "tells no usage": b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n',
}
SAID = {
    "ends early": "without [DONE]",
    "fails midway": "in the stream",
    "tells no usage": "no usage",
}


class _Stub(BaseHTTPRequestHandler):
    body = b""

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture(params=sorted(BROKEN))
def broken(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    handler = type("Handler", (_Stub,), {"body": BROKEN[request.param]})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        yield request.param, f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()


def test_a_broken_stream_is_a_failure_and_never_a_short_answer(broken: tuple[str, str]) -> None:
    fault, url = broken
    code, found, said = run_command(
        *("--url", url, "--model", "m", "--num-prompts", "3", "--num-warmups", "0")
    )
    assert code == 1, said
    assert (found["completed"], found["failed"]) == (0, 3)
    assert all(SAID[fault] in error for error in found["errors"])


class _Closed(_Stub):
    def do_GET(self) -> None:
        self.send_error(401)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_error(401)


@pytest.mark.parametrize("named", [(), ("--model", "m")])
@pytest.mark.parametrize("key", ["", "a wrong one"])
def test_a_server_that_wants_a_key_is_told_of_with_the_way_to_give_it(
    named: tuple[str, ...], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it says so when it is asked for its model or at the first request."""
    monkeypatch.setenv("FREEWHEEL_API_KEY", key)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Closed) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        code, found, said = run_command("--url", f"http://127.0.0.1:{http.server_port}", *named)
        http.shutdown()
    assert code == 1 and not found
    assert "401" in said and "FREEWHEEL_API_KEY" in said and "--api-key-file" in said
    if not named:
        assert ("refuses this API key" if key else "needs an API key") in said


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--request-rate", "0"), "request-rate"),
        (("--burstiness", "-1"), "burstiness"),
        (("--max-concurrency", "0"), "max-concurrency"),
        (("--endpoint", "embeddings"), "endpoint"),
        (("--endpoint", "chat"), "endpoint"),
        (("--goodput", "ttft"), "goodput"),
        (("--goodput", "speed:3"), "goodput"),
        (("--url", "ftp://x"), "url"),
        (("--num-prompts", "0"), "num-prompts"),
        (("--max-tokens", "0"), "max-tokens"),
        (("--prompt-file", "/none"), "prompt-file"),
    ],
)
def test_a_bad_option_is_named_before_anything_is_sent(
    options: tuple[str, ...],
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from freewheel.cli import app as cli  # noqa: PLC0415

    monkeypatch.setattr(sys, "argv", ["freewheel", "bench", "serve", *options])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert f"error: --{named}:" in capsys.readouterr().err


def test_gaps_have_the_mean_and_spread_that_were_asked_for() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        times = list(starts(20_000, 50.0, burstiness, seed=1))
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
        relative = statistics.pstdev(gaps) / statistics.fmean(gaps)
        assert relative == pytest.approx(burstiness**-0.5, rel=0.08)
    assert list(starts(3, math.inf, 1.0, seed=1)) == [0.0, 0.0, 0.0]


def test_random_prompts_are_the_same_for_a_seed_and_hold_plain_ids() -> None:
    ones = random_prompts(3, 20, 5, seed=4)
    assert ones == random_prompts(3, 20, 5, seed=4) != random_prompts(3, 20, 5, seed=5)
    assert all(token in PLAIN_IDS for prompt in ones for token in prompt.content)


@pytest.mark.parametrize("line", ["no json", "[1]", '{"prompt": 3}', '{"prompt": ""}'])
def test_a_bad_line_of_a_file_is_told_by_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(RequestError, match="line 2"):
        read_prompts(file, None, 4)


def test_lines_are_taken_in_turn(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a\n\nb\n")
    assert read_prompts(file, 3, 4) == [Prompt("a", 4), Prompt("b", 4), Prompt("a", 4)]


PAGE = """\
# TYPE {0}:spec_decode_num_drafts_total counter
{0}:spec_decode_num_drafts_total{{model_name="m"}} 10
# TYPE {0}:spec_decode_num_draft_tokens_total counter
{0}:spec_decode_num_draft_tokens_total{{model_name="m"}} 30
# TYPE {0}:spec_decode_num_accepted_tokens_total counter
{0}:spec_decode_num_accepted_tokens_total{{model_name="m"}} 12
# TYPE {0}:spec_decode_num_accepted_tokens_per_pos_total counter
{0}:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="0"}} 8
{0}:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="1"}} 4
# TYPE {0}:generation_tokens_total counter
{0}:generation_tokens_total{{model_name="m"}} 99
"""


@pytest.mark.parametrize("prefix", ["freewheel", "vllm"])
def test_draft_counts_are_read_under_either_prefix(prefix: str) -> None:
    counts = read_counts(PAGE.format(prefix))
    assert (counts.rounds, counts.drafted, counts.accepted) == (10, 30, 12)
    found = draft_summary(counts.since(DraftCounts(by_place=Counter({0: 3}))))
    assert found["spec_decode_per_position_acceptance_rates"] == [0.5, 0.4]
    assert found["spec_decode_acceptance_length"] == pytest.approx(2.2)
    assert found["spec_decode_acceptance_rate"] == pytest.approx(40.0)
    assert draft_summary(None) == draft_summary(DraftCounts()) == {}


def test_a_summary_follows_from_its_replies() -> None:
    replies = [
        Reply(0.0, 0.1, 0.5, [0.2, 0.2], input_tokens=3, output_tokens=5, text="x"),
        Reply(0.4, 0.3, 0.3, [], input_tokens=2, output_tokens=1, text="y"),
        Reply(0.0, error="status 429: full"),
    ]
    found = served_summary(
        Load(url="http://x"), MODEL, LoadRun(2.0, replies, None), read_goals(["ttft:200"])
    )
    assert (found["completed"], found["failed"]) == (2, 1)
    assert found["errors"] == {"status 429: full": 1}
    assert found["output_throughput"] == 3.0 and found["total_token_throughput"] == 5.5
    assert found["mean_ttft_ms"] == pytest.approx(200) and found["mean_tpot_ms"] == pytest.approx(
        100
    )
    assert found["mean_itl_ms"] == pytest.approx(200) and found["mean_e2el_ms"] == pytest.approx(
        400
    )
    assert found["request_goodput"] == 0.5
    assert found["max_concurrent_requests"] == most_at_once(replies[:2]) == 2


def test_a_goal_without_a_number_is_refused() -> None:
    for text in ("ttft", "ttft:x", "ttft:0", "itl:3"):
        with pytest.raises(ConfigError, match="goodput"):
            read_goals([text])
