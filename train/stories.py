# SPDX-License-Identifier: Apache-2.0
"""Small template stories: our own text, simple English, one named hero and one object each."""

from __future__ import annotations

import random
from dataclasses import dataclass

GIRLS = (
    "Emma Anna Mary Lucy Jane Rose Clara Ella Alice Nora Ruth Sara Lily Grace Molly Ivy "
    "Hannah Julia Martha Fanny"
).split()
BOYS = (
    "Tom Ben Jack Sam Peter Henry Will George Hugo Max Leo Adam Paul James Oscar Finn "
    "Simon Robert Frank Noah"
).split()
ANIMALS = "fox dog cat bear mouse rabbit owl frog duck goat horse hen crow wolf deer".split()
PLACES = (
    "garden forest river hill village market beach barn meadow castle harbour mill bridge lake "
    "library kitchen"
).split()
THINGS = (
    "ball kite hat book lamp key box drum coat cup basket bell map boat ring clock whistle "
    "letter spoon mirror"
).split()
COLOURS = "red blue green yellow white black brown silver golden grey".split()
FOODS = "bread apples soup cake honey cheese plums berries pie milk nuts pears".split()
FEELINGS = "happy glad proud pleased cheerful".split()
WEATHER = "sunny cold windy rainy warm cloudy snowy bright".split()
VIRTUES = {
    "kind": "It costs little to be kind.",
    "brave": "Being brave is not the same as being without fear.",
    "patient": "Good things come to those who wait.",
    "honest": "An honest word is worth more than gold.",
    "careful": "A careful hand saves much trouble.",
}


@dataclass(frozen=True)
class Hero:
    name: str
    he: str
    him: str
    his: str
    kind: str


def hero(rng: random.Random) -> Hero:
    if rng.random() < 0.25:
        animal = rng.choice(ANIMALS)
        return Hero(f"the little {animal}", "it", "it", "its", animal)
    if rng.random() < 0.5:
        return Hero(rng.choice(GIRLS), "she", "her", "her", "girl")
    return Hero(rng.choice(BOYS), "he", "him", "his", "boy")


def story(rng: random.Random) -> str:
    """One story of about 60 to 200 words."""
    arc = rng.choice((_lost, _share, _rescue, _grow, _quarrel, _journey, _fear, _trade))
    opening, body = arc(rng)
    parts = [opening, *body]
    if rng.random() < 0.6:
        parts.append(VIRTUES[rng.choice(tuple(VIRTUES))])
    if rng.random() < 0.3:
        parts.append("The end.")
    lines = [_sentence(p) for p in parts]
    middle = len(lines) // 2
    if rng.random() < 0.5:
        return " ".join(lines[:middle]) + "\n\n" + " ".join(lines[middle:])
    return " ".join(lines)


def title(rng: random.Random) -> str:
    return f"The {rng.choice(COLOURS)} {rng.choice(THINGS)}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _start(rng: random.Random, h: Hero, place: str) -> str:
    who = f"a {h.kind} named {h.name}" if not h.name.startswith("the ") else f"a little {h.kind}"
    return rng.choice(
        (
            f"Once upon a time there was {who}, who lived near the {place}.",
            f"Long ago, in a house by the {place}, there lived {who}.",
            f"One {rng.choice(WEATHER)} morning {h.name} went to the {place}.",
            f"It was a {rng.choice(WEATHER)} day, and {h.name} wanted to go to the {place}.",
            f"Every day {h.name} walked to the {place}, and every day {h.he} sang a song.",
        )
    )


def _end(rng: random.Random, h: Hero) -> str:
    return rng.choice(
        (
            f"From that day on {h.name} was never sad again.",
            f"{h.name} was very {rng.choice(FEELINGS)}, and so was everyone else.",
            f"That night {h.name} slept very well.",
            f"And {h.name} never forgot that day.",
            f"{h.name} went home and told the whole story at supper.",
        )
    )


def _friend(rng: random.Random, h: Hero) -> Hero:
    other = hero(rng)
    while other.name == h.name:
        other = hero(rng)
    return other


def _lost(rng: random.Random) -> tuple[str, list[str]]:
    h, place, other = hero(rng), rng.choice(PLACES), rng.choice(PLACES)
    thing, colour = rng.choice(THINGS), rng.choice(COLOURS)
    f = _friend(rng, h)
    where = rng.choice(("under a stone", "behind a tree", "beside the door", "in the grass"))
    return _start(rng, h, place), [
        f"{h.name} had a {colour} {thing}, and {h.he} loved it more than anything.",
        f'One day the {colour} {thing} was gone. "Where is my {thing}?" cried {h.name}.',
        f"{h.he} looked in the {place}, but it was not there.",
        f"{h.he} looked near the {other}, but it was not there.",
        f'Then {f.name} came by. "Why do you cry?" asked {f.name}.',
        f'"I have lost my {colour} {thing}," said {h.name}.',
        f'"I will help you," said {f.name}, and they looked together.',
        f"At last they found the {thing} {where}.",
        f'"Thank you," said {h.name}. "You are a good friend."',
        _end(rng, h),
    ]


def _share(rng: random.Random) -> tuple[str, list[str]]:
    h, place, food = hero(rng), rng.choice(PLACES), rng.choice(FOODS)
    f = _friend(rng, h)
    return _start(rng, h, place), [
        f"{h.name} had a basket of {food}, and {h.he} was going to eat it all.",
        f"On the way {h.he} met {f.name}, who was hungry.",
        f'"Please give me some of your {food}," said {f.name}.',
        f'At first {h.name} said, "No, the {food} is mine."'
        if rng.random() < 0.5
        else f"{h.name} thought about it for a moment.",
        f"But then {h.he} looked at {f.name} and felt sorry.",
        f'"Take half of it," said {h.name}, and they sat down and ate the {food} together.',
        f'"It tastes better when we share it," said {f.name}.',
        _end(rng, h),
    ]


def _rescue(rng: random.Random) -> tuple[str, list[str]]:
    h, place, animal = hero(rng), rng.choice(PLACES), rng.choice(ANIMALS)
    tool = rng.choice(("a long rope", "a strong stick", "an old ladder", "a wooden box"))
    return _start(rng, h, place), [
        f"There {h.he} heard a small voice. It was a {animal}, and it had fallen into a hole.",
        f'"Help me!" cried the {animal}. "I cannot get out."',
        f'"Do not be afraid," said {h.name}. "I will come back soon."',
        f"{h.name} ran home and fetched {tool}.",
        f"With {tool} {h.he} pulled the {animal} out of the hole.",
        f'"You have saved my life," said the {animal}. "I will always be your friend."',
        _end(rng, h),
    ]


def _grow(rng: random.Random) -> tuple[str, list[str]]:
    h, place, days = hero(rng), rng.choice(PLACES), rng.randint(3, 9)
    plant = rng.choice(("flower", "tree", "bean", "pumpkin", "rose"))
    return _start(rng, h, place), [
        f"{h.name} found a seed and put it into the ground.",
        f"{h.he} gave it water every morning and every evening.",
        "The first day nothing happened. The second day nothing happened.",
        f"{h.name} waited for {days} days, and still {h.he} gave it water.",
        f"Then, on a {rng.choice(WEATHER)} morning, a little green leaf came out of the ground.",
        f'"Look!" cried {h.name}. "My {plant} is growing!"',
        f"The {plant} grew and grew, until it was taller than the house.",
        _end(rng, h),
    ]


def _quarrel(rng: random.Random) -> tuple[str, list[str]]:
    h, place = hero(rng), rng.choice(PLACES)
    f = _friend(rng, h)
    colour, thing = rng.choice(COLOURS), rng.choice(THINGS)
    return _start(rng, h, place), [
        f"{h.name} and {f.name} found a {colour} {thing} on the road.",
        f'"It is mine, because I saw it first," said {h.name}.',
        f'"No, it is mine, because I took it up," said {f.name}.',
        "They were so angry that they did not speak for the whole day.",
        f'In the evening {h.name} said, "I am sorry. A {thing} is only a {thing}, but you are '
        'my friend."',
        f'"I am sorry too," said {f.name}. "Let us use it together."',
        f"So {h.name} had the {thing} in the morning, and {f.name} had it in the evening.",
        _end(rng, h),
    ]


def _journey(rng: random.Random) -> tuple[str, list[str]]:
    h, place, goal = hero(rng), rng.choice(PLACES), rng.choice(PLACES)
    thing, food = rng.choice(THINGS), rng.choice(FOODS)
    return _start(rng, h, place), [
        f'"Today I will go to the {goal}," said {h.name}.',
        f"{h.he} took {h.his} {thing} and some {food}, and set out early.",
        f"First {h.he} came to a river, and {h.he} crossed it by the old bridge.",
        f"Then {h.he} came to a hill, and {h.he} climbed to the top of it.",
        f"When the sun went down, {h.name} saw the {goal} at last.",
        f"It was more beautiful than {h.he} had thought.",
        f"There {h.he} sat down and ate the {food}, and looked at the stars.",
        _end(rng, h),
    ]


def _fear(rng: random.Random) -> tuple[str, list[str]]:
    h, place, thing = hero(rng), rng.choice(PLACES), rng.choice(THINGS)
    cause = rng.choice(("the wind", "an old cat", "the branch of a tree", "a sleepy owl"))
    return _start(rng, h, place), [
        f"At night {h.name} was afraid of the dark.",
        f'One night {h.he} heard a noise at the window. "Who is there?" asked {h.name}.',
        "Nobody answered, but the noise came again.",
        f"{h.name} took {h.his} {thing} and went slowly to the window.",
        f"{h.he} opened it, and what did {h.he} see? It was only {cause}.",
        f"{h.name} laughed. After that {h.he} was not afraid of the dark any more.",
        _end(rng, h),
    ]


def _trade(rng: random.Random) -> tuple[str, list[str]]:
    h, place = hero(rng), rng.choice(PLACES)
    have, want, more = rng.sample(THINGS, 3)
    f = _friend(rng, h)
    return _start(rng, h, place), [
        f"{h.name} had a {have}, but {h.he} wanted a {want}.",
        f'{f.name} had a {want}. "Give me your {want}, and I will give you my {have}," said '
        f"{h.name}.",
        f'"A {have} is good," said {f.name}, "but I want a {more}."',
        f"So {h.name} went to the market and gave the {have} for a {more}.",
        f"Then {h.he} gave the {more} to {f.name}, and {f.name} gave {h.him} the {want}.",
        f"Now {h.name} had a {want}, and {f.name} had a {more}, and both were content.",
        _end(rng, h),
    ]
