# SPDX-License-Identifier: Apache-2.0
"""Tables on terminals: whole in one line where there is room, and whole in several where not."""

from __future__ import annotations

import pytest

from freewheel.cli import bench, bench_decode, bench_kernels
from freewheel.cli.columns import Column, Columns

TABLES = {
    "offline": (bench.COLUMNS, "accepted by position"),
    "decode": (bench_decode.COLUMNS, ""),
    "kernels": (bench_kernels.COLUMNS, "peers"),
}


@pytest.mark.parametrize("room", [60, 80, 120])
@pytest.mark.parametrize("name", TABLES)
def test_rows_fit_the_terminal_and_lose_nothing(name: str, room: int) -> None:
    columns, last = TABLES[name]
    cells = [f"c{place}" for place in range(len(columns))]
    narrow = Columns(columns, last, room)
    head, row = narrow.head().split("\n"), narrow.row(cells, "1/2").split("\n")
    assert all(len(line) <= room for line in (*head, *row))
    assert " ".join(head).split() == " ".join([*(one for one, _ in columns), last]).split()
    assert " ".join(row).split() == [*cells, "1/2"]
    # each cell ends below its heading
    for above, below, cell in zip(_ends(head, columns), _ends(row, cells), cells, strict=True):
        assert above == below, cell


def _ends(lines: list[str], names: list[str] | tuple[Column, ...]) -> list[tuple[int, int]]:
    """Line and column in which each name ends, in order."""
    found: list[tuple[int, int]] = []
    line = place = 0
    for one in names:
        text = one if isinstance(one, str) else one[0]
        while text not in lines[line][place:]:
            line, place = line + 1, 0
        place = lines[line].index(text, place) + len(text)
        found.append((line, place))
    return found


def test_what_is_piped_has_a_line_a_row() -> None:
    columns, last = TABLES["offline"]
    wide = Columns(columns, last)
    assert "\n" not in wide.head() + wide.row(["x"] * len(columns), "1/2 " * 40)
