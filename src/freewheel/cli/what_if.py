# SPDX-License-Identifier: Apache-2.0
"""Several values of an option of `freewheel simulate`, and a line of figures for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import product
from typing import Any

from freewheel.errors import ConfigError

VARIED: dict[str, type[int] | type[float] | type[str]] = {
    "pages": str,
    "cache_bytes": int,
    "page_size": int,
    "max_batch": int,
    "prefill_batch": int,
    "chunk": int,
    "run_ahead": int,
    "speculate": int,
    "prefill_share": float,
    "fixed_ms": float,
    "token_us": float,
    "key_ns": float,
    "seed": int,
}
"""Options that may have several values, and what these are."""

TIMES = frozenset({"tp", "dp", "ep", "gpus", "device"})
"""What changes how long a round takes, of which a scheduler knows nothing."""

MOST = 1000
"""Combinations of one command."""

FIGURES = (
    ("served", lambda run: f"{run['served']:,}"),
    ("found", lambda run: f"{run['hit_rate']:.1%}"),
    ("ttft p50", lambda run: _time(run, "ttft_ms", "p50")),
    ("p99, ms", lambda run: _time(run, "ttft_ms", "p99")),
    ("tpot p50", lambda run: _time(run, "tpot_ms", "p50")),
    ("p99, ms", lambda run: _time(run, "tpot_ms", "p99")),
    ("tokens/s", lambda run: f"{run['answer_tokens_per_second']:,.1f}"),
    ("busy", lambda run: f"{run['device_busy_share']:.0%}"),
    ("preempted", lambda run: f"{run['preemptions']:,}"),
)
"""Columns behind those of what is varied."""


def combinations(asked: Sequence[str], given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of the values in `name=value,value` texts; one of nothing without any.

    Raises ConfigError for a name or a value that is none, a name that comes twice, more than MOST
    combinations, and drafts for which `given` has no share that is accepted.
    """
    values = dict[str, list[Any]]()
    for text in asked:
        name, equals, listed = text.partition("=")
        name = name.strip().replace("-", "_")
        shown = name.replace("_", "-")
        if name not in VARIED:
            raise ConfigError(f"vary: {_unknown(shown)}")
        if not equals:
            raise ConfigError(f"vary: {shown} has no values; write {shown}=.. with commas between")
        if name in values:
            raise ConfigError(f"vary: {shown} comes twice; give all its values at once")
        values[name] = [_value(name, one) for one in listed.split(",")]
    count = 1
    for one in values.values():
        count *= len(one)
    if count > MOST:
        raise ConfigError(f"vary: makes {count} combinations; at most {MOST}")
    shares = len([one for one in given["accept"].split(",") if one.strip()])
    if max(values.get("speculate", [0])) > shares:
        raise ConfigError(f"vary: speculate goes beyond the {shares} shares of accept")
    return (dict(zip(values, one, strict=True)) for one in product(*values.values()))


def table_row(varied: Mapping[str, Any], run: Mapping[str, Any], first: bool) -> str:
    """A line of figures; with `first`, below a line that says what they are."""
    names = [*(name.replace("_", "-") for name in varied), *(name for name, _ in FIGURES)]
    cells = [*map(str, varied.values()), *(shown(run) for _, shown in FIGURES)]
    line = "  ".join(f"{cell:>{_width(name)}}" for name, cell in zip(names, cells, strict=True))
    if not first:
        return line
    return "  ".join(f"{name:>{_width(name)}}" for name in names) + "\n" + line


def _width(name: str) -> int:
    return max(9, len(name))


def _time(run: Mapping[str, Any], name: str, key: str) -> str:
    times = run[name]
    return "-" if times is None else f"{times[key]:,.1f}"


def _unknown(name: str) -> str:
    """What to say of a name that is none."""
    if name in TIMES:
        return (
            f"{name} changes the time of a round, which is given here and not foretold: run once "
            f"for each {name} with the --costs that `freewheel bench decode --json` measured there"
        )
    names = [one.replace("_", "-") for one in VARIED]
    meant = [one for one in names if name and one.startswith(name)] or get_close_matches(
        name, names
    )
    rather = f"; did you mean {' or '.join(meant)}?" if meant else ""
    return f"{name!r} is none of {', '.join(names)}{rather}"


def _value(name: str, text: str) -> Any:
    try:
        return VARIED[name](text.strip())
    except ValueError as error:
        raise ConfigError(f"vary: {name.replace('_', '-')} takes numbers, got {text!r}") from error
