# SPDX-License-Identifier: Apache-2.0
"""One round, drawn: what the host does while the device runs it.

SVG, because a picture of labelled bars is text: it needs no library, stays sharp at any size, and
its labels can be searched and read aloud.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from freewheel.bench.timeline import Timeline
from freewheel.engine import Span
from freewheel.errors import ConfigError

WIDTH, LEFT, LANE, GAP, TOP = 1000, 90, 44, 18, 56
"""Of the picture in its own units: whole width, margin for names, lane height, and spaces."""

COLOURS = {
    "plan": "#5b8def",
    "launch": "#f2a33c",
    "await letter": "#d9dde3",
    "read letter": "#59b38c",
    "sleep": "#c9a0dc",
}
ROUND, OTHER = "#3d4756", "#7a8699"
NARROW = 6
"""Pixels of a letter: a bar too narrow for its name goes without."""


def draw_picture(timeline: Timeline, title: str) -> str:
    """An SVG document: a device round of middling length, and its neighbours' ends.

    Raises ConfigError if the timeline holds no round.
    """
    if not timeline.device:
        raise ConfigError("timeline: holds no round to draw")
    chosen = middling(timeline.device)
    margin = 0.12 * chosen.seconds
    begin, end = chosen.begin - margin, chosen.end + margin
    lanes = {"host": timeline.host, "device": timeline.device}
    height = TOP + len(lanes) * (LANE + GAP) + 46
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" fill="#1c2430">{escape(title)}</text>',
        f'<text x="{LEFT}" y="42" fill="{OTHER}">{chosen.name}: {1000 * chosen.seconds:.3f} ms on '
        "the device</text>",
    ]
    for index, (name, spans) in enumerate(lanes.items()):
        body.extend(_lane(name, spans, begin, end, TOP + index * (LANE + GAP)))
    bottom = TOP + len(lanes) * (LANE + GAP)
    body.extend(_axis(chosen.begin, begin, end, bottom))
    body.extend(_legend({act(span) for span in timeline.host}, bottom))
    return "\n".join([*body, "</svg>"]) + "\n"


def middling(rounds: Sequence[Span]) -> Span:
    """The round of median length, of those with neighbours on both sides if there are any."""
    inner = list(rounds[1:-1]) or list(rounds)
    return sorted(inner, key=lambda span: span.seconds)[len(inner) // 2]


def _lane(name: str, spans: Sequence[Span], begin: float, end: float, top: float) -> list[str]:
    """The bars of one lane that lie within `begin` to `end`, cut where they reach out of it."""
    scale = (WIDTH - LEFT - 20) / (end - begin)
    rows = [
        f'<text x="{LEFT - 10}" y="{top + LANE / 2 + 4}" text-anchor="end" fill="#1c2430">'
        f"{escape(name)}</text>",
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - 20}" height="{LANE}" fill="#f4f6f8"/>',
    ]
    for span in spans:
        if span.end <= begin or span.begin >= end:
            continue
        left = LEFT + scale * (max(span.begin, begin) - begin)
        width = max(0.6, scale * (min(span.end, end) - max(span.begin, begin)))
        colour = COLOURS.get(act(span), ROUND if name == "device" else OTHER)
        what = escape(f"{span.name}: {1e6 * span.seconds:.1f} us")
        rows.append(
            f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{LANE}" fill="{colour}" '
            f'stroke="#ffffff" stroke-width="0.5"><title>{what}</title></rect>'
        )
        if width > NARROW * len(span.name) + 8:
            ink = "#1c2430" if span.name == "await letter" else "#ffffff"
            rows.append(
                f'<text x="{left + width / 2:.2f}" y="{top + LANE / 2 + 4}" text-anchor="middle" '
                f'fill="{ink}">{escape(span.name)}</text>'
            )
    return rows


def act(span: Span) -> str:
    """What the host does in a span, without the number of the round it does it for."""
    return span.name.rstrip("0123456789 ")


def _axis(zero: float, begin: float, end: float, top: float) -> list[str]:
    """Ticks at round numbers of milliseconds from the round's begin."""
    scale = (WIDTH - LEFT - 20) / (end - begin)
    step = tick(1000 * (end - begin) / 6)
    rows: list[str] = []
    for number in range(math.ceil(1000 * (begin - zero) / step), 100):
        x = LEFT + scale * (zero + number * step / 1000 - begin)
        if x > WIDTH - 20:
            break
        rows.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + 5}" stroke="{OTHER}"/>')
        rows.append(
            f'<text x="{x:.1f}" y="{top + 18}" text-anchor="middle" fill="{OTHER}">'
            f"{number * step:g}</text>"
        )
    rows.append(f'<text x="{LEFT - 10}" y="{top + 18}" text-anchor="end" fill="{OTHER}">ms</text>')
    return rows


def tick(least: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least)


def _legend(shown: set[str], top: float) -> list[str]:
    """The colours' names, of those that occur."""
    rows: list[str] = []
    x = float(LEFT)
    for name, colour in COLOURS.items():
        if name in shown:
            rows.append(
                f'<rect x="{x:.1f}" y="{top + 27}" width="10" height="10" fill="{colour}"/>'
            )
            rows.append(f'<text x="{x + 14:.1f}" y="{top + 36}" fill="#1c2430">{name}</text>')
            x += 40 + 7 * len(name)
    return rows
