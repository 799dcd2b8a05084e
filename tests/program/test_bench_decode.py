# SPDX-License-Identifier: Apache-2.0
"""`freewheel bench decode`: acceptance is what was asked, and the counts are the rounds' own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from freewheel.bench import (
    DecodeBench,
    Timeline,
    bench_decode,
    draw_picture,
    read_timeline,
    write_timeline,
)
from freewheel.bench.decode import between_rounds
from freewheel.bench.picture import tick
from freewheel.cli import main
from freewheel.decode.forced import SCALE, force_agreement
from freewheel.engine import SteadyDecode
from freewheel.errors import ConfigError
from freewheel.models.deepseek_v32 import DeepseekV32
from freewheel.runtime.clock import Span
from freewheel.runtime.tracing import read_trace

Command = Callable[..., SimpleNamespace]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs `freewheel bench`; gives its exit code and what it wrote."""

    def run(*args: object) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["freewheel", "bench", *map(str, args)])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


def small(folder: Path, **options: Any) -> DecodeBench:
    return DecodeBench(
        model=str(folder), **({"batches": (2,), "context": 40, "rounds": 9} | options)
    )


@pytest.mark.parametrize(
    ("name", "load_format"), [("t32", "safetensors"), ("tg", "dummy"), ("t4", "dummy")]
)
def test_a_round_decides_as_many_tokens_as_asked(
    folders: dict[str, Path], name: str, load_format: str
) -> None:
    for accept in (1.0, 2.4):
        plan = small(folders[name], accept=accept, rounds=10, batches=(1, 3), context=20)
        config = plan.config(device="cpu", load_format=load_format)
        for run in bench_decode(plan, config):
            assert run.run.tokens == 10 * accept * run.batch
            assert run.late_captures == run.late_kernels == 0


def test_an_odd_mean_is_kept_in_the_long_run_and_no_round_exceeds_its_drafts() -> None:
    """Over all positions, as the rule alone decides them."""
    tokens = torch.zeros(1, 3000, dtype=torch.int32)
    positions = torch.arange(3000, dtype=torch.int32)[None]
    for mean in (1.0, 1.333, 2.719, 3.5, 4.0):
        logits = torch.zeros(1, 3000, 2)
        force_agreement(logits, tokens, positions, round(mean * SCALE))
        rejected = (logits[0, :-1, 0] == -torch.inf).nonzero()[:, 0] + 1
        assert (logits[0, :-1, 0].isinf()).all() and not logits[0, -1].isinf().any()
        lengths = rejected.diff()
        assert int(lengths.max()) <= -(-mean // 1)
        assert abs(float(lengths.double().mean()) - mean) < 0.01


def test_without_a_rate_the_model_s_own_drafts_count(folders: dict[str, Path]) -> None:
    """PERM drafts right always, whatever its caches hold."""
    plan = small(folders["perm"])
    (run,) = bench_decode(plan, plan.config(device="cpu", dtype="float64"))
    assert run.run.tokens == 9 * 2 * 4


def test_the_report_has_one_letter_each_way_one_launch_and_no_read(
    command: Command, folders: dict[str, Path]
) -> None:
    args = ("--batch", "1,2", "--context", 30, "--accept", "3.0", "--rounds", 6, "--device", "cpu")
    ran = command("decode", "--model", folders["t32"], *args, "--json")
    assert ran.code == 0, ran.err
    report = json.loads(ran.out)
    assert [run["batch"] for run in report["runs"]] == [1, 2]
    for run in report["runs"]:
        for name in ("uploads_per_round", "downloads_per_round", "graph_launches_per_round"):
            assert run[name] == 1
        assert run["host_reads"] == run["late_captures"] == run["late_kernels"] == 0
        assert run["tokens_per_round"] == 3.0
        assert run["tokens_per_second"] == pytest.approx(3e3 * run["batch"] / run["ms_per_round"])
        assert run["device_ms_per_round"] > 0 and 0 < run["busy_share"] <= 1
        assert run["kernels_per_round"] > 100
    table = command("decode", "--model", folders["t32"], *args)
    assert [line.split()[0] for line in table.out.splitlines()[-3:]] == ["batch", "1", "2"]


def test_a_planted_read_is_counted(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = small(folders["t32"])
    steady = SteadyDecode(plan.config(device="cpu", graph="eager"), (2,), None, plan.longest_run)
    steady.capture(2)
    forward = DeepseekV32.forward

    def reading(self: Any, view: Any, cache: Any) -> Any:
        view.kv_lens.max().item()
        return forward(self, view, cache)

    monkeypatch.setattr(DeepseekV32, "forward", reading)
    assert steady.count(2, 5).host_reads == 5


def test_a_slow_host_sleeps_in_every_turn(folders: dict[str, Path]) -> None:
    plan = small(folders["perm"], slow_hosts=(0.0, 3.0))
    quick, run = bench_decode(plan, plan.config(device="cpu"))
    assert not any(span.name == "sleep" for span in quick.run.host)
    sleeps = [span for span in run.run.host if span.name == "sleep"]
    assert len(sleeps) == plan.rounds
    assert all(span.seconds >= 0.003 for span in sleeps)
    assert run.run.seconds >= 0.003 * plan.rounds


def test_a_trace_holds_every_round_and_every_act_of_the_host(
    command: Command, folders: dict[str, Path], tmp_path: Path
) -> None:
    file, picture = tmp_path / "trace.json", tmp_path / "round.svg"
    args = ("--batch", "1,2", "--context", 30, "--rounds", 5, "--device", "cpu", "--slow-host", 1)
    ran = command("decode", "--model", folders["t32"], *args, "--timeline", file)
    assert ran.code == 0, ran.err
    body = json.loads(file.read_text())
    lanes = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in body["traceEvents"]
        if e["name"] == "thread_name"
    }
    spans = [e for e in body["traceEvents"] if e["ph"] == "X"]
    rounds = [e["name"] for e in spans if lanes[e["pid"], e["tid"]] == "device"]
    assert rounds == [f"round {n}" for n in range(5)] * 2
    names = [e["name"] for e in spans if lanes[e["pid"], e["tid"]] == "host"]
    assert [n for n in names if n.startswith("launch")] == [f"launch {n}" for n in range(5)] * 2
    acts = {name.rstrip("0123456789 ") for name in names}
    assert acts == {"plan", "launch", "sleep", "await letter", "read letter"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    assert command("picture", picture, "--timeline", file).code == 0
    check_picture(picture.read_text(encoding="utf-8"))


def check_picture(text: str) -> None:
    """It is XML; a round of the device is drawn, with what the host did meanwhile."""
    root = ElementTree.fromstring(text)
    said = [
        element.text or "" for element in root.iter() if element.tag.endswith(("text", "title"))
    ]
    assert any(line.startswith("round ") for line in said)
    assert {"host", "device", "launch", "ms", "0"} <= set(said)


def test_a_picture_can_be_drawn_of_rounds_run_now(
    command: Command, folders: dict[str, Path], tmp_path: Path
) -> None:
    picture = tmp_path / "round.svg"
    ran = command("picture", picture, "--model", folders["perm"], "--context", 20)
    assert ran.code == 0, ran.err
    check_picture(picture.read_text(encoding="utf-8"))


def test_ticks_are_round_numbers() -> None:
    assert [tick(least) for least in (0.9, 1.0, 1.1, 2.4, 7, 0.03)] == [1, 1, 2, 5, 10, 0.05]


def test_times_survive_a_trace(tmp_path: Path) -> None:
    host = (Span("plan", 10.0, 10.001), Span("launch", 10.001, 10.004))
    device = (Span("round 0", 10.002, 10.009), Span("round 1", 10.01, 10.02))
    write_timeline(tmp_path / "t.json", {"one": Timeline(host, device), "two": Timeline((), ())})
    again = read_timeline(tmp_path / "t.json")
    for before, after in zip((*host, *device), (*again.host, *again.device), strict=True):
        assert before.name == after.name
        assert after.begin == pytest.approx(before.begin - 10)
        assert after.seconds == pytest.approx(before.seconds)
    assert between_rounds(device) == pytest.approx(1 / 18)
    with pytest.raises(ConfigError, match="no round"):
        draw_picture(Timeline((), ()), "nothing")


def test_the_profiler_s_events_are_told_apart() -> None:
    seen = [
        (Span("cudaGraphLaunch", 0, 1), False),
        (Span("cudaStreamSynchronize", 1, 2), False),
        (Span("aten::_local_scalar_dense", 1, 2), False),
        (Span("aten::add", 1, 2), False),
        (Span("_best_of_block", 2, 4), True),
        (Span("gemm", 3, 5), True),
        (Span("Memcpy HtoD (Pinned -> Device)", 5, 6), True),
        (Span("Memcpy DtoH (Device -> Pinned)", 6, 7), True),
        (Span("Memset (Device)", 6, 7), True),
    ]
    trace = read_trace(seen)
    assert (trace.uploads, trace.downloads, trace.graph_launches, trace.waits) == (1, 1, 1, 2)
    assert [span.name for span in trace.kernels] == ["_best_of_block", "gemm"]
    assert trace.kernel_seconds == 3


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--batch", "0"), "--batch:"),
        (("--batch", "x"), "batch"),
        (("--context", "0"), "context"),
        (("--context", "100000"), "--context:"),
        (("--rounds", "0"), "rounds"),
        (("--accept", "4.5"), "accept"),
        (("--accept", "0.5"), "accept"),
        (("--accept", "2", "--speculate", "0"), "accept"),
        (("--accept", "2", "--drafter", "lookup"), "accept"),
        (("--slow-host", "-1"), "--slow-host:"),
        (("--slow-host", "0,nan"), "--slow-host:"),
        (("--slow-host", "some"), "--slow-host:"),
        (("--load-format", "pickle"), "--load-format:"),
        (("--run-ahead", "9"), "--run-ahead:"),
        (("--graph", "banana"), "graph"),
    ],
)
def test_bad_values_exit_2_and_name_the_option(
    command: Command, folders: dict[str, Path], options: tuple[str, ...], names: str
) -> None:
    ran = command("decode", "--model", folders["t32"], "--context", 30, "--rounds", 3, *options)
    assert ran.code == 2
    assert names in ran.err and not ran.out


def test_a_picture_of_nothing_is_refused(command: Command, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}", encoding="utf-8")
    for args, names in (
        (("x.png",), "svg"),
        (("x.svg", "--timeline", tmp_path / "none.json"), "none.json"),
        (("x.svg", "--timeline", tmp_path / "t.json"), "timeline"),
    ):
        ran = command("picture", *args)
        assert ran.code == 2 and names in ran.err


def test_the_old_form_still_serves_requests(command: Command, folders: dict[str, Path]) -> None:
    args = ("--batch", "1", "--speculate", "0", "--max-tokens", 3, "--requests", 1, "--json")
    short = json.loads(command(folders["perm"], *args).out)
    long = json.loads(command("offline", folders["perm"], *args).out)
    first = json.loads(command(*args, folders["perm"]).out)
    assert short["workload"] == long["workload"] == first["workload"]
    assert short["runs"][0]["total_output_tokens"] == 3
