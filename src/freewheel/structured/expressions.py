# SPDX-License-Identifier: Apache-2.0
"""Regular expressions of other dialects: what of them no automaton follows, and classes."""

from __future__ import annotations

import re

_AROUND = {
    "(?=": "look-ahead",
    "(?!": "look-ahead",
    "(?<=": "look-behind",
    "(?<!": "look-behind",
    "(?>": "an atomic group",
    "(?P=": "a reference to a group",
}


_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[A-Za-z0-9_]", "W": "[^A-Za-z0-9_]"}


def plain_classes(pattern: str) -> str:
    """A schema's pattern with the classes that ECMA-262 gives it (22.2.2.9, CharacterClassEscape):
    digits and letters of ASCII, where Rust's are Unicode's."""
    return re.sub(r"\\(.)", lambda found: _CLASSES.get(found[1], found[0]), pattern, flags=re.S)


def foreign(regex: str) -> str | None:
    """The first construct that is not supported, in words; None: there is none."""
    place, in_class = 0, 0
    while place < len(regex):
        letter = regex[place]
        if letter == "\\":
            if not in_class and regex[place + 1 : place + 2].isdigit():
                return _said("a reference to a group", regex[place : place + 2], place)
            place += 2
            continue
        if letter == "[":
            in_class += 1
            place += 1 + (regex[place + 1 : place + 2] == "^")
            place += regex[place : place + 1] == "]"  # first of all, it is itself
            continue
        elif letter == "]" and in_class:
            in_class -= 1
        elif letter == "(" and not in_class:
            for sign, name in _AROUND.items():
                if regex.startswith(sign, place):
                    return _said(name, sign, place)
        place += 1
    return None


def _said(name: str, sign: str, place: int) -> str:
    return f"has {name}, {sign} at character {place + 1}, which is not supported"
