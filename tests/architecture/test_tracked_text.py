# SPDX-License-Identifier: Apache-2.0
"""Files of the repository name no machine, and no host that packages come from."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Written in pieces, so that this file does not contain what it looks for.
MACHINE_PATH = re.compile(r"(?<![\w.])/" + r"(?:work|root|home/\w+|Users/\w+|opt/wheels)/")
OUTSIDE_PATH = re.compile(r"\.\./" + r"(?:shared|work|reference)\b")
PACKAGE_HOST = re.compile(
    r"\b(?:py" + r"pi\.org|pythonhosted\.org|npm" + r"js\.(?:org|com)|download\.py" + r"torch\.org)"
)
UNPUBLISHED = re.compile(r"""install ['"]?free""" + r"wheel\b")
PATTERNS = {
    "path of one machine": MACHINE_PATH,
    "path outside the repository": OUTSIDE_PATH,
    "host of a package registry": PACKAGE_HOST,
    "package that no registry has": UNPUBLISHED,
}
NOT_OURS = {".git", ".venv", "build", "dist", "__pycache__", "runs"}


def repository_files() -> list[Path]:
    """Tracked files and those that would be; without git, all but environments and builds."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / name for name in listed.stdout.decode("utf-8").split("\0") if name]
        return [path for path in paths if path.is_file()]
    return [
        path
        for path in sorted(ROOT.rglob("*"))
        if path.is_file() and not NOT_OURS & set(path.relative_to(ROOT).parts)
    ]


def text_of(path: Path) -> str | None:
    """The file's text, or None for a binary one."""
    content = path.read_bytes()
    return None if b"\0" in content[:8192] else content.decode("utf-8")


def foreign_words(text: str) -> list[str]:
    return [
        f"{number}: {name}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for name, pattern in PATTERNS.items()
        for match in pattern.finditer(line)
    ]


def test_no_file_names_a_machine_or_a_registry() -> None:
    files = repository_files()
    assert ROOT / "pyproject.toml" in files
    found = [
        f"{path.relative_to(ROOT)}:{word}"
        for path in files
        for word in foreign_words(text_of(path) or "")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "see /" + "work/main/src",
        'open("/' + 'root/.cache")',
        "data in /" + "home/ann/corpus",
        "as ../" + "shared/design.md says",
        "pip install --index-url https://py" + "pi.org/simple",
        "https://download.py" + "torch.org/whl/cpu",
        "pip install 'free" + "wheel[server]'",
    ],
)
def test_a_planted_word_is_found(text: str) -> None:
    assert foreign_words(text)


@pytest.mark.parametrize(
    "text",
    ["a network/root/branch", "frame" + "work/main", "tests/work/", "https://pytorch.org/docs"],
)
def test_ordinary_text_is_not_reported(text: str) -> None:
    assert not foreign_words(text)
