# SPDX-License-Identifier: Apache-2.0
"""What the README promises exists: its two commands, its example's names, its verbs."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@cache
def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@cache
def readme() -> str:
    return (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    """The README's fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", readme(), re.MULTILINE | re.DOTALL)


def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text("utf-8")
    return set(re.findall(r"^([a-z][\w-]*):", text, re.MULTILINE))


def readme_verbs() -> list[str]:
    commands = re.findall(r"^freewheel ([a-z]+)", "\n".join(blocks("sh")), re.MULTILINE)
    return sorted(set(commands))


def test_the_two_commands_come_first_and_exist() -> None:
    commands = re.findall(r"^make ([\w-]+)", "\n".join(blocks("sh")), re.MULTILINE)
    assert commands[:2] == ["demo", "test"]
    assert set(commands) <= make_targets()


def test_every_make_target_of_the_contributors_page_exists() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert set(re.findall(r"`make ([\w-]+)", page)) <= make_targets()


def test_the_continuous_check_runs_the_readme_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text("utf-8").splitlines()
    assert "set -euo pipefail" in lines
    assert lines[-1] == "make test"
    assert "make lint" in lines


def test_the_console_script_resolves() -> None:
    scripts = project()["scripts"]
    assert scripts == {"freewheel": "freewheel.cli:main"}
    module, _, name = "freewheel.cli:main".partition(":")
    assert callable(vars(importlib.import_module(module))[name])


def test_the_readme_examples_use_names_that_exist() -> None:
    examples = blocks("python")
    assert examples
    package = importlib.import_module("freewheel")
    for example in examples:
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and node.module == "freewheel":
                for alias in node.names:
                    assert hasattr(package, alias.name), alias.name


@pytest.mark.parametrize("verb", readme_verbs())
def test_a_verb_of_the_readme_answers_help(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = vars(importlib.import_module("freewheel.cli"))["main"]
    monkeypatch.setattr(sys, "argv", ["freewheel", verb, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    assert f"freewheel {verb}" in capsys.readouterr().out


def test_paths_in_the_readme_exist() -> None:
    paths = re.findall(r"[`(]((?:src|docs|tests|train|benchmarks)/[\w./-]*)[`)]", readme())
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_checkpoints_ship_with_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "src/freewheel/checkpoints/**" in wheel["artifacts"]
    assert list((ROOT / "src" / "freewheel" / "checkpoints" / "demo").glob("*.safetensors"))
