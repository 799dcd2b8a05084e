# SPDX-License-Identifier: Apache-2.0
"""`freewheel simulate --vary`: a replay for each combination, the same as one by itself."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from freewheel.cli.app import app
from freewheel.cli.what_if import MOST, combinations
from freewheel.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
GIVEN = {"accept": "0.8,0.6,0.45"}
MADE = ("--make", "conversations=4,turns=2,seconds=4", "--seed", "3", "--max-batch", "4")


def simulate(trace: Path, *options: str) -> dict[str, Any]:
    trace.unlink(missing_ok=True)
    done = CliRunner().invoke(app, ["simulate", str(trace), *MADE, *options, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_every_combination_comes_once_and_in_order() -> None:
    found = list(combinations(["pages=500,unlimited", "max-batch=8, 16"], GIVEN))
    assert found == [
        {"pages": pages, "max_batch": rows} for pages in ("500", "unlimited") for rows in (8, 16)
    ]
    assert list(combinations([], GIVEN)) == [{}]


@pytest.mark.parametrize(
    "asked",
    [
        ["rows=1"], ["pages"], ["max-batch=two"], ["max-batch=1", "max_batch=2"],
        ["speculate=0,4"], [f"seed={','.join(map(str, range(MOST + 1)))}"],
    ],
)  # fmt: skip
def test_what_cannot_be_varied_is_refused(asked: list[str]) -> None:
    with pytest.raises(ConfigError, match="vary"):
        combinations(asked, GIVEN)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["page=3"], r"vary: 'page' is none of pages, .*; did you mean pages or page-size\?"),
        (["max-bacth=3"], r"; did you mean max-batch\?"),
        (["cows=3"], "prefill-share, fixed-ms, .*seed$"),
        (["tp=1,8"], "tp changes the time of a round, which is given .* --costs"),
        (["pages"], "pages has no values; write pages=.."),
        (["max-batch=1", "max_batch=2"], "max-batch comes twice"),
    ],
)
def test_it_says_what_is_wrong_with_what_is_varied(asked: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        combinations(asked, GIVEN)


@pytest.mark.parametrize("link", [False, True])
def test_no_trace_is_written_over(tmp_path: Path, link: bool) -> None:
    trace = tmp_path / "trace"
    if link:
        trace.symlink_to(tmp_path / "elsewhere")
    else:
        trace.write_text("mine")
    done = CliRunner().invoke(app, ["simulate", str(trace), *MADE], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert not (tmp_path / "elsewhere").exists() and (link or trace.read_text() == "mine")


def test_each_run_is_what_the_command_says_of_it_alone(tmp_path: Path) -> None:
    both = simulate(tmp_path / "trace", "--vary", "speculate=0,3", "--vary", "pages=60,unlimited")
    assert len(both["runs"]) == 4
    for run in both["runs"]:
        varied = run.pop("varied")
        options = (f"--{name}={value}" for name, value in varied.items())
        alone = simulate(tmp_path / "trace", *options)
        for one in (run, alone):
            del one["replayed_in_seconds"], one["replayed_requests_per_second"]
        assert run == {name: alone[name] for name in run}


def test_drafts_that_are_varied_change_the_figures(tmp_path: Path) -> None:
    options = ("--vary", "speculate=0,1,2,3", "--pages", "unlimited")
    times = [run["tpot_ms"]["p50"] for run in simulate(tmp_path / "trace", *options)["runs"]]
    assert times[0] > 8 and all(fewer > 1.1 * more for fewer, more in pairwise(times))


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.json")), ids=lambda file: file.stem)
@pytest.mark.parametrize("rows", [1, 64])
def test_a_cache_that_nobody_gave_holds_requests_of_every_model(
    tmp_path: Path, file: Path, rows: int
) -> None:
    found = simulate(tmp_path / "trace", "--model", str(file), "--max-batch", str(rows))
    assert (found["served"], found["refused"]) == (found["requests"], {})


def test_a_cache_of_a_model_that_needs_no_more_has_what_it_is_given(tmp_path: Path) -> None:
    plain, same = (
        simulate(tmp_path / "trace", *given) for given in ((), ("--cache-bytes=1073741824",))
    )
    assert plain["pages"] == same["pages"]


def test_a_line_stands_for_each_run(tmp_path: Path) -> None:
    asked = ["simulate", str(tmp_path / "trace"), *MADE, "--vary", "max-batch=1,4"]
    done = CliRunner().invoke(app, asked)
    names, *rows = done.stdout.splitlines()
    assert names.split()[:3] == ["max-batch", "served", "found"]
    assert [row.split()[0] for row in rows] == ["1", "4"]
