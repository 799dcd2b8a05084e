# SPDX-License-Identifier: Apache-2.0
"""Every option of a command with many stands under a heading, or among the most used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from freewheel.cli.app import app
from freewheel.cli.panels import FIRST, MANY, PANELS, panel_of


def commands(group: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, (*names, name))
        else:
            yield (*names, name), one


COMMANDS = dict(commands(get_command(app)))


def options_of(command: Any) -> list[str]:
    return [one.name for one in command.params if one.param_type_name == "option"]


LONG = [name for name, command in COMMANDS.items() if len(options_of(command)) >= MANY]


@pytest.mark.parametrize("name", LONG, ids=" ".join)
def test_every_option_has_its_place(name: tuple[str, ...]) -> None:
    assert [
        one for one in options_of(COMMANDS[name]) if one not in FIRST and not panel_of(one)
    ] == []
    assert options_of(COMMANDS[name])[0] in FIRST


def test_no_option_stands_twice_and_none_is_named_that_there_is_not() -> None:
    named = [*FIRST, *(name for names in PANELS.values() for name in names.split())]
    known = {option for command in COMMANDS.values() for option in options_of(command)}
    assert sorted(set(named)) == sorted(named)
    assert set(named) <= known
    assert {"generate", "serve"} <= {name[0] for name in LONG}


@pytest.mark.parametrize(
    ("line", "titles"),
    [
        (["generate"], ["Sampling", "Structured output", "Memory and cache", "Many GPUs"]),
        (["serve"], ["Model and device", "Batches and rounds", "Many GPUs", "Server", "Faults"]),
        (["bench", "serve"], ["Sampling", "Workload"]),
    ],
)
def test_help_has_its_headings_in_order(line: list[str], titles: list[str]) -> None:
    said = CliRunner().invoke(app, [*line, "--help"], env={"COLUMNS": "120", "TERM": "dumb"}).output
    places = [said.index(f" {title} ") for title in titles]
    assert places == sorted(places)
    assert said.index("--help") < places[0]


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_no_sentence_of_a_help_is_broken(name: tuple[str, ...]) -> None:
    paragraphs = COMMANDS[name].help.split("\n\n")
    assert all(paragraph and "\n" not in paragraph.strip() for paragraph in paragraphs)
