# SPDX-License-Identifier: Apache-2.0
"""What is to be written here for a name of another engine, said where somebody wrote that name.

The tables are the ones of docs/moving.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from freewheel.spec.elsewhere import deployment, options, requests, service
from freewheel.spec.elsewhere.rows import Names, Row

SECTIONS = (
    *(options.MODEL, options.MEMORY, options.BATCHES, options.DRAFTS),
    *(deployment.GPUS, deployment.SERVER, deployment.LOGS),
)
PYTHON_ONLY = frozenset({"split_scan"})
"""Options of an engine that no command has; whatever else the tables name, `serve` has."""

OPTIONS = Names.of(*SECTIONS)
BENCH = Names.of(deployment.BENCH)
PARAMS = Names.of(requests.PARAMS)
ARGUMENTS = Names.of(requests.ARGUMENTS)
PROMPTS = Names.of(requests.PROMPTS)
FIELDS = Names.of(requests.FIELDS)
ADDRESSES = Names.of(service.ADDRESSES)

_LIKENESS = 0.78
"""Of a name that was meant: less finds one that only shares a word."""
_MORE = " (docs/moving.md and docs/api.md say more)"
_LISTED = "docs/api.md lists them"
_REQUESTS = {"requests": "num_prompts", "num_prompts": "requests"}
"""Our own two words for how many requests a benchmark makes."""


def near(name: str, known: Iterable[str]) -> str | None:
    """The name that is most like a misspelt one; None if none is."""
    close = get_close_matches(name, list(known), n=1, cutoff=_LIKENESS)
    return close[0] if close else None


def hint(name: str, known: Iterable[str]) -> str:
    """What somebody who writes `name` as an engine's option may have meant, as the end of a
    sentence. `known`: the options that there are."""
    there, row = list(known), OPTIONS.find(name)
    if row is None:
        meant = near(name, there)
        return _LISTED if meant is None else f"use {meant}{_MORE}"
    if not row.ours:
        return row.note
    if row.ours in there:
        return row.advice(row.ours) + _MORE
    return _of_server(row.ours)


def option_hint(option: str, known: Mapping[str, str], standing: Mapping[str, str]) -> str:
    """The same for `--option` of a command; empty if nothing is known of it.

    `known`: its options as they are written, by their names and by the fields that they stand for;
    `standing`: arguments that stand without a name, and how they are given.
    """
    name = option.lstrip("-").split("=", 1)[0].replace("-", "_")
    meant = _REQUESTS.get(name, "")
    if meant in known:
        return f"use {known[meant]}"
    tables = (BENCH, OPTIONS, PARAMS) if "url" in known else (OPTIONS, PARAMS)
    found = [(table, table.find(one)) for table in tables for one in _switched(name)]
    rows = [(table, row) for table, row in found if row is not None]
    for _, row in rows:
        if row.ours in standing:
            return _stands(row.ours, standing)
        if row.ours in known:
            return row.advice(known[row.ours])
    if rows:
        return next((row.note for _, row in rows if not row.ours), _elsewhere(*rows[0]))
    meant = near(name, [*known, *standing]) or ""
    if meant in standing:
        return _stands(meant, standing)
    return f"use {known[meant]}" if meant else ""


def _stands(name: str, standing: Mapping[str, str]) -> str:
    return f"the {name} stands without an option: {standing[name]}"


def _elsewhere(table: Names, row: Row) -> str:
    """Of a name whose option another command has, or none."""
    if table is PARAMS:
        return f"a request has it: {row.ours}"
    if row.ours in PYTHON_ONLY:
        return f"in Python only: LLM({row.ours}=..)"
    return _of_server(row.ours)


def _of_server(name: str) -> str:
    return f"a server's option: freewheel serve {_dashed(name)}"


def _switched(name: str) -> list[str]:
    """The name of an option, and of the one that it switches off."""
    return [name, name.removeprefix("no_")] if name.startswith("no_") else [name]


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def params_hint(name: str, known: Iterable[str]) -> str:
    """The same for a field of SamplingParams."""
    row = PARAMS.find(name)
    if row is not None:
        return f"use {row.ours}" if row.ours else row.note
    meant = near(name, known)
    return _LISTED if meant is None else f"use {meant}"


def argument_hint(name: str, known: Iterable[str], wishes: Iterable[str]) -> str:
    """The same for an argument of a method of LLM. `wishes`: the fields of SamplingParams."""
    row, there = ARGUMENTS.find(name), list(known)
    if row is not None and not row.ours:
        return row.note
    ours = [] if row is None else row.ours.split()
    meant = next((one for one in ours if one in there), None)
    if meant is None and name in wishes:
        return f"use params=SamplingParams({name}=..)"
    meant = meant or near(name, there)
    return _LISTED if meant is None else f"use {meant}"


def prompt_hint(name: str, known: Iterable[str]) -> str:
    """The same for a part of a prompt that is a mapping."""
    row, there = PROMPTS.find(name), list(known)
    if row is not None:
        return f"use {row.ours}" if row.ours else row.note
    meant = near(name, there)
    return f"it has one of {' and '.join(there[:2])}" if meant is None else f"use {meant}"


def address_hint(path: str, known: Iterable[str] = ()) -> str:
    """What has the place of another server's address here, or which of those that are `known` was
    meant; empty if nothing is known of it."""
    row, there = ADDRESSES.find(path), list(known)
    if row is not None:
        return f"{row.ours} {row.note}" if row.ours else row.note
    rest = path.rstrip("/")
    while rest.startswith("/v1/v1/"):
        rest = rest.removeprefix("/v1")
    for meant in (rest, f"/v1{rest}", rest.removeprefix("/v1")):
        if meant in there:
            return f"use {meant}"
    meant = near(path, there)
    return f"use {meant}" if meant else ""


def field_hint(name: str, known: Iterable[str] = (), inside: str = "") -> str:
    """The same for a field of a request over HTTP, which may have those that are `known`; empty if
    nothing is known of it. `inside`: the field that it stands in, if any."""
    place = [part for part in (*inside.split("."), name) if not part.isdigit()]
    if (meant := requests.PLACES.get(".".join(place))) is not None:
        return f"use {meant}"
    row, there = FIELDS.find(name), list(known)
    if "input_ids" in there and name in requests.NATIVE:
        return f"use {requests.NATIVE[name]}"
    ours = [] if row is None else [one for one in row.ours.split() if one in there or not there]
    if row is not None and (ours or not row.ours):
        return f"use {' or '.join(ours)}" if ours else row.note
    meant = near(name, there)
    return f"use {meant}" if meant else ""
