# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/moving.md, from those that the package answers from.

`python -m tests.program.moving_tables` writes them into the page, each under its heading.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from freewheel.spec.elsewhere import Row, Section, deployment, hints, requests, service

PAGE = Path(__file__).parents[2] / "docs" / "moving.md"
_TABLE = re.compile(r"(^### ([^\n]+)\n\n)((?:\|[^\n]*\n)+)", re.MULTILINE)

Spelt = Callable[[str], str]


def plain(name: str) -> str:
    return f"`{name}`"


def option(name: str) -> str:
    return f"`--{name.replace('_', '-')}`"


def command(name: str) -> str:
    return f"`freewheel {name}`"


def own_option(name: str) -> str:
    """As it is written: the model stands without an option, one is in Python only, and one that
    is given repeatedly is named once."""
    if name == "model":
        return "the argument"
    return f"`LLM({name}=..)`" if name in hints.PYTHON_ONLY else option(name)


def own_metric(name: str) -> str:
    return f"`freewheel:{name}`"


TABLES: tuple[tuple[Section, Spelt, Spelt], ...] = (
    *((section, option, own_option) for section in hints.SECTIONS),
    (deployment.BENCH, option, option),
    (requests.PARAMS, plain, plain),
    (requests.ARGUMENTS, plain, plain),
    (requests.PROMPTS, plain, plain),
    (requests.FIELDS, plain, plain),
    (service.ADDRESSES, plain, plain),
    (service.METRICS, plain, own_metric),
    (service.ENVIRONMENT, plain, plain),
)


def table(section: Section, theirs: Spelt, ours: Spelt) -> str:
    """In Markdown, a line for each row."""
    lines = ["| vLLM | SGLang | here | |", "|---|---|---|---|"]
    lines += [_line(row, theirs, ours) for row in section[1]]
    return "\n".join(lines) + "\n"


def _line(row: Row, theirs: Spelt, ours: Spelt) -> str:
    named = [" ".join(map(theirs, names.split())) for names in (row.vllm, row.sglang)]
    own = " or ".join(map(ours, row.ours.split())) if row.ours else "none"
    return _cells(*named, own, row.note)


def _cells(*cells: str) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def commands() -> str:
    """Names of commands hold spaces: each row has one of each at most."""
    lines = ["| vLLM | SGLang | here | |", "|---|---|---|---|"]
    for row in service.COMMANDS[1]:
        named = [plain(name) if name else "" for name in (row.vllm, row.sglang)]
        own = command(row.ours) if row.ours else "none"
        lines.append(_cells(*named, own, row.note))
    return "\n".join(lines) + "\n"


def expected() -> dict[str, str]:
    """Tables by their headings."""
    found = {section[0]: table(section, *spelt) for section, *spelt in TABLES}
    return found | {service.COMMANDS[0]: commands()}


def written() -> dict[str, str]:
    """Those that stand on the page."""
    return {title: lines for _, title, lines in _TABLE.findall(PAGE.read_text("utf-8"))}


def write() -> None:
    """Put the tables in their places."""
    tables = expected()
    text = _TABLE.sub(lambda found: found[1] + tables[found[2]], PAGE.read_text("utf-8"))
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    write()
