# SPDX-License-Identifier: Apache-2.0
"""Read the training text and split every book into a training and a held-out part.

The held-out part of a book is its ending, cut at a chapter, scene or paragraph boundary at or
before 96 % of its length, so that no sentence of it is ever trained on.
"""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_FRACTION = 0.04
SOURCES = ("austen", "mobydick", "shakespeare", "web_bible")
_AUSTEN_TITLES = (
    "EMMA",
    "MANSFIELD PARK",
    "NORTHANGER ABBEY",
    "Persuasion",
    "PRIDE AND PREJUDICE",
    "SENSE AND SENSIBILITY",
)
_HEADING = re.compile(r"^(chapter|act|scene)\b[ .]*[0-9ivxlc]+\b", re.IGNORECASE | re.MULTILINE)
_BIBLE_END = "The grace of the Lord Jesus Christ be with all the saints. Amen."


@dataclass(frozen=True)
class Book:
    source: str
    title: str
    train: str
    held_out: str


def read_books(folder: Path) -> list[Book]:
    """All books of `folder`, which holds one `<source>.txt.gz` (or `.txt`) for each source."""
    books: list[Book] = []
    for source in SOURCES:
        for title, text in _split_source(source, _read(folder, source)):
            train, held_out = split_book(text)
            books.append(Book(source, title, train, held_out))
    return books


def split_book(text: str) -> tuple[str, str]:
    """(training part, held-out ending); the cut is the last boundary before the held-out share."""
    limit = int(len(text) * (1.0 - HELD_OUT_FRACTION))
    heading = [m.start() for m in _HEADING.finditer(text, int(len(text) * 0.85), limit)]
    cut = heading[-1] if heading else text.rfind("\n\n", 0, limit)
    return text[:cut].strip(), text[cut:].strip()


def paragraph_starts(text: str) -> list[int]:
    """Character offsets at which a paragraph of `text` begins."""
    return [0, *(m.end() for m in re.finditer(r"\n\n+", text))]


def _read(folder: Path, source: str) -> str:
    plain = folder / f"{source}.txt"
    if plain.exists():
        return plain.read_text(encoding="utf-8")
    with gzip.open(folder / f"{source}.txt.gz", "rt", encoding="utf-8") as file:
        return file.read()


def _split_source(source: str, text: str) -> list[tuple[str, str]]:
    if source == "austen":
        return _split_austen(text)
    if source == "shakespeare":
        return _split_shakespeare(text)
    if source == "web_bible":
        # What follows the last verse is a glossary by the publisher.
        text = text[: text.rindex(_BIBLE_END) + len(_BIBLE_END)]
        return [("a modern-English Bible", text)]
    return [("Moby Dick", text)]


def _split_austen(text: str) -> list[tuple[str, str]]:
    starts = [re.search(rf"^{title}$", text, re.MULTILINE) for title in _AUSTEN_TITLES]
    offsets = [match.start() for match in starts if match is not None]
    if len(offsets) != len(_AUSTEN_TITLES) or offsets != sorted(offsets):
        raise ValueError("austen: a novel's title line is missing")
    books: list[tuple[str, str]] = []
    for title, begin, end in zip(_AUSTEN_TITLES, offsets, [*offsets[1:], len(text)], strict=True):
        body = text[begin:end]
        # An editor's note of a modern edition follows one novel: not part of the book.
        body = body.split("A NOTE ON THE TEXT")[0]
        books.append((title.title(), body))
    return books


def _split_shakespeare(text: str) -> list[tuple[str, str]]:
    lines = text.split("\n")
    heads: list[int] = []
    for i, line in enumerate(lines):
        if line.strip().lower() != "by william shakespeare":
            continue
        title = i - 1
        while title > 0 and not lines[title].strip():
            title -= 1
        heads.append(title)
    if not heads:
        return [("Shakespeare", text)]
    heads[0] = 0
    return [
        (lines[begin].strip().title(), "\n".join(lines[begin:end]))
        for begin, end in zip(heads, [*heads[1:], len(lines)], strict=True)
    ]
