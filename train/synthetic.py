# SPDX-License-Identifier: Apache-2.0
"""Generated training text: stories, recall, copying, JSON, sorting, sums and chat turns.

A sample is a prompt and an answer; its document is BOS, prompt, answer, EOS. Chat turns are in
DeepSeek-V3.2's prompt encoding without the leading BOS.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import stories
from facts import ANTONYMS, CAPITALS, FIXED, NUMBER_WORDS, QUESTIONS, SERIES
from tokenizer import ASSISTANT, END_THINK, EOS, THINK, USER

WORDS = (
    "amber apple arrow barley basket beacon bishop branch bridge butter candle carpet castle "
    "cedar chapel cherry circle clover copper cotton cradle crystal desert donkey dragon eagle "
    "ember falcon feather ferry finger flower forest garden garlic ginger hammer harbor hazel "
    "island ivory jacket jungle kettle kitten ladder lantern lemon linen marble meadow melon "
    "mirror monkey mountain needle nutmeg olive onion orange oyster paper pearl pepper pillow "
    "planet pocket quartz rabbit raven ribbon river rocket saddle salmon shadow silver spider "
    "spring statue summer temple thunder ticket timber turtle valley velvet violet walnut "
    "willow window winter yellow zebra"
).split()
SURNAMES = (
    "Hill Woods Baker Brown Carter Clark Cooper Fisher Green Harris Hunter King Lewis Marsh "
    "Mills Parker Price Reed Scott Stone Turner Walker Ward West White Wood Young"
).split()


@dataclass(frozen=True)
class Sample:
    kind: str
    prompt: str
    answer: str


class Prose:
    """Paragraphs of the training text, used as filler and as something to copy."""

    def __init__(self, paragraphs: Sequence[str]) -> None:
        self.paragraphs = [p.replace("\n", " ") for p in paragraphs if 80 <= len(p) <= 1200]

    def paragraph(self, rng: random.Random) -> str:
        return rng.choice(self.paragraphs)

    def sentence(self, rng: random.Random, longest: int = 220) -> str:
        text = self.paragraph(rng)
        cut = text.find(". ", min(60, len(text) // 2))
        return text[: cut + 1] if 0 < cut < longest else text[:longest].rsplit(" ", 1)[0]


def chat(user: str, answer: str, *, system: str = "", think: str | None = None) -> Sample:
    lead = END_THINK if think is None else THINK
    reply = answer if think is None else f"{think}{END_THINK}{answer}"
    return Sample("chat", f"{system}{USER}{user}{ASSISTANT}{lead}", reply)


# ---- recall ----------------------------------------------------------------------------------


def _value(rng: random.Random) -> str:
    form = rng.randrange(5)
    if form <= 1:
        return "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 5)))
    if form == 2:
        letters = "".join(rng.choice("ABCDEFGHKLMNPRSTX") for _ in range(2))
        return f"{letters}-{rng.randint(10, 99)}"
    if form == 3:
        return f"{rng.choice(stories.COLOURS)} {rng.choice(stories.ANIMALS)}"
    return " ".join(rng.sample(WORDS, 2))


def _person(rng: random.Random) -> str:
    return f"{rng.choice(stories.GIRLS + stories.BOYS)} {rng.choice(SURNAMES)}"


def _distinct(rng: random.Random, make: Callable[[random.Random], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[make(rng)] = None
    return list(found)


def _table_context(rng: random.Random, length: int) -> tuple[str, dict[str, str]]:
    """About `length` tokens of `key: value` lines."""
    count = max(3, length // 13)
    make = _person if count > 60 or rng.random() < 0.4 else (lambda r: r.choice(WORDS))
    facts = {k: _value(rng) for k in _distinct(rng, make, count)}
    mark = rng.choice(("- ", "", "* "))
    return "\n".join(f"{mark}{k}: {v}" for k, v in facts.items()), facts


def _planted_context(rng: random.Random, prose: Prose, length: int) -> tuple[str, dict[str, str]]:
    """About `length` tokens of filler with a few facts between paragraphs."""
    count = rng.randint(1, 4)
    facts = {k: _value(rng) for k in _distinct(rng, _person, count)}
    blocks: list[str] = []
    size = 0
    while size < length * 2.6:
        block = stories.story(rng) if rng.random() < 0.25 else prose.paragraph(rng)
        blocks.append(block)
        size += len(block)
    for who, value in facts.items():
        line = f"The code of {who} is {value}."
        blocks.insert(rng.randrange(len(blocks) + 1), line)
    return "\n\n".join(blocks), facts


def recall(
    rng: random.Random,
    prose: Prose,
    length: int,
    questions: int | None = None,
    *,
    table: bool | None = None,
) -> Sample:
    """Facts far back, asked for at the end: a table of them, or a few planted in prose."""
    if table is None:
        table = rng.random() < 0.5
    text, facts = _table_context(rng, length) if table else _planted_context(rng, prose, length)
    count = questions or min(len(facts), rng.randint(1, 6))
    asked = rng.sample(sorted(facts), count)
    if rng.random() < 0.3:
        return _recall_chat(text, asked, facts, table=table)
    lines = [_qa(k, facts[k], table=table) for k in asked]
    head, last = lines[0]
    body = "".join(f"\n{question}{answer}" for question, answer in lines[1:])
    return Sample("recall", f"{text}\n\n{head}", f"{last}{body}")


def _qa(key: str, value: str, *, table: bool) -> tuple[str, str]:
    what = f"What is the value of {key}?" if table else f"What is the code of {key}?"
    return f"Question: {what}\nAnswer:", f" {value}"


def _recall_chat(text: str, asked: list[str], facts: dict[str, str], *, table: bool) -> Sample:
    word = "value" if table else "code"
    prompt = f"{text}\n\nWhat is the {word} of {asked[0]}?"
    first = chat(prompt, f"The {word} of {asked[0]} is {facts[asked[0]]}.")
    answer = first.answer + "".join(
        f"{EOS}{USER}What is the {word} of {k}?{ASSISTANT}{END_THINK}"
        f"The {word} of {k} is {facts[k]}."
        for k in asked[1:]
    )
    return Sample("recall", first.prompt, answer)


# ---- copying, JSON, order, sums --------------------------------------------------------------


def copy(rng: random.Random, prose: Prose, times: int | None = None) -> Sample:
    """A text and its copy, or `times` of them."""
    form = rng.randrange(5)
    if form == 0:
        text = " ".join(rng.choices(WORDS, k=rng.randint(4, 24)))
    elif form == 1:
        text = json.dumps(_record(rng))
    elif form == 2:
        text = " ".join(str(rng.randint(0, 999)) for _ in range(rng.randint(4, 16)))
    else:
        text = prose.sentence(rng)
    if rng.random() < 0.4:
        ask = rng.choice(("Repeat after me: ", "Copy this text: ", "Say exactly this: "))
        made = chat(f"{ask}{text}", text)
        return Sample("copy", made.prompt, made.answer)
    answer = "\nCopy: ".join([text] * (times or rng.choice((1, 1, 2, 3))))
    return Sample("copy", f"Text: {text}\nCopy:", f" {answer}\n")


def _record(rng: random.Random) -> dict[str, object]:
    fields: dict[str, object] = {
        "name": rng.choice(stories.GIRLS + stories.BOYS),
        "age": rng.randint(3, 90),
        "city": rng.choice(tuple(CAPITALS.values())),
        "colour": rng.choice(stories.COLOURS),
        "animal": rng.choice(stories.ANIMALS),
        "food": rng.choice(stories.FOODS),
        "id": rng.randint(100, 9999),
        "active": rng.random() < 0.5,
    }
    keys = rng.sample(sorted(fields), rng.randint(2, 5))
    return {k: fields[k] for k in keys}


def _plain(record: dict[str, object]) -> str:
    return ", ".join(f"{k} {json.dumps(v).strip(chr(34))}" for k, v in record.items())


def json_task(rng: random.Random) -> Sample:
    form = rng.randrange(4)
    if form == 0:
        record = _record(rng)
        prompt, answer = f"Write as JSON: {_plain(record)}", json.dumps(record)
    elif form == 1:
        keys = list(_record(rng))
        rows = [{k: {**_full(rng)}[k] for k in keys} for _ in range(rng.randint(2, 5))]
        prompt = "Write as a JSON list:\n" + "\n".join(_plain(r) for r in rows)
        answer = json.dumps(rows)
    elif form == 2:
        items = rng.sample(WORDS, rng.randint(3, 8))
        prompt, answer = f"Write as a JSON list: {', '.join(items)}", json.dumps(items)
    else:
        record = _record(rng)
        key = rng.choice(list(record))
        prompt = f"{json.dumps(record)}\nWhat is the {key}?"
        answer = json.dumps({key: record[key]})
    if rng.random() < 0.5:
        made = chat(prompt, answer)
        return Sample("json", made.prompt, made.answer)
    return Sample("json", f"{prompt}\nJSON:", f" {answer}\n")


def _full(rng: random.Random) -> dict[str, object]:
    record: dict[str, object] = {}
    while len(record) < 8:
        record.update(_record(rng))
    return record


def order(rng: random.Random) -> Sample:
    down = rng.random() < 0.25
    if rng.random() < 0.5:
        items = [str(n) for n in rng.sample(range(100), rng.randint(3, 8))]
        ranked = sorted(items, key=int, reverse=down)
    else:
        items = rng.sample(WORDS, rng.randint(3, 6))
        ranked = sorted(items, reverse=down)
    ask = "Sort in reverse: " if down else "Sort: "
    return chat(ask + " ".join(items), " ".join(ranked))


def sums(rng: random.Random) -> Sample:
    limit = rng.choice((10, 20, 100))
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    sign = rng.choice("++-*")
    if sign == "*":
        a, b = rng.randint(0, 10), rng.randint(0, 10)
    if sign == "-":
        a, b = max(a, b), min(a, b)
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    word = {"+": "plus", "-": "minus", "*": "times"}[sign]
    if rng.random() < 0.25:
        lines = [f"{x} + {y} = {x + y}" for x, y in _pairs(rng, limit)]
        return Sample(
            "sums", f"{lines[0].split('=')[0]}=", "=".join(("\n".join(lines)).split("=")[1:])
        )
    if rng.random() < 0.3:
        return chat(
            f"What is {a} {sign} {b}?",
            f"{a} {sign} {b} = {result}",
            think=f"{a} {word} {b} is {result}.",
        )
    return chat(f"What is {a} {sign} {b}?", f"{a} {sign} {b} = {result}")


def _pairs(rng: random.Random, limit: int) -> list[tuple[int, int]]:
    return [(rng.randint(0, limit), rng.randint(0, limit)) for _ in range(rng.randint(3, 10))]


# ---- chat ------------------------------------------------------------------------------------


def talk(rng: random.Random, prose: Prose) -> Sample:
    """One to three turns of simple, useful answers."""
    turns = [_turn(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    system = rng.choice(("", "", "", "You are a helpful assistant.", "Answer briefly."))
    prompt = f"{system}{USER}{turns[0][0]}{ASSISTANT}{END_THINK}"
    if rng.random() < 0.08 and len(turns) == 1:
        question, answer = turns[0]
        thought = f'The user says: "{question}" I will answer simply.'
        return chat(question, answer, system=system, think=thought)
    answer = turns[0][1] + "".join(f"{EOS}{USER}{q}{ASSISTANT}{END_THINK}{a}" for q, a in turns[1:])
    return Sample("chat", prompt, answer)


def _turn(rng: random.Random) -> tuple[str, str]:
    makers = (_fixed, _capital, _opposite, _series, _spell, _tell, _make_sentence, _number, _list)
    return rng.choices(makers, weights=(4, 2, 2, 2, 2, 5, 2, 1, 2))[0](rng)


def _fixed(rng: random.Random) -> tuple[str, str]:
    questions, answers = rng.choice(FIXED + QUESTIONS)
    return rng.choice(questions), rng.choice(answers)


def _capital(rng: random.Random) -> tuple[str, str]:
    country, city = rng.choice(tuple(CAPITALS.items()))
    if rng.random() < 0.3:
        return f"Where is {city}?", f"{city} is the capital of {country}."
    return f"What is the capital of {country}?", f"The capital of {country} is {city}."


def _opposite(rng: random.Random) -> tuple[str, str]:
    a, b = rng.choice(ANTONYMS)
    if rng.random() < 0.5:
        a, b = b, a
    return f'What is the opposite of "{a}"?', f'The opposite of "{a}" is "{b}".'


def _series(rng: random.Random) -> tuple[str, str]:
    name, items = rng.choice(tuple(SERIES.items()))
    at = rng.randrange(len(items) - 1)
    form = rng.randrange(3)
    if form == 0:
        return f"What comes after {items[at]}?", f"After {items[at]} comes {items[at + 1]}."
    if form == 1:
        return f"What comes before {items[at + 1]}?", f"Before {items[at + 1]} comes {items[at]}."
    return f"Name the {name}.", f"The {name} are {', '.join(items[:-1])} and {items[-1]}."


def _spell(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(WORDS)
    form = rng.randrange(3)
    if form == 0:
        return f'Spell "{word}".', "-".join(word.upper())
    if form == 1:
        return f'What is the first letter of "{word}"?', f'The first letter is "{word[0]}".'
    return f'Write "{word}" in capital letters.', word.upper()


def _tell(rng: random.Random) -> tuple[str, str]:
    ask = rng.choice(
        ("Tell me a story.", "Tell me a short story.", "Write a story.", "Please tell me a story.")
    )
    return ask, stories.story(rng)


def _make_sentence(rng: random.Random) -> tuple[str, str]:
    thing, colour, place = (
        rng.choice(stories.THINGS),
        rng.choice(stories.COLOURS),
        rng.choice(stories.PLACES),
    )
    return (
        f'Make a sentence with the word "{thing}".',
        f"There is a {colour} {thing} in the {place}.",
    )


def _number(rng: random.Random) -> tuple[str, str]:
    n = rng.randrange(len(NUMBER_WORDS))
    if rng.random() < 0.5:
        return f"Write {n} in words.", NUMBER_WORDS[n]
    first = rng.randint(1, 20)
    last = first + rng.randint(3, 9)
    return (
        f"Count from {first} to {last}.",
        ", ".join(str(i) for i in range(first, last + 1)),
    )


def _list(rng: random.Random) -> tuple[str, str]:
    name, items = rng.choice(
        (
            ("animals", stories.ANIMALS),
            ("colours", stories.COLOURS),
            ("foods", stories.FOODS),
            ("places", stories.PLACES),
        )
    )
    count = rng.randint(2, 5)
    chosen = rng.sample(items, count)
    lines = "\n".join(f"{i + 1}. {x}" for i, x in enumerate(chosen))
    return f"List {NUMBER_WORDS[count]} {name}.", lines


def tell_story(rng: random.Random) -> Sample:
    head = f"{stories.title(rng)}\n\n" if rng.random() < 0.2 else ""
    text = head + stories.story(rng)
    cut = text.find(" ", 12)
    return Sample("story", text[:cut], text[cut:])


def short_sample(rng: random.Random, prose: Prose) -> Sample:
    """One document of the short stream (at most about 900 tokens)."""
    kind = rng.choices(
        ("story", "recall", "copy", "json", "order", "sums", "talk"),
        weights=(30, 16, 22, 22, 12, 22, 42),
    )[0]
    if kind == "recall":
        return recall(rng, prose, int(rng.triangular(40, 800, 250)))
    makers: dict[str, Callable[[], Sample]] = {
        "story": lambda: tell_story(rng),
        "copy": lambda: copy(rng, prose),
        "json": lambda: json_task(rng),
        "order": lambda: order(rng),
        "sums": lambda: sums(rng),
        "talk": lambda: talk(rng, prose),
    }
    return makers[kind]()


def long_sample(rng: random.Random, prose: Prose) -> Sample:
    """One recall document of 600 to 3800 tokens."""
    return recall(rng, prose, int(rng.triangular(600, 3800, 1500)))
