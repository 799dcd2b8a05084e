# SPDX-License-Identifier: Apache-2.0
"""The tree of kept blocks, against a plain list of prompts."""

from __future__ import annotations

import random

import pytest

from freewheel.host.runs import RunTree


def keys_of(tokens: str) -> list[bytes]:
    """Of each of a prompt's blocks, one letter each: all that comes before counts."""
    return [tokens[: at + 1].encode() for at in range(len(tokens))]


@pytest.mark.parametrize("seed", range(20))
def test_a_block_knows_its_place_through_branches_and_cuts(seed: int) -> None:
    chance, tree, kept = random.Random(seed), RunTree([1]), set[bytes]()
    for _ in range(60):
        keys = keys_of("".join(chance.choice("ab") for _ in range(chance.randrange(1, 9))))
        at = sum(stretch.blocks for stretch in tree.find(keys))
        assert at == len([key for key in keys if key in kept])
        if chance.random() < 0.3 and at:
            key = keys[chance.randrange(at)]
            run = tree.run(key)
            assert run is not None
            gone = {one for part in tree.cut(run, tree.place(key)) for one in part.keys}
            assert gone == {one for one in kept if one.startswith(key)}
            kept -= gone
        elif at < len(keys):
            tree.add(at, keys, keys, (list(range(at, len(keys))),))
            kept |= set(keys)
        assert {key for key, _, _ in tree} == kept and len(tree) == len(kept)
        for key, run, place in tree:
            assert run.keys[place] == key and tree.place(key) == place
            assert run.first + place == len(key) - 1
