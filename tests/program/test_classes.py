# SPDX-License-Identifier: Apache-2.0
"""Classes of characters in patterns and expressions: other dialects' meaning, or a refusal."""

from __future__ import annotations

import random
import re
import warnings

import pytest
from outlines_core import Index, Vocabulary

from freewheel.structured.expressions import foreign, plain_classes

LETTERS = [chr(code) for code in range(33, 127)]
VOCABULARY = Vocabulary(0, {letter: [ord(letter)] for letter in LETTERS})


def taken(regex: str) -> set[str] | None:
    """The first letters of what the automaton takes; None: it refuses the expression."""
    try:
        index = Index(regex, VOCABULARY)
    except ValueError:
        return None
    found = index.get_transitions().get(index.get_initial_state(), {})
    return {chr(token) for token in found if token}


def meant(regex: str) -> set[str] | None:
    """Python's reading, which is ECMA-262's in these; None: it is no expression."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            found = re.compile(regex)
        except re.error:
            return None
    return {letter for letter in LETTERS if found.fullmatch(letter)}


def classes() -> list[str]:
    chance = random.Random(7)
    parts = ["a", "c", "x", "[", "&", "&&", "~~", "-", "--", "\\d", "\\]", "^", "+", ":"]
    drawn = ["".join(chance.choices(parts, k=chance.randrange(1, 6))) for _ in range(400)]
    return [f"[{negated}{inside}]" for inside in drawn for negated in ("", "^")]


def test_classes_of_a_schemas_pattern_are_ecmas() -> None:
    """Letters are letters there, where Rust has classes of classes."""
    told = 0
    for one in classes():
        wanted = meant(one)
        if wanted:
            assert taken(plain_classes(one)) == wanted, (one, plain_classes(one))
            told += taken(one) != wanted
    assert told > 50  # Rust's own reading differs


def test_an_expression_that_is_not_refused_means_what_python_means() -> None:
    """But for classes of several letters, which are Unicode's in both."""
    kept = 0
    for one in classes():
        wanted = meant(one)
        if wanted and foreign(one) is None:
            assert taken(one) == wanted, one
            kept += 1
    assert kept > 50


@pytest.mark.parametrize("fine", ["[[:alpha:]_]+", "[]a]", "[^]]", r"[\[\]&-]", "[a-z]&&[0-9]"])
def test_what_dialects_agree_on_is_no_class_of_classes(fine: str) -> None:
    assert foreign(fine) is None
