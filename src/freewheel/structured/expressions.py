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

_OF_SEVERAL = frozenset("dDwWsSpP")
"""Letters that stand for several behind a backslash: no range begins or ends with one."""

_NAMED = re.compile(r"\[:\^?[a-z]+:\]")
"""A class by its name, as POSIX has it."""

_SETS = {"&&": "an intersection of classes", "--": "a difference of classes"} | {
    "~~": "a symmetric difference of classes"
}
"""Of Rust's classes; in Python's and ECMA-262's these are letters, or a range."""


def plain_classes(pattern: str) -> str:
    """A schema's pattern with the classes that ECMA-262 gives it, in Rust's words.

    Digits and letters are of ASCII (22.2.2.9, CharacterClassEscape), where Rust's are Unicode's;
    within a class `[`, `&&`, `--` and `~~` are letters (22.2.1, ClassAtom), where Rust has classes
    of classes.
    """
    found, place = list[str](), 0
    while place < len(pattern):
        if pattern[place] == "[":
            text, place = _plain_class(pattern, place)
        else:
            text, place = _atom(pattern, place)
        found.append(text)
    return "".join(found)


def _plain_class(pattern: str, place: int) -> tuple[str, int]:
    """The class that begins there, and where what follows it begins."""
    begin = place
    place += 1 + (pattern[place + 1 : place + 2] == "^")
    found = pattern[begin:place]
    if pattern[place : place + 1] == "]":
        found, place = found + r"\]", place + 1
    while place < len(pattern) and pattern[place] != "]":
        first, behind = _atom(pattern, place, in_class=True)
        several = _stands_for_several(pattern, place)
        place, found = behind, found + first
        if pattern[place : place + 1] == "-" and pattern[place + 1 : place + 2] not in ("", "]"):
            several |= _stands_for_several(pattern, place + 1)
            last, place = _atom(pattern, place + 1, in_class=True)
            found += (r"\-" if several else "-") + last
    return found + pattern[place : place + 1], place + 1


def _atom(pattern: str, place: int, in_class: bool = False) -> tuple[str, int]:
    letter = pattern[place]
    if letter == "\\":
        pair = pattern[place : place + 2]
        return _CLASSES.get(pair[1:], pair), place + 2
    double = letter in "&~-" and letter in (pattern[place - 1], pattern[place + 1 : place + 2])
    return (f"\\{letter}" if in_class and (double or letter == "[") else letter), place + 1


def _stands_for_several(pattern: str, place: int) -> bool:
    return pattern[place] == "\\" and pattern[place + 1 : place + 2] in _OF_SEVERAL


def foreign(regex: str) -> str | None:
    """The first construct that is not supported, in words; None: there is none."""
    place, in_class = 0, False
    while place < len(regex):
        letter = regex[place]
        if letter == "\\":
            if not in_class and regex[place + 1 : place + 2].isdigit():
                return _said("a reference to a group", regex[place : place + 2], place)
            place += 2
        elif in_class:
            if (named := _NAMED.match(regex, place)) is not None:
                place = named.end()
                continue
            if (name := _of_sets(regex, place)) is not None:
                sign = regex[place : place + 1 + (letter != "[")]
                return _said(name, sign, place) + f"; write \\{letter} for the letter"
            in_class = letter != "]"
            place += 1
        elif letter == "[":
            in_class = True
            place += 1 + (regex[place + 1 : place + 2] == "^")
            place += regex[place : place + 1] == "]"  # first of all, it is itself
        else:
            for sign, name in _AROUND.items():
                if regex.startswith(sign, place):
                    return _said(name, sign, place)
            place += 1
    return None


def _of_sets(regex: str, place: int) -> str | None:
    """What of Rust's classes of classes stands there: dialects differ in what it means."""
    return "a class in a class" if regex[place] == "[" else _SETS.get(regex[place : place + 2])


def _said(name: str, sign: str, place: int) -> str:
    return f"has {name}, {sign} at character {place + 1}, which is not supported"
