# SPDX-License-Identifier: Apache-2.0
"""Streamed text equals the text decoded at once, whole characters only, cut at stop strings."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from freewheel.host import TextDelta, TextStream

SAMPLES = [
    "Emma Woodhouse, handsome, clever, and rich.",
    " leading and  double  spaces\n\n\ttabs",
    "emoji 😀👩‍👩‍👧‍👦🇩🇪 and 漢字かな交じり文 한국어",
    "combining e\u0301 n\u0303 \u0928\u093f\u0928\u094d and a real \ufffd mark",
    '{"json": [1, 2.5, null], "ключ": "значение"}',
]


def byte_level() -> Tokenizer:
    """Byte-level BPE with all 256 bytes, some merges within and across characters, and specials."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


TOKENIZER = byte_level()
VOCABULARY = TOKENIZER.get_vocab_size()


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


IDS = TOKENIZER.get_vocab()
BYTE_IDS = [IDS[letter] for letter in byte_letters()]


def as_bytes(text: str | bytes) -> list[int]:
    """One token for each byte."""
    raw = text.encode() if isinstance(text, str) else text
    return [BYTE_IDS[byte] for byte in raw]


def decode(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=True)


def decode_all(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


def run(
    stream: TextStream, ids: Sequence[int], sizes: Sequence[int] = (1,)
) -> tuple[str, list[TextDelta]]:
    """Push `ids` in runs of these sizes, over and over, and flush."""
    deltas: list[TextDelta] = []
    start, turn = 0, 0
    while start < len(ids):
        stop = start + sizes[turn % len(sizes)]
        deltas.append(stream.push(ids[start:stop]))
        start, turn = stop, turn + 1
    deltas.append(stream.flush())
    return "".join(delta.text for delta in deltas), deltas


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Brute force: the stop string that is complete first; of those, the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


TOKENS = st.one_of(
    st.lists(st.integers(0, VOCABULARY - 1), max_size=40),
    st.lists(st.sampled_from(BYTE_IDS), max_size=40),
    st.lists(st.sampled_from(as_bytes("a\u00e9漢😀") + as_bytes(b"\xff\xc0\x80")), max_size=40),
    st.text(max_size=12).map(as_bytes),
)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(TOKENS, SIZES, st.booleans())
@example(as_bytes(b"\xe0\x80"), [1], True)
@example(as_bytes(b"\xf0\x9f\x98\xf0\x9f\x98\x80"), [1], True)
@example(as_bytes(b"\x80" * 9 + b"\xf0\x9f\x98\x80" + b"\xed\xa0\x80\xf4\x90"), [1], True)
@example([*as_bytes(b"\xf0\x9f"), 0, 0, 0, 0, *as_bytes(b"\x98\x80")], [1], True)
def test_joined_deltas_equal_the_text_decoded_at_once(
    ids: list[int], sizes: list[int], skip: bool
) -> None:
    whole = decode if skip else decode_all
    text, deltas = run(TextStream(whole), ids, sizes)
    assert text == whole(ids)
    for delta in deltas:
        assert delta.text == "".join(piece for piece, _ in delta.pieces)
    indices = [index for delta in deltas for _, index in delta.pieces]
    assert indices == sorted(indices)
    assert deltas[-1].tokens_used == len(ids)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(TOKENS, SIZES, st.data(), st.booleans())
def test_the_text_is_cut_at_the_first_stop_string_whatever_the_runs(
    ids: list[int], sizes: list[int], data: st.DataObject, include: bool
) -> None:
    text = decode(ids)
    spans = st.tuples(st.integers(0, len(text)), st.integers(1, 4))
    inside = [text[at : at + size] for at, size in data.draw(st.lists(spans, max_size=3))]
    stops = [s for s in inside if s] + data.draw(
        st.lists(st.text("ab é😀", min_size=1), max_size=2)
    )
    got, deltas = run(TextStream(decode, stops, include), ids, sizes)
    found = first_stop(text, stops)
    if found is None:
        assert (got, deltas[-1].stopped) == (text, False)
        return
    assert got == text[: found[1] if include else found[0]]
    assert deltas[-1].stopped
    used = deltas[-1].tokens_used
    assert first_stop(decode(ids[:used]), stops) is not None
    settled = [decode(ids[:k]).removesuffix("\ufffd") for k in range(used)]
    assert all(first_stop(settled_text, stops) is None for settled_text in settled)


@pytest.mark.parametrize("sample", SAMPLES)
def test_streams_of_real_text_never_show_half_a_character(sample: str) -> None:
    for ids in (TOKENIZER.encode(sample).ids, as_bytes(sample)):
        text, deltas = run(TextStream(decode), ids)
        assert text == sample
        assert sum(delta.text.count("\ufffd") for delta in deltas) == sample.count("\ufffd")


def test_an_emoji_of_four_tokens_appears_with_the_fourth() -> None:
    stream = TextStream(decode)
    ids = as_bytes("a😀b")
    assert [stream.push([token]).text for token in ids] == ["a", "", "", "", "😀", "b"]


def test_an_unfinished_character_becomes_one_replacement_at_the_end() -> None:
    ids = as_bytes("a😀")[:3]
    stream = TextStream(decode)
    assert stream.push(ids).text == "a"
    assert stream.flush().text == "\ufffd"
    assert decode(ids) == "a\ufffd"


def test_each_piece_names_the_token_that_completed_it() -> None:
    stream = TextStream(decode, ["zz"])
    assert stream.push(as_bytes("ab")).pieces == (("a", 0), ("b", 1))
    assert stream.push(as_bytes("z")).pieces == ()
    assert stream.push(as_bytes("é")).pieces == (("z", 2), ("é", 4))


@pytest.mark.parametrize("size", [1, 2, 3, 9])
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_cuts_exactly_across_tokens_and_inside_a_run(
    size: int, include: bool
) -> None:
    text, deltas = run(TextStream(decode, ["XYZ"], include), as_bytes("abcXYZdef"), [size])
    assert text == ("abcXYZ" if include else "abc")
    assert (deltas[-1].stopped, deltas[-1].tokens_used) == (True, 6)


def test_what_only_begins_like_a_stop_string_is_released_whole() -> None:
    stream = TextStream(decode, ["XYQ"])
    texts = [stream.push([token]).text for token in as_bytes("abcXYZdef")]
    assert texts == ["a", "b", "c", "", "", "XYZ", "d", "e", "f"]
    assert run(TextStream(decode, ["XYQ"]), as_bytes("abcXY"))[0] == "abcXY"


def test_only_the_tail_that_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(decode, ["aab", "zzzzzzzz"])
    texts = [stream.push([token]).text for token in as_bytes("aaaab")]
    assert texts == ["", "", "a", "a", ""]
    assert stream.push(as_bytes("more")) == TextDelta("", (), True, 5, "aab")
    assert stream.flush() == TextDelta("", (), True, 5, "aab")


def test_a_stop_string_may_end_in_the_middle_of_a_token() -> None:
    (token,) = TOKENIZER.encode("handsome").ids[:1]
    word = decode([token])
    assert len(word) > 1
    stream = TextStream(decode, [word[0]])
    assert stream.push([*as_bytes("-"), token, *as_bytes("-")]) == TextDelta(
        "-", (("-", 0),), True, 2, word[0]
    )


def test_stop_strings_complete_before_min_tokens_do_not_count() -> None:
    ids = as_bytes("abababab")
    for minimum, want in ((0, ""), (2, ""), (3, "ab"), (5, "abab"), (20, "abababab")):
        text, deltas = run(TextStream(decode, ["ab"], min_tokens=minimum), ids, [3])
        assert text == want
        assert deltas[-1].stopped == (minimum < 20)
    assert TextStream(decode, ["ab", "zzzz"], min_tokens=3).push(ids[:2]).text == "ab"


def test_the_stop_string_that_is_complete_first_counts_though_one_token_brings_both() -> None:
    ids = TOKENIZER.encode("handsome").ids[:1]
    word = decode(ids)
    assert len(word) > 2
    assert run(TextStream(decode, [word, word[1]]), ids)[0] == word[0]
    assert run(TextStream(decode, [word, word[1:]]), ids)[0] == ""


def test_a_stop_string_inside_a_held_tail_that_did_not_count_does_not_count_later() -> None:
    assert run(TextStream(decode, ["xaby", "ab"], min_tokens=4), as_bytes("xabz"))[0] == "xabz"


def test_the_price_of_a_token_does_not_grow_with_the_output() -> None:
    rng = random.Random(0)
    samples = {
        "prose": TOKENIZER.encode(SAMPLES[0] * 200).ids,
        "stray": as_bytes(b"\x80") * 3000,
        "random": [rng.randrange(VOCABULARY) for _ in range(3000)],
        "nothing": [*as_bytes(b"\xf0"), *([0] * 3000)],
        "almost": as_bytes("z" * 3000),
    }
    for ids in samples.values():
        sizes: list[int] = []

        def counted(some: Sequence[int], sizes: list[int] = sizes) -> str:
            sizes.append(len(some))
            return decode(some)

        stream = TextStream(counted, ["zzzq"])
        for token in ids:
            before = len(sizes)
            stream.push([token])
            assert sum(sizes[before:]) <= 12
