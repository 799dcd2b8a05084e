# SPDX-License-Identifier: Apache-2.0
"""Build everything a training run reads: tokenizer, token streams and evaluation sets.

    python prepare.py --text DIR --out DIR [--seed 7] [--short 300000] [--long 5500]

Writes `tokens.npz` (uint16 streams and document starts), the tokenizer, `evaluation.json` and
`prompts.json`, the evaluation prompts for the engine's own benchmark.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import synthetic
from corpus import SOURCES, Book, read_books
from synthetic import Prose, Sample
from tokenizer import BOS, EOS, encode, save_tokenizer, train_tokenizer

PROMPTS_PER_KIND = 72
RECALL_LENGTHS = (200, 500, 1000, 2000, 3500)
RECALL_PER_LENGTH = 96
_BATCH = 4096


def document(sample: Sample) -> str:
    return f"{BOS}{sample.prompt}{sample.answer}{EOS}"


def prose_of(books: Iterable[Book], *, held_out: bool) -> Prose:
    texts = [(b.held_out if held_out else b.train) for b in books if b.source != "shakespeare"]
    return Prose([p for text in texts for p in text.split("\n\n")])


def make_tokenizer(books: list[Book], prose: Prose, seed: int) -> Tokenizer:
    rng = random.Random(seed)
    generated = [
        f"{s.prompt}{s.answer}" for s in (synthetic.short_sample(rng, prose) for _ in range(9000))
    ]
    return train_tokenizer([*(p for b in books for p in b.train.split("\n\n")), *generated])


def stream(
    tokenizer: Tokenizer, make: Callable[[], Sample], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """`count` documents end to end: (uint16 tokens, int64 document starts)."""
    parts: list[np.ndarray] = []
    starts: list[int] = []
    size = 0
    for begin in range(0, count, _BATCH):
        texts = [document(make()) for _ in range(min(_BATCH, count - begin))]
        for encoded in tokenizer.encode_batch(texts, add_special_tokens=False):
            starts.append(size)
            parts.append(np.asarray(encoded.ids, dtype=np.uint16))
            size += len(encoded.ids)
    return np.concatenate(parts), np.asarray(starts, dtype=np.int64)


def prose_stream(tokenizer: Tokenizer, books: list[Book]) -> tuple[np.ndarray, np.ndarray]:
    """One source's books end to end, and the starts of their paragraphs."""
    newline = tokenizer.token_to_id("Ċ")
    ids = [np.asarray([*encode(tokenizer, b.train), 1], dtype=np.uint16) for b in books]
    tokens = np.concatenate(ids)
    breaks = (tokens[:-2] == newline) & (tokens[1:-1] == newline) & (tokens[2:] != newline)
    return tokens, np.flatnonzero(breaks).astype(np.int64) + 2


def prose_prompts(tokenizer: Tokenizer, books: list[Book], rng: random.Random) -> list[Sample]:
    """Openings of held-out paragraphs, 30 to 200 tokens, cut between words."""
    by_source = {s: [b for b in books if b.source == s] for s in SOURCES}
    found: list[Sample] = []
    while len(found) < PROMPTS_PER_KIND:
        book = rng.choice(by_source[SOURCES[len(found) % len(SOURCES)]])
        paragraphs = [p for p in book.held_out.split("\n\n") if len(p) > 120]
        if not paragraphs:
            continue
        at = rng.randrange(len(paragraphs))
        text = "\n\n".join(paragraphs[at : at + 3])
        text = text[: rng.randint(90, 500)].rsplit(" ", 1)[0]
        if 30 <= len(encode(tokenizer, text)) <= 200:
            found.append(Sample("prose", text, ""))
    return found


def task_prompts(
    tokenizer: Tokenizer, make: Callable[[], Sample], low: int, high: int, answer: int
) -> list[Sample]:
    """Distinct generated prompts of `low`..`high` tokens, answers of at least `answer`."""
    found: dict[str, Sample] = {}
    while len(found) < PROMPTS_PER_KIND:
        sample = make()
        size = len(encode(tokenizer, sample.prompt))
        if low <= size <= high and len(encode(tokenizer, sample.answer)) >= answer:
            found[sample.prompt] = sample
    return list(found.values())


def evaluation(tokenizer: Tokenizer, books: list[Book], seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    prose = prose_of(books, held_out=True)

    def first_turn(sample: Sample) -> Sample:
        return Sample(sample.kind, sample.prompt, sample.answer.split(EOS)[0])

    prompts = [
        *prose_prompts(tokenizer, books, rng),
        *task_prompts(tokenizer, lambda: synthetic.copy(rng, prose, 1), 20, 300, 30),
        *task_prompts(tokenizer, lambda: synthetic.json_task(rng), 20, 300, 30),
        *task_prompts(
            tokenizer,
            lambda: synthetic.recall(rng, prose, rng.randint(80, 280), 1, table=False),
            100,
            400,
            3,
        ),
        *task_prompts(tokenizer, lambda: first_turn(synthetic.talk(rng, prose)), 5, 60, 4),
    ]
    recall = {
        f"{'table' if table else 'planted'} {length}": [
            vars(synthetic.recall(rng, prose, length, 1, table=table))
            for _ in range(RECALL_PER_LENGTH)
        ]
        for table in (False, True)
        for length in RECALL_LENGTHS
    }
    return {
        "prompts": [vars(p) for p in prompts],
        "recall": recall,
        "held_out": {s: "\n\n".join(b.held_out for b in books if b.source == s) for s in SOURCES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--short", type=int, default=100_000)
    parser.add_argument("--long", type=int, default=3500)
    args = parser.parse_args()

    books = read_books(args.text)
    prose = prose_of(books, held_out=False)
    tokenizer = make_tokenizer(books, prose, args.seed)
    save_tokenizer(tokenizer, args.out)

    arrays: dict[str, np.ndarray] = {}
    for source in SOURCES:
        mine = [b for b in books if b.source == source]
        arrays[source], arrays[f"{source}_starts"] = prose_stream(tokenizer, mine)
    rng = random.Random(args.seed + 1)
    for name, make, count in (
        ("short", lambda: synthetic.short_sample(rng, prose), args.short),
        ("long", lambda: synthetic.long_sample(rng, prose), args.long),
    ):
        arrays[name], arrays[f"{name}_starts"] = stream(tokenizer, make, count)
    np.savez_compressed(args.out / "tokens.npz", allow_pickle=False, **arrays)
    sets = evaluation(tokenizer, books, args.seed + 2)
    (args.out / "evaluation.json").write_text(json.dumps(sets), encoding="utf-8")
    prompts = [{k: v for k, v in p.items() if v} for p in sets["prompts"]]
    (args.out / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n", encoding="utf-8")
    for name in (*SOURCES, "short", "long"):
        print(f"{name:12s} {arrays[name].size:10,d} tokens {arrays[name + '_starts'].size:8,d}")


if __name__ == "__main__":
    main()
