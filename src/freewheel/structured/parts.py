# SPDX-License-Identifier: Apache-2.0
"""Expressions of integers within bounds, of texts but for some, and of the items of arrays."""

from __future__ import annotations

import json
import re
from typing import Any

from freewheel.structured.values import Unclear

MAX_PLACES = 64
"""Items of an array of bounded length that must contain something."""
SPACE = "[ ]?"
LETTER = r'[^"\\\x00-\x1F\x7F-\x9F]'
"""A character that stands in a JSON string as it is."""
_ANY_DIGITS = "[0-9]"


def integers(low: int | None, high: int | None) -> list[str]:
    """Expressions of the integers from `low` to `high`, as JSON spells them; None: no bound."""
    if low is not None and high is not None and low > high:
        return []
    found: list[str] = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        found += [f"-{one}" for one in _counts(least, None if low is None else -low)]
    if high is None or high >= 0:
        found += _counts(max(0, low or 0), high)
    return found


def _counts(low: int, high: int | None) -> list[str]:
    """Of whole numbers from `low` >= 0 on, without leading zeros."""
    if high is None:
        digits = len(str(low))
        return [*_counts(low, 10**digits - 1), f"[1-9][0-9]{{{digits},}}"]
    found: list[str] = []
    while low <= high:
        stop = min(high, 10 ** len(str(low)) - 1)  # numbers of as many digits
        found += _alike(f"{low}", f"{stop}")
        low = stop + 1
    return found


def _alike(low: str, high: str) -> list[str]:
    """Of numbers from `low` to `high`, all of as many digits."""
    if low == high:
        return [low]
    if len(low) == 1:
        return [f"[{low}-{high}]"]
    if low[0] == high[0]:
        return [low[0] + rest for rest in _alike(low[1:], high[1:])]
    rest = len(low) - 1
    found: list[str] = []
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        found += [low[0] + one for one in _alike(low[1:], "9" * rest)]
        first += 1
    tail: list[str] = []
    if high[1:] != "9" * rest:
        tail = [high[0] + one for one in _alike("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        found.append(f"[{first}-{last}]{_ANY_DIGITS}{{{rest}}}")
    return found + tail


def after(value: int | None, low: int | None) -> int | None:
    """The least integer behind `value`, or `low` if that is more; None: no bound."""
    return low if value is None else value + 1 if low is None else max(low, value + 1)


def before(value: int | None, high: int | None) -> int | None:
    """The largest integer before `value`, or `high` if that is less; None: no bound."""
    return high if value is None else value - 1 if high is None else min(high, value - 1)


def other_texts(words: list[str], least: int, most: int | None) -> str | None:
    """Of texts that are none of `words`, without what JSON escapes; None: there are none."""
    own = [word for word in words if re.fullmatch(f"(?:{LETTER})*", word)]
    return _others(frozenset(own), least, most)


def _others(words: frozenset[str], least: int, most: int | None) -> str | None:
    if most is not None and most < 0:
        return None
    if not words:
        return f"{LETTER}{{{max(0, least)},{'' if most is None else most}}}"
    firsts = sorted({word[0] for word in words if word})
    below = None if most is None else most - 1
    parts: list[str] = []
    if least <= 0 and "" not in words:
        parts.append("")
    if most is None or most > 0:
        letters = "".join(map(_in_class, firsts))
        first = f'[^{letters}"\\\\\\x00-\\x1F\\x7F-\\x9F]'
        parts.append(f"{first}{LETTER}{{{max(0, least - 1)},{'' if below is None else below}}}")
        for letter in firsts:
            ends = frozenset(word[1:] for word in words if word[:1] == letter)
            behind = _others(ends, least - 1, below)
            if behind is not None:
                parts.append(_in_text(letter) + behind)
    return f"({'|'.join(parts)})" if parts else None


def _in_class(letter: str) -> str:
    return f"\\{letter}" if letter in r"\^-[]&~" else letter


def _in_text(letter: str) -> str:
    return f"\\{letter}" if letter in r"\.+*?()|[]{}^$#&-~" else letter


def literal(value: Any) -> str:
    """Of one JSON value, as it is written."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(map(_in_text, text))


def bracketed(inside: str) -> str:
    """An array of these items."""
    return rf"\[{SPACE}{inside}{SPACE}\]"


def arrangements(count: int, most: int) -> int:
    """Beginnings of arrays of up to `most` of `count` values, none twice."""
    total = product = 1
    for place in range(min(count, most)):
        product *= count - place
        total += product
    return total


def orders(texts: list[str], least: int, most: int) -> str:
    """Items of `texts` in any order, none twice, `least` to `most` of them."""

    def behind(left: list[str], least: int, most: int, comma: str) -> str:
        if not left or most <= 0:
            return ""
        parts = []
        for text in left:
            rest = [one for one in left if one is not text]
            parts.append(f"{comma}{text}" + behind(rest, least - 1, most - 1, f",{SPACE}"))
        return f"({'|'.join(parts)}){'' if least > 0 else '?'}"

    return behind(texts, least, most, "")


def with_one(item: str, wanted: str, least: int, most: int | None) -> str:
    """`least` to `most` items, of which one is `wanted`."""
    before, after = f"({item},{SPACE})", f"(,{SPACE}{item})"
    if most is None:
        found = [f"{before}{{{k}}}{wanted}{after}{{{least - 1 - k},}}" for k in range(least - 1)]
        return "|".join([*found, f"{before}{{{max(0, least - 1)},}}{wanted}{after}*"]).join("()")
    if not 0 < most <= MAX_PLACES:
        raise Unclear
    found = [
        f"{before}{{{k}}}{wanted}{after}{{{max(0, least - 1 - k)},{most - 1 - k}}}"
        for k in range(most)
    ]
    return "|".join(found).join("()")
