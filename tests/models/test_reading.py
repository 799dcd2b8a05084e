# SPDX-License-Identifier: Apache-2.0
"""Bytes reach their tensors once, whole and as what they mean, by either way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from freewheel.errors import CheckpointError
from freewheel.models.header import StoredTensor, read_header
from freewheel.models.reading import MappedReader, Mapping, Reader
from freewheel.models.staging import MOST_OPEN, StagedReader
from freewheel.nn.cut import Cut
from freewheel.spec.mesh import Share
from tests.waiting import PATIENCE

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
    """A buffer of a few bytes whose copies are done when the next one waits for them."""

    buffer: Tensor = field(default_factory=lambda: torch.empty(96, dtype=torch.uint8))
    sent: list[tuple[int, Tensor]] = field(default_factory=list)
    turns: int = 0

    def wait(self) -> None:
        for count, target in self.sent:
            target.copy_(self.buffer[:count])
        self.sent.clear()

    def send(self, count: int, target: Tensor) -> None:
        assert not self.sent, "a buffer was filled before the device had taken what was in it"
        self.sent.append((count, target))
        self.turns += 1


class PromptSlot(HostSlot):
    """Copies at once, as a stream looks to whoever comes behind on it."""

    def send(self, count: int, target: Tensor) -> None:
        super().send(count, target)
        self.wait()


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, StoredTensor]:
    file = tmp_path / "model.safetensors"
    save_file(STORED, file)
    return read_header(file)


@pytest.fixture(params=["mapped", "staged"])
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    own = MappedReader(Mapping()) if request.param == "mapped" else StagedReader(PromptSlot, 3)
    yield own
    own.close()


@pytest.mark.parametrize("name", STORED)
def test_every_dtype_arrives_bit_for_bit(
    name: str, stored: dict[str, StoredTensor], reader: Reader
) -> None:
    want = STORED[name]
    found = torch.full_like(want.view(torch.uint8), 9).view(want.dtype)
    as_bytes = want.dtype in (torch.int8, E8M0)
    reader.settle(reader.begin(stored[name], found.view(torch.uint8) if as_bytes else found))
    assert torch.equal(found.view(torch.uint8), want.view(torch.uint8))


def test_a_byte_that_scales_is_a_power_of_two(
    stored: dict[str, StoredTensor], reader: Reader
) -> None:
    """Whether its dtype says so or it is a plain byte, where a number is asked for."""
    numbers, powers = torch.empty(3), torch.empty(7)
    reader.settle(reader.begin(stored["powers"], numbers))
    reader.settle(reader.begin(stored["odd"], powers))
    assert numbers.tolist() == [0.25, 1.0, 64.0]
    assert powers.tolist() == [2.0 ** (e - 127) for e in range(7)]


CUTS = [
    Cut(Share(1, 2), -1),
    Cut(Share(3, 20), -1),
    Cut(Share(0, 2), -2),
    Cut(Share(4, 5), -2),
    Cut(Share(1, 2), -2, 5),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rank_s_part_arrives_alone(
    cut: Cut, dtype: torch.dtype, stored: dict[str, StoredTensor], reader: Reader
) -> None:
    target = torch.full(cut.shape((10, 100)), 9, dtype=dtype)
    reader.settle(reader.begin(stored["halves"], target, cut))
    assert torch.equal(target, cut.of(STORED["halves"]).to(dtype))


def test_numbers_are_cast_to_where_they_go(stored: dict[str, StoredTensor], reader: Reader) -> None:
    whole = torch.zeros(10, 100, 2, dtype=torch.float64)
    reader.settle(reader.begin(stored["halves"], whole[..., 1]))
    assert torch.equal(whole[..., 1], STORED["halves"].double())
    assert not whole[..., 0].any()


def test_buffers_take_turns(stored: dict[str, StoredTensor]) -> None:
    slots: list[HostSlot] = []

    def new_slot() -> HostSlot:
        slots.append(HostSlot())
        return slots[-1]

    reader = StagedReader(new_slot, 2)
    target = torch.empty(10, 100, dtype=torch.bfloat16)
    reader.settle(reader.begin(stored["halves"], target))
    assert len(slots) == 2 and all(slot.turns for slot in slots)
    assert sum(slot.turns for slot in slots) == -(-2000 // 96)
    reader.close()
    assert not any(slot.sent for slot in slots)
    assert torch.equal(target, STORED["halves"])


def test_one_tensor_does_not_wait_for_the_one_before(stored: dict[str, StoredTensor]) -> None:
    """All of them arrive, with fewer buffers than tensors, and no buffer more than are needed."""
    slots: list[HostSlot] = []

    def new_slot() -> HostSlot:
        slots.append(PromptSlot())
        return slots[-1]

    reader = StagedReader(new_slot, 5)
    found = {name: torch.zeros_like(want.view(torch.uint8)) for name, want in STORED.items()}
    for one in [reader.begin(stored[name], target) for name, target in found.items()]:
        reader.settle(one)
    reader.close()
    assert all(torch.equal(found[name], want.view(torch.uint8)) for name, want in STORED.items())
    assert len(slots) <= 5


def test_few_buffers_are_made_for_few_bytes(stored: dict[str, StoredTensor]) -> None:
    made: list[HostSlot] = []
    reader = StagedReader(lambda: made.append(PromptSlot()) or made[-1], 8)
    for _ in range(6):
        reader.settle(reader.begin(stored["odd"], torch.empty(7, dtype=torch.uint8)))
    reader.close()
    assert len(made) == 1


def test_a_file_that_shrinks_meanwhile_is_named(stored: dict[str, StoredTensor]) -> None:
    file = stored["wide"].file
    file.write_bytes(file.read_bytes()[:-400])
    last = max(stored.values(), key=lambda s: s.start + s.size)
    reader = StagedReader(PromptSlot, 2)
    begun = reader.begin(last, torch.empty(last.size, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated while"):
        reader.settle(begun)
    reader.close()


def test_a_file_that_shrinks_is_named_when_rows_of_it_are_read(
    stored: dict[str, StoredTensor],
) -> None:
    own = stored["halves"]
    own.file.write_bytes(own.file.read_bytes()[: own.start + 100])
    reader = StagedReader(PromptSlot, 2)
    begun = reader.begin(own, torch.empty(10, 5, dtype=torch.bfloat16), Cut(Share(3, 20), -1))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated while"):
        reader.settle(begun)
    reader.close()


def test_few_files_are_mapped_or_open_at_once(tmp_path: Path) -> None:
    """What a mapping has touched counts as memory of the process."""
    mapping, reader = Mapping(), StagedReader(PromptSlot, 1)
    for at in range(40):
        file = tmp_path / f"{at}.safetensors"
        save_file({"a": torch.full((3,), float(at))}, file)
        own = read_header(file)["a"]
        target = torch.empty(3)
        reader.settle(reader.begin(own, target))
        assert target.tolist() == mapping.tensor(own).tolist() == [at] * 3
    assert len(mapping) <= 4 and len(reader) <= MOST_OPEN
    reader.close()


def test_a_process_ends_though_a_reader_was_never_closed() -> None:
    script = (
        "import torch; from types import SimpleNamespace; "
        "from freewheel.models.staging import StagedReader; "
        "StagedReader(lambda: SimpleNamespace(buffer=torch.empty(8)), 2, 2)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", script], check=False, timeout=PATIENCE, env=environment
    )
    assert ran.returncode == 0


def test_what_stops_a_thread_is_raised_where_bytes_are_awaited(
    stored: dict[str, StoredTensor],
) -> None:
    class Broken(PromptSlot):
        def send(self, count: int, target: Tensor) -> None:
            raise ZeroDivisionError

    reader = StagedReader(Broken, 2, 2)
    begun = reader.begin(stored["wide"], torch.empty(333))
    with pytest.raises(ZeroDivisionError):
        reader.settle(begun)
    reader.close()


def test_headers_agree_with_the_library(stored: dict[str, StoredTensor]) -> None:
    assert stored.keys() == STORED.keys()
    for name, tensor in STORED.items():
        own = stored[name]
        assert own.shape == tuple(tensor.shape)
        assert own.size == tensor.numel() * tensor.element_size()
