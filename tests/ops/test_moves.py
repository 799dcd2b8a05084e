# SPDX-License-Identifier: Apache-2.0
"""The instructions that widen stored codes in registers, evaluated for every code.

Triton's interpreter does not run them, and a card is seldom at hand.
"""

from __future__ import annotations

import functools
import re
import struct
from pathlib import Path

import torch

import freewheel

KERNELS = Path(freewheel.__file__).parent / "ops" / "cuda"
WORD = 0xFFFFFFFF
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@functools.cache
def instructions(file: str) -> list[tuple[str, list[str]]]:
    """(operation, operands) of the assembly in a file of kernels, alike wherever it stands."""
    text, *others = re.findall(r'"""\s*\{(.*?)\}\s*"""', (KERNELS / file).read_text(), re.S)
    assert all(other == text for other in others)
    found = [re.match(r"\s*([a-z0-9.]+) (.*);", line) for line in text.splitlines()]
    lines = [(m.group(1), m.group(2).split(", ")) for m in found if m]
    return [(operation, operands) for operation, operands in lines if operation != ".reg"]


def evaluate(file: str, word: int, source: str) -> dict[str, int]:
    """The registers after the assembly has run on a word in register `source`."""
    registers = {source: word}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for operation, (target, *operands) in instructions(file):
        a, b, *rest = (value(operand) for operand in operands)
        match operation.split(".")[0]:
            case "shl":
                registers[target] = a << b & WORD
            case "shr":
                registers[target] = a >> b
            case "and":
                registers[target] = a & b
            case "lop3":
                assert rest[1] == 0xEA  # (a & b) | c
                registers[target] = a & b | rest[0]
            case "prmt":
                both = a | b << 32
                picked = [both >> 8 * (rest[0] >> 4 * n & 7) & 0xFF for n in range(4)]
                registers[target] = int.from_bytes(picked, "little")
            case other:
                raise AssertionError(f"no meaning is given here to {other}")
    return registers


def halves(*words: int) -> list[float]:
    """The two bfloat16 of each word, the low one first."""
    bits = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in bits]


def words() -> list[list[int]]:
    """Four codes at a time: every code at every byte, beside unlike ones."""
    return [[code, 255 - code, code ^ 0x5A, (code * 7 + 3) % 256] for code in range(256)] + [
        [(code * 7 + 3) % 256, code ^ 0x5A, 255 - code, code] for code in range(256)
    ]


def test_every_finite_fp8_code_keeps_its_value_but_for_a_power_of_two() -> None:
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    for codes in words():
        after = evaluate("streaming.py", int.from_bytes(codes, "little"), "$2")
        for code, found in zip(codes, halves(after["$0"], after["$1"]), strict=True):
            if code & 0x7F != 0x7F:
                assert found * 2.0**120 == table[code]


def test_both_fp4_codes_of_every_byte_keep_their_values_but_for_a_power_of_two() -> None:
    for codes in words():
        after = evaluate("mxfp4_experts.py", int.from_bytes(codes, "little"), "$4")
        low, high = halves(after["$0"], after["$1"]), halves(after["$2"], after["$3"])
        for code, one, other in zip(codes, low, high, strict=True):
            assert one * 2.0**126 == FP4[code & 15]
            assert other * 2.0**126 == FP4[code >> 4]
