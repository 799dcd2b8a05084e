# SPDX-License-Identifier: Apache-2.0
"""The process that compiles. Reads wishes from standard input, writes tables to standard output.

First a line of JSON with the lengths of all tokens (-1: no text), and their bytes. Then a line for
each wish; each gets a line back, and a table's bytes behind it. A wish of which no table can be
made becomes a grammar that the host follows, if llguidance can.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from freewheel.structured.serving import give_up, serve

try:
    import numpy  # noqa: F401
    from outlines_core import Index, Vocabulary
    from outlines_core.json_schema import (  # pyright: ignore[reportMissingImports]
        build_regex_from_schema,
    )

    from freewheel.structured.following import mask_of, matcher_of, source_of, tokenizer_of
except ModuleNotFoundError as missing:
    give_up(missing)

from freewheel.spec import Form, Grammar, HostGrammar
from freewheel.structured.closing import closed
from freewheel.structured.expressions import foreign
from freewheel.structured.lark import Lark
from freewheel.structured.schema import Refusal, parsed, read_schema
from freewheel.structured.spelling import Speller
from freewheel.structured.tables import ByteAutomaton, byte_automaton, token_grammar
from freewheel.structured.tree import Tree, read_tree
from freewheel.structured.values import Unclear
from freewheel.structured.weaving import Weaver

MAX_SOURCE = 1 << 18
"""Characters of a wish."""

NO_BYTE = 256
_MARK = "\0"
"""No text contains it."""

_BYTES = Vocabulary(NO_BYTE, {bytes([byte]): [byte] for byte in range(256)})
_ESCAPES, _ALL_ESCAPES = r'|\\["\\])', r'|\\["\\/bfnrt])'
"""What the library lets a string escape; and what also says ends of lines."""
_META = frozenset(r"\.+*?()|[]{}^$#&-~")


TABLES = ("json_schema", "regex", "choice", "calls")
"""Kinds of which a table may be made."""


def form_of(kind: str, source: str, vocabulary: list[bytes | None]) -> Form:
    """A table, or else what the host follows. Raises Refusal for a wish that cannot be kept."""
    refused: Refusal | None = None
    strange = foreign(source) if kind == "regex" else None
    if strange is not None:
        raise Refusal(strange)
    if kind in TABLES:
        try:
            return compiled(kind, source, vocabulary)
        except Refusal as refusal:
            refused = refusal
    try:
        return followed(kind, source, vocabulary)
    except Refusal as refusal:
        raise refused or refusal from refusal


def followed(kind: str, source: str, vocabulary: list[bytes | None]) -> HostGrammar:
    """A grammar for the host. Raises Refusal for a wish that cannot be kept."""
    _check_size(source)
    if kind == "choice":
        kind, source = "regex", regex_of(kind, source)
    elif kind == "calls":
        kind, source = "grammar", Lark(_tree(source)).text
    refused: Refusal | None = None
    for spelling in _spellings(source) if kind == "json_schema" else (source,):
        try:
            text = source_of(kind, spelling)
            mask_of(matcher_of(text, tokenizer_of(vocabulary)), (0,), len(vocabulary))
            return HostGrammar(text)
        except Refusal as refusal:
            refused = refused or refusal
    assert refused is not None
    raise refused


def _spellings(source: str) -> Iterator[str]:
    """A schema as it is, and in fewer keywords."""
    schema = parsed(source)
    yield source
    with suppress(Unclear):
        yield json.dumps(closed(schema))


def _check_size(source: str) -> None:
    if len(source) > MAX_SOURCE:
        raise Refusal(f"is {len(source)} characters long; at most {MAX_SOURCE} are read")


def compiled(kind: str, source: str, vocabulary: list[bytes | None]) -> Grammar:
    """Raises Refusal for a wish that cannot be kept."""
    _check_size(source)
    if kind == "calls":
        return token_grammar(
            Weaver(_tree(source), automaton_of, _of_schema).automaton(), vocabulary
        )
    return token_grammar(automaton_of(regex_of(kind, source)), vocabulary)


def _tree(source: str) -> Tree:
    try:
        return read_tree(source)
    except ValueError as error:
        raise Refusal(f"cannot be read: {error}") from error


def _of_schema(schema: Any) -> ByteAutomaton:
    return automaton_of(regex_of("json_schema", json.dumps(schema)))


def regex_of(kind: str, source: str) -> str:
    """The regular expression of a wish."""
    if kind == "regex":
        return source
    if kind == "choice":
        return "|".join(f"({''.join(map(_literal, text))})" for text in json.loads(source))
    schema = parsed(source)
    return Speller(source, schema, _built).expression(schema)


def _built(schema: dict[str, Any]) -> str:
    """The library's regular expression of a schema that it keeps exactly."""
    read_schema(schema, stands_in_json)
    try:
        return build_regex_from_schema(json.dumps(schema)).replace(_ESCAPES, _ALL_ESCAPES)
    except (ValueError, TypeError) as error:  # a TypeError: half a character
        raise Refusal(f"cannot be turned into a grammar: {error}") from error


def automaton_of(regex: str) -> ByteAutomaton:
    """The automaton over bytes of all texts that a regular expression matches whole.

    The library loses what follows a text that is already complete: of `ab|abc` it never gives the
    second. So a mark stands behind each text, and a text may end where the mark may follow.
    """
    inside = _without_anchors(regex)
    try:
        Index(inside, _BYTES)  # brackets must be whole without the mark
        index = Index(f"(?:{inside}){_MARK}", _BYTES)
    except ValueError as error:
        raise Refusal(_wrong_with(regex, error)) from error
    finals = set(index.get_final_states())
    transitions = index.get_transitions()
    ends = [state for state, row in transitions.items() if row.get(ord(_MARK)) in finals]
    return byte_automaton(transitions, index.get_initial_state(), ends, ord(_MARK))


def _wrong_with(regex: str, error: ValueError) -> str:
    """What another reader says of an expression: the library itself does not say where it ends."""
    try:
        re.compile(regex)
    except re.error as found:
        return f"is no regular expression: {found}"
    return f"cannot be turned into an automaton: {error}"


def _without_anchors(regex: str) -> str:
    """Whole texts are matched anyhow, and behind the mark there is no end to match."""
    inside = regex.removeprefix("^")
    escaped = len(inside) - len(inside[:-1].rstrip("\\")) - 1 if inside.endswith("$") else 1
    return inside if escaped % 2 else inside[:-1]


def stands_in_json(pattern: str) -> bool:
    """Nothing that `pattern` matches needs an escape inside a JSON string."""
    following = automaton_of(pattern).following
    return not following[:, [*range(32), ord('"'), ord("\\")]].any()


def _literal(letter: str) -> str:
    return f"\\{letter}" if letter in _META else letter


def answer(line: bytes, vocabulary: list[bytes | None]) -> tuple[dict[str, Any], bytes]:
    """The reply to one wish: what is said of it, and the table."""
    wish = json.loads(line)
    try:
        form = form_of(wish["kind"], wish["source"], vocabulary)
    except Refusal as refusal:
        return {"error": str(refusal)}, b""
    except (MemoryError, RecursionError):
        return {"error": "takes too much memory to compile"}, b""
    if isinstance(form, HostGrammar):
        return {"source": form.source}, b""
    said = {"key": form.key, "states": form.states, "classes": form.classes}
    return said | {"start": form.start, "bytes": len(form.table)}, form.table


if __name__ == "__main__":
    serve(lambda vocabulary: partial(answer, vocabulary=vocabulary))
