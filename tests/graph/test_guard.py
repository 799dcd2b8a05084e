# SPDX-License-Identifier: Apache-2.0
"""`no_host_sync`: which idioms are a host read, and who is named for one."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from freewheel.errors import CaptureError, HostSync
from freewheel.graph import SyncLog, count_host_reads, no_host_sync, trace_on_meta

Idiom = Callable[[Tensor, Tensor, Tensor], object]  # x int32 [4], mask bool [4], z int32 []

ILLEGAL: dict[str, Idiom] = {
    "z.item()": lambda x, mask, z: z.item(),
    "int(z)": lambda x, mask, z: int(z),
    "float(z)": lambda x, mask, z: float(z),
    "bool(z)": lambda x, mask, z: bool(z),
    "x.tolist()": lambda x, mask, z: x.tolist(),
    "x.numpy()": lambda x, mask, z: x.numpy(),
    "np.asarray(x)": lambda x, mask, z: np.asarray(x),
    "range(z)": lambda x, mask, z: range(z),  # pyright: ignore[reportArgumentType]
    "list[z]": lambda x, mask, z: [1, 2, 3][z],  # pyright: ignore
    "for v in x: int(v)": lambda x, mask, z: [int(v) for v in x],
    "x[:z]": lambda x, mask, z: x[:z],
    "x.cpu()": lambda x, mask, z: x.cpu(),
    "x.to('cpu')": lambda x, mask, z: x.to("cpu"),
    "f'{x}'": lambda x, mask, z: f"{x}",
    "3 in x": lambda x, mask, z: 3 in x,
    "x[mask]": lambda x, mask, z: x[mask],
    "x[mask] = 0": lambda x, mask, z: x.clone().__setitem__(mask, 0),
    "mask.nonzero()": lambda x, mask, z: mask.nonzero(),
    "torch.where(mask)": lambda x, mask, z: torch.where(mask),
    "x.masked_select(mask)": lambda x, mask, z: x.masked_select(mask),
    "x.unique()": lambda x, mask, z: x.unique(),
    "torch.repeat_interleave(x, x)": lambda x, mask, z: torch.repeat_interleave(x, x),
    "torch.bincount(x)": lambda x, mask, z: torch.bincount(x),
    "torch.equal(x, x)": lambda x, mask, z: torch.equal(x, x),
    "1 if mask.all() else 0": lambda x, mask, z: 1 if mask.all() else 0,
    "torch.tensor([..])": lambda x, mask, z: torch.tensor([1, 2], device=x.device),
    "torch.arange(int(z))": lambda x, mask, z: torch.arange(int(z)),
    "torch.full((2,), z.item())": lambda x, mask, z: torch.full((2,), z.item()),
    "x.__dlpack__()": lambda x, mask, z: x.__dlpack__(),
    "arange without device=": lambda x, mask, z: x + torch.arange(4, dtype=torch.int32),
}
ONLY_ON_META = {"arange without device="}

MORE_ILLEGAL: dict[str, Idiom] = {
    "torch.nonzero(mask)": lambda x, mask, z: torch.nonzero(mask),
    "x[z]": lambda x, mask, z: x[z],
    "x[z] = 1": lambda x, mask, z: x.clone().__setitem__(z, 1),
    "x[0] = torch.tensor(3)": lambda x, mask, z: x.clone().__setitem__(0, torch.tensor(3)),
    "not z": lambda x, mask, z: not z,
    "max(list of tensors)": lambda x, mask, z: max([x[0], x[1]]),
    "print(x)": lambda x, mask, z: repr(x),
    "torch.Tensor([..])": lambda x, mask, z: torch.Tensor([1.0, 2.0]),
    "torch.as_tensor([..])": lambda x, mask, z: torch.as_tensor([1, 2]),
    "torch.as_tensor(data=..)": lambda x, mask, z: torch.as_tensor(data=[1, 2]),
    "torch.from_numpy": lambda x, mask, z: torch.from_numpy(np.zeros(2)),
    "x.new_tensor([..])": lambda x, mask, z: x.new_tensor([1, 2]),
    "torch.allclose(x, x)": lambda x, mask, z: torch.allclose(x.float(), x.float()),
    "torch.is_nonzero(z)": lambda x, mask, z: torch.is_nonzero(z),
    "x.unique_consecutive()": lambda x, mask, z: x.unique_consecutive(),
    "torch.argwhere(mask)": lambda x, mask, z: torch.argwhere(mask),
    "one_hot without a count": lambda x, mask, z: torch.nn.functional.one_hot(x.long()),
    "split by a tensor": lambda x, mask, z: x.split(z.tolist()),
    "torch.linalg.inv": lambda x, mask, z: torch.linalg.inv(torch.eye(3, device=x.device)),
}

LEGAL: dict[str, Idiom] = {
    "torch.where(mask, x, x)": lambda x, mask, z: torch.where(mask, x, x),
    "gather": lambda x, mask, z: x.gather(0, x.long().clamp(max=3)),
    "cumsum": lambda x, mask, z: x.cumsum(0),
    "x[int_ids]": lambda x, mask, z: x[x.long()],
    "index_put": lambda x, mask, z: x.clone().index_put_((x.long(),), z),
    "topk": lambda x, mask, z: x.topk(2),
    "argmax": lambda x, mask, z: x.argmax(),
    "repeat_interleave(x, 3)": lambda x, mask, z: torch.repeat_interleave(x, 3),
    "torch.full": lambda x, mask, z: torch.full((3,), 2, device=x.device),
    "exponential_": lambda x, mask, z: torch.empty(4, device=x.device).exponential_(),
}

MORE_LEGAL: dict[str, Idiom] = {
    "len(x), x.shape, x.numel()": lambda x, mask, z: (len(x), x.shape, x.numel(), x.stride(0)),
    "for v in x": lambda x, mask, z: [v + 1 for v in x],
    "x[0] = 3": lambda x, mask, z: x.clone().__setitem__(0, 3),
    "x[1:3] = 0": lambda x, mask, z: x.clone().__setitem__(slice(1, 3), 0),
    "x[int_ids] = 0": lambda x, mask, z: x.clone().__setitem__(x.long(), 0),
    "x[0] = z": lambda x, mask, z: x.clone().__setitem__(0, z),
    "masked_fill": lambda x, mask, z: x.masked_fill(mask, 0),
    "a cast": lambda x, mask, z: (x.to(torch.float32), x.double(), x.to(z), x.type_as(z)),
    "a tensor as a tensor": lambda x, mask, z: (torch.as_tensor(x), torch.asarray(x)),
    "data_ptr": lambda x, mask, z: x.data_ptr(),
    "where with numbers": lambda x, mask, z: torch.where(mask, 1.0, -torch.inf),
    "a repeat of known length": lambda x, mask, z: torch.repeat_interleave(x, x, output_size=6),
    "identity": lambda x, mask, z: (x is z, hash(x), x.dim(), x.is_contiguous()),
    "softmax, matmul, einsum": lambda x, mask, z: torch.einsum(
        "i,j->ij", x.float().softmax(0), x.float()
    ),
}


def _operands() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.arange(4, dtype=torch.int32)
    mask = torch.tensor([True, False, True, True])
    return x, mask, torch.ones((), dtype=torch.int32)


def _meta_operands() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.empty(4, dtype=torch.int32, device="meta")
    mask = torch.empty(4, dtype=torch.bool, device="meta")
    return x, mask, torch.empty((), dtype=torch.int32, device="meta")


def test_the_table_holds_thirty_illegal_and_ten_legal_idioms() -> None:
    assert (len(ILLEGAL), len(LEGAL), len(ONLY_ON_META)) == (30, 10, 1)


@pytest.mark.parametrize("name", [*(ILLEGAL.keys() - ONLY_ON_META), *MORE_ILLEGAL])
def test_an_illegal_idiom_raises_under_the_guard(name: str, grad_mode: Callable[[], Any]) -> None:
    idiom, operands = (ILLEGAL | MORE_ILLEGAL)[name], _operands()
    with grad_mode(), no_host_sync(), pytest.raises(HostSync, match=r"test_guard\.py:\d+"):
        idiom(*operands)


@pytest.mark.parametrize("name", [*ILLEGAL, *MORE_ILLEGAL])
def test_an_illegal_idiom_raises_in_the_meta_trace(name: str, grad_mode: Callable[[], Any]) -> None:
    idiom = (ILLEGAL | MORE_ILLEGAL)[name]
    with grad_mode(), pytest.raises((HostSync, CaptureError), match=r"test_guard\.py:\d+"):
        trace_on_meta(idiom, *_meta_operands())


@pytest.mark.parametrize("name", [*LEGAL, *MORE_LEGAL])
def test_a_legal_idiom_passes_both(name: str, grad_mode: Callable[[], Any]) -> None:
    idiom, operands = (LEGAL | MORE_LEGAL)[name], _operands()
    with grad_mode():
        with no_host_sync() as log:
            idiom(*operands)
        trace_on_meta(idiom, *_meta_operands())
    assert log == SyncLog()


def test_a_forgotten_device_is_invisible_to_the_guard_where_the_cpu_is_the_device() -> None:
    (name,), operands = ONLY_ON_META, _operands()
    with no_host_sync():
        ILLEGAL[name](*operands)


@pytest.mark.parametrize("name", [*(ILLEGAL.keys() - ONLY_ON_META), *MORE_ILLEGAL])
def test_counting_records_what_raising_would_raise(name: str, grad_mode: Callable[[], Any]) -> None:
    idiom = (ILLEGAL | MORE_ILLEGAL)[name]
    x, mask, z = _operands()
    with grad_mode():
        expected = idiom(x, mask, z) if "split" not in name else None
        with count_host_reads() as log:
            got = idiom(x, mask, z) if "split" not in name else z.tolist()
    assert log.reads or log.copies
    assert {event.file for event in (*log.reads, *log.copies)} == {__file__}
    if isinstance(expected, (bool, int, float, list, str)):
        assert got == expected


def test_one_read_is_counted_once_however_deep_it_goes() -> None:
    x, _, z = _operands()
    with count_host_reads() as log:
        x.tolist()
        f"{z}"
        bool(z)
        for v in x:
            int(v)
    ops = [read.op for read in log.reads]
    assert ops[:3] == ["Tensor.tolist", "Tensor.__format__", "Tensor.__bool__"]
    assert ops[3:] == ["Tensor.__int__"] * 4
    assert log.copies == []


def test_a_read_and_an_upload_are_told_apart() -> None:
    x, _, _ = _operands()
    with count_host_reads() as log:
        x.cpu()
        torch.tensor([1, 2])
    assert [read.op for read in log.reads] == ["Tensor.cpu"]
    assert [(c.op, c.source, c.target) for c in log.copies] == [("torch.tensor", "cpu", "cpu")]


def test_a_copy_between_devices_is_recorded_with_its_ends() -> None:
    x = torch.ones(4)
    with count_host_reads() as log:
        x.to("meta")
        torch.empty(4, device="meta").copy_(x)
    ends = [(c.op, c.source, c.target) for c in log.copies]
    assert ends == [("Tensor.to", "cpu", "meta"), ("aten::copy_", "cpu", "meta")]
    for move in (lambda: x.to("meta"), lambda: x.to(torch.empty(1, device="meta"))):
        with no_host_sync(), pytest.raises(HostSync, match="from cpu to meta"):
            move()


def test_only_the_watched_device_counts() -> None:
    x, mask, z = _operands()
    with no_host_sync(device="meta") as log:
        x.tolist()
        x[mask]
        torch.tensor([1, 2])
        bool(z)
        with pytest.raises(HostSync):
            torch.tensor([1, 2], device="meta")
        with pytest.raises(HostSync):
            torch.as_tensor([1, 2], device="meta")
        with pytest.raises(HostSync):
            torch.empty(4, device="meta").nonzero()
    assert [read.op for read in log.reads] == ["aten::nonzero"]
    assert len(log.copies) == 2


def _inner(x: Tensor) -> float:
    return x.sum().item()


def _outer(x: Tensor) -> float:
    return _inner(x)


def _line_of(function: Callable[..., object]) -> int:
    return inspect.getsourcelines(function)[1] + 1


def test_the_error_names_the_line_of_the_read_in_a_nested_function() -> None:
    with no_host_sync(), pytest.raises(HostSync) as caught:
        _outer(torch.ones(3))
    assert f"Tensor.item reads a device value on the host, at {__file__}:{_line_of(_inner)}" in str(
        caught.value
    )


def test_the_log_names_the_line_of_a_read_inside_pytorch_code() -> None:
    """`Tensor.unique` is Python code of PyTorch; the caller is to blame, not PyTorch."""

    def user(x: Tensor) -> Tensor:
        return x.unique()

    with count_host_reads() as log:
        user(torch.ones(3))
    assert [(r.file, r.line) for r in log.reads] == [(__file__, _line_of(user))]


def test_if_and_while_on_a_tensor_raise() -> None:
    def branch(x: Tensor) -> int:
        if x.sum() > 3:
            return 1
        return 0

    def loop(x: Tensor) -> Tensor:
        while x.sum() < 3:
            x = x + 1
        return x

    for function in (branch, loop):
        with no_host_sync(), pytest.raises(HostSync) as caught:
            function(torch.ones(3))
        assert f"{__file__}:{_line_of(function)}" in str(caught.value)


def test_the_guard_is_gone_after_an_error_and_the_value_is_readable() -> None:
    z = torch.ones(())
    with pytest.raises(HostSync), no_host_sync():
        z.item()
    assert z.item() == 1
    with pytest.raises(ZeroDivisionError), no_host_sync():
        _ = 1 // 0
    assert z.tolist() == 1


def test_the_guard_still_guards_after_a_caught_error() -> None:
    z = torch.ones(())
    with no_host_sync():
        for _ in range(2):
            with pytest.raises(HostSync):
                z.item()
            with pytest.raises(HostSync):
                torch.nonzero(z)


def test_guards_nest_and_the_outer_one_survives_the_inner_one() -> None:
    z = torch.ones(())
    with no_host_sync():
        with no_host_sync(), pytest.raises(HostSync):
            z.item()
        with pytest.raises(HostSync):
            z.item()
    assert z.item() == 1


def test_a_raising_guard_inside_a_counting_one_leaves_nothing_to_count() -> None:
    z = torch.ones(())
    with count_host_reads() as log:
        with no_host_sync(), pytest.raises(HostSync):
            z.item()
        z.item()
    assert len(log.reads) == 1


def test_counters_nest_and_both_count() -> None:
    z = torch.ones(())
    with count_host_reads() as outer:
        z.item()
        with count_host_reads() as inner:
            z.item()
            z.nonzero()
    assert (len(outer.reads), len(inner.reads)) == (3, 2)


def test_a_log_can_span_several_blocks() -> None:
    z, log = torch.ones(()), SyncLog()
    for _ in range(2):
        with no_host_sync(raise_=False, log=log):
            z.item()
    assert len(log.reads) == 2


def test_it_decorates_a_function() -> None:
    @no_host_sync()
    def read(z: Tensor) -> object:
        return z.item()

    for _ in range(2):
        with pytest.raises(HostSync):
            read(torch.ones(()))


def test_another_thread_is_not_guarded() -> None:
    """Modes are thread-local: documented, and pinned here."""
    z, seen = torch.ones(()), list[object]()
    with no_host_sync():
        thread = threading.Thread(target=lambda: seen.append(z.item()))
        thread.start()
        thread.join()
    assert seen == [1.0]


@pytest.fixture
def library():
    made = torch.library.Library("freewheel_guard_test", "DEF")
    made.define("peek(Tensor x) -> Tensor")
    made.define("length(Tensor x) -> int")
    made.impl("peek", lambda x: x + x.max().item(), "CompositeExplicitAutograd")
    made.impl("length", lambda x: int(x.sum()), "CompositeExplicitAutograd")
    yield torch.ops.freewheel_guard_test
    made._destroy()


def test_the_body_of_an_operator_is_opaque(library: Any, grad_mode: Callable[[], Any]) -> None:
    with grad_mode(), no_host_sync() as log:
        assert library.peek(torch.ones(2)).shape == (2,)
    assert log == SyncLog()


def test_an_operator_that_returns_a_number_reads(
    library: Any, grad_mode: Callable[[], Any]
) -> None:
    with grad_mode(), no_host_sync(), pytest.raises(HostSync, match="freewheel_guard_test::length"):
        library.length(torch.ones(2))
