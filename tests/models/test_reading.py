# SPDX-License-Identifier: Apache-2.0
"""Bytes reach their tensors once, whole and as what they mean, by either way."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from freewheel.errors import CheckpointError
from freewheel.models.header import StoredTensor, read_header
from freewheel.models.reading import MappedReader, Mapping, Reader, StagedReader

E8M0 = torch.float8_e8m0fnu
STORED = {
    "odd": torch.arange(7, dtype=torch.uint8),
    "bytes": torch.arange(250, dtype=torch.uint8),
    "signed": torch.arange(-60, 60, dtype=torch.int8),
    "powers": torch.tensor([0.25, 1.0, 64.0]).to(E8M0),
    "eights": torch.linspace(-448, 448, 300).to(torch.float8_e4m3fn),
    "halves": torch.linspace(-3, 3, 1000).bfloat16().view(10, 100),
    "wide": torch.linspace(-3, 3, 333),
    "ids": torch.arange(50),
    "nothing": torch.empty(0, 4),
}


@dataclass
class HostSlot:
    """A buffer of a few bytes that counts its turns, and whose copies are done at once."""

    buffer: Tensor = field(default_factory=lambda: torch.empty(96, dtype=torch.uint8))
    waited: int = 0
    busy: bool = False

    def wait(self) -> None:
        self.waited += 1
        self.busy = False

    def sent(self) -> None:
        assert not self.busy, "a buffer was filled before the device had taken what was in it"
        self.busy = True


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, StoredTensor]:
    file = tmp_path / "model.safetensors"
    save_file(STORED, file)
    return read_header(file)


@pytest.fixture(params=["mapped", "staged"])
def reader(request: pytest.FixtureRequest) -> Reader:
    if request.param == "mapped":
        return MappedReader(Mapping())
    return StagedReader((HostSlot(), HostSlot()))


@pytest.mark.parametrize("name", STORED)
def test_every_dtype_arrives_bit_for_bit(
    name: str, stored: dict[str, StoredTensor], reader: Reader
) -> None:
    want = STORED[name]
    found = torch.full_like(want.view(torch.uint8), 9).view(want.dtype)
    as_bytes = want.dtype in (torch.int8, E8M0)
    reader.read(stored[name], found.view(torch.uint8) if as_bytes else found)
    reader.close()
    assert torch.equal(found.view(torch.uint8), want.view(torch.uint8))


def test_a_byte_that_scales_is_a_power_of_two(
    stored: dict[str, StoredTensor], reader: Reader
) -> None:
    """Whether its dtype says so or it is a plain byte, where a number is asked for."""
    numbers, powers = torch.empty(3), torch.empty(7)
    reader.read(stored["powers"], numbers)
    reader.read(stored["odd"], powers)
    assert numbers.tolist() == [0.25, 1.0, 64.0]
    assert powers.tolist() == [2.0 ** (e - 127) for e in range(7)]


def test_numbers_are_cast_to_where_they_go(stored: dict[str, StoredTensor], reader: Reader) -> None:
    whole = torch.zeros(10, 100, 2, dtype=torch.float64)
    reader.read(stored["halves"], whole[..., 1])
    assert torch.equal(whole[..., 1], STORED["halves"].double())
    assert not whole[..., 0].any()


def test_buffers_take_turns(stored: dict[str, StoredTensor]) -> None:
    slots = (HostSlot(), HostSlot())
    reader = StagedReader(slots)
    target = torch.empty(10, 100, dtype=torch.bfloat16)
    reader.read(stored["halves"], target)
    turns = -(-2000 // 96)
    assert [slot.waited for slot in slots] == [(turns + 1) // 2, turns // 2]
    reader.close()
    assert not any(slot.busy for slot in slots)


def test_a_file_that_shrinks_meanwhile_is_named(stored: dict[str, StoredTensor]) -> None:
    file = stored["wide"].file
    file.write_bytes(file.read_bytes()[:-400])
    last = max(stored.values(), key=lambda s: s.start + s.size)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated while"):
        StagedReader((HostSlot(),)).read(last, torch.empty(last.size, dtype=torch.uint8))


def test_few_files_are_mapped_at_once(tmp_path: Path) -> None:
    """What a mapping has touched counts as memory of the process."""
    mapping, reader = Mapping(), StagedReader((HostSlot(),))
    for at in range(12):
        file = tmp_path / f"{at}.safetensors"
        save_file({"a": torch.full((3,), float(at))}, file)
        own = read_header(file)["a"]
        target = torch.empty(3)
        reader.read(own, target)
        assert target.tolist() == mapping.tensor(own).tolist() == [at] * 3
    assert len(mapping) <= 4 and len(reader) <= 4


def test_headers_agree_with_the_library(stored: dict[str, StoredTensor]) -> None:
    assert stored.keys() == STORED.keys()
    for name, tensor in STORED.items():
        own = stored[name]
        assert own.shape == tuple(tensor.shape)
        assert own.size == tensor.numel() * tensor.element_size()
