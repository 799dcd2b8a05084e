# SPDX-License-Identifier: Apache-2.0
"""Products in fixed blocks: a token's bits do not depend on how many others there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from freewheel import LLM, SamplingParams, ops
from freewheel.config import EngineConfig
from freewheel.errors import ConfigError
from freewheel.graph import TapeGraph
from freewheel.graph.dispatch import DispatchMode, OpOverload
from freewheel.runtime import deterministic
from freewheel.runtime.deterministic import (
    BLOCK,
    PIECE,
    WIDE_BLOCK,
    FixedBlocks,
    in_fixed_blocks,
)

INPUTS, OUTPUTS, HEADS = 48, 40, 3


def weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(OUTPUTS, INPUTS, generator=generator),
        torch.randn(HEADS, INPUTS, OUTPUTS, generator=generator),
    )


def products(x: Tensor) -> tuple[Tensor, ...]:
    """Every kind of product that a model makes of tokens x [B, W, INPUTS]."""
    flat, by_head = weights()
    heads = x[:, :, None, :].expand(-1, -1, HEADS, -1)
    return (
        F.linear(x, flat),
        F.linear(x, flat, torch.ones(OUTPUTS)),
        torch.einsum("bwhn,hnc->bwhc", heads, by_head),
        ops.wide_linear(x.bfloat16(), flat),
        x.double() @ flat.double().T,
    )


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_a_token_s_products_are_the_same_bits_in_any_company(tokens: int, inference: bool) -> None:
    x = torch.randn(2, tokens, INPUTS, generator=torch.Generator().manual_seed(tokens))
    with torch.inference_mode(inference), FixedBlocks():
        together = products(x)
        for b, w in ((0, 0), (1, tokens - 1), (1, tokens // 2)):
            alone = products(x[b : b + 1, w : w + 1])
            for one, many in zip(alone, together, strict=True):
                assert torch.equal(one[0, 0], many[b, w])
    for blocked, plain in zip(together, products(x), strict=True):
        torch.testing.assert_close(blocked, plain)


@pytest.mark.parametrize("tokens", [1, BLOCK, 2 * BLOCK + 5])
def test_ops_with_kernels_for_few_tokens_see_whole_blocks(
    tokens: int,
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(2, tokens, 128, generator=generator)
    ids = torch.randint(4, (2, tokens, 2), generator=generator, dtype=torch.int32)
    weight = torch.rand(2, tokens, 2, generator=generator)
    plain = torch.randn(4, 64, 128, generator=generator), torch.randn(4, 128, 32)
    own = torch.randn(128, 128, generator=generator)
    values, scale = ops.quantise_blocks(own)
    calls: list[tuple[Any, tuple[Tensor, ...]]] = [
        (ops.grouped_experts, (x, *plain, ids, weight)),
        (ops.block_linear, (x, values, scale)),
    ]
    for op, args in calls:
        with FixedBlocks():
            blocked = op(*args)
        assert blocked.shape == x.shape
        torch.testing.assert_close(blocked, op(*args), rtol=1e-4, atol=1e-3)

    seen: list[int] = []

    def watched(rows: Tensor) -> Tensor:
        seen.append(rows.shape[:-1].numel())
        return rows

    out = deterministic._token_by_token(watched, (0,), (x,), {})  # type: ignore[arg-type]
    assert torch.equal(out, x)
    assert seen == [BLOCK] * -(-2 * tokens // BLOCK)


def test_blocks_become_part_of_a_captured_graph() -> None:
    x, out = torch.randn(5, INPUTS), torch.zeros(5, OUTPUTS)
    weight = weights()[0]
    graph: TapeGraph[None] = TapeGraph((x, out, weight))

    def fn() -> None:
        out.copy_(F.linear(x, weight))

    with torch.inference_mode():
        graph.capture(in_fixed_blocks(fn))
        x.normal_()
        graph.replay()
    padded = torch.cat((x, torch.zeros(BLOCK - 5, INPUTS)))
    assert torch.equal(out, (padded @ weight.T)[:5])


def test_no_token_at_all_is_no_block() -> None:
    with FixedBlocks():
        assert F.linear(torch.zeros(0, INPUTS), weights()[0]).shape == (0, OUTPUTS)


@pytest.mark.parametrize("name", ["t32", "t4"])
def test_every_op_of_a_round_can_be_called_in_blocks(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the mode wraps whole rounds: here the same rounds run so on the CPU."""
    monkeypatch.setattr(EngineConfig, "check_deterministic", lambda *_: None)
    texts = []
    for wrapped in (False, True):
        llm = LLM(
            str(folders[name]), device="cpu", dtype="float64", speculate=3, deterministic=wrapped
        )
        (output,) = llm.generate([[5, 6, 7, 8, 9]], SamplingParams(max_tokens=12, temperature=0.0))
        texts.append(output.token_ids)
    assert texts[0] == texts[1]


class Watch(DispatchMode):
    """What reaches an op that takes `fixed`."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        if "fixed" in names:
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            self.told.append(given["fixed"])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("later", [(), ("page_table", "rows")])
def test_an_op_is_told_of_one_order_whatever_other_arguments_it_has(later: tuple[str, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, 2, 3, 20, generator=generator)
    latent = torch.randn(2, 4, 20, generator=generator)
    slots = torch.randint(8, (1, 2, 4), generator=generator, dtype=torch.int32)
    pages = {
        "page_table": torch.tensor([[0, 1]], dtype=torch.int32),
        "rows": torch.zeros(1, dtype=torch.int32),
    }
    with Watch() as watch, FixedBlocks():
        ops.sparse_mla(query, latent, slots, 0.3, 16, **{name: pages[name] for name in later})  # type: ignore[arg-type]
    assert watch.told == [True]


@pytest.mark.parametrize("tokens", [3, 4, PIECE + 5, 2 * PIECE + 2])
def test_ops_whose_kernels_keep_an_order_are_told_so_and_copy_nothing(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where they have kernels: in one launch, or in pieces without padding."""
    monkeypatch.setattr(deterministic, "_has_kernels", lambda _: True)
    generator = torch.Generator().manual_seed(tokens)
    lead = (tokens,) if tokens % 2 else (2, tokens // 2)
    x, residual = (torch.randn(*lead, n, generator=generator) for n in (128, 64))
    plain = torch.randn(64, 128, generator=generator)
    own, bias = ops.quantise_blocks(plain), torch.zeros(64)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.wide_linear, (x, plain)),
        (ops.wide_route, (x, plain, bias, 1, 1, 4, True, 2.5)),
        (ops.block_add_rms_norm, (x, *own, residual, torch.ones(64), 1e-6)),
    ]
    for op, args in calls:
        with Watch() as watch, FixedBlocks():
            told = op(*args)
        assert watch.told == [True] * -(-tokens // PIECE)
        expected = op(*args)
        if isinstance(told, Tensor):
            told, expected = (told,), (expected,)
        for one, other in zip(told, expected, strict=True):
            assert one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, BLOCK, BLOCK + 1, ops.MANY_TOKENS + 3])
def test_joined_projections_are_parted_alike_whatever_the_tokens(tokens: int) -> None:
    """Their caller asks for as many parts as its own tokens want; a reader adds them in order."""
    inputs, generator = 2048, torch.Generator().manual_seed(tokens)
    x = torch.randn(1, tokens, inputs, generator=generator)
    own = [torch.randn(n, inputs, generator=generator) / inputs**0.5 for n in (12, 20, 4)]

    def run(rows: Tensor) -> Tensor:
        parts = ops.parts_for(rows.shape[1], inputs)
        return ops.shared_products(rows, own[0], None, own[1], own[2], parts)

    def read(products: Tensor) -> Tensor:
        total = products[0]
        for part in products[1:]:
            total = total + part
        return total

    with FixedBlocks():
        together = run(x)
        for w in (0, tokens // 2, tokens - 1):
            alone = run(x[:, w : w + 1])
            assert len(alone) == ops.parts_for(WIDE_BLOCK, inputs)
            assert torch.equal(read(alone)[0, 0], read(together)[0, w])
    assert (len(together) == 1) == (tokens > ops.MANY_TOKENS)
    torch.testing.assert_close(read(together), read(run(x)), rtol=1e-5, atol=1e-5)


class Called(DispatchMode):
    """Names of the ops on streams that are called, and how many tokens each sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.tokens: list[int] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "freewheel":
            self.names.append(func._schema.name.removeprefix("freewheel::"))
            self.tokens.append(args[1 if func is ops.hyper_close else 0].shape[:-2].numel())
        return func(*args, **(kwargs or {}))


def test_layers_on_streams_are_crossed_by_ops_that_see_whole_blocks() -> None:
    """Closed, whose kernel sees a token alone, and entered, whose kernels differ for a few."""
    generator = torch.Generator().manual_seed(7)
    y, streams = (torch.randn(*n, 32, generator=generator) for n in ((2, 3), (2, 3, 4)))
    post, mix = (torch.rand(2, 3, *n, generator=generator) for n in ((4,), (4, 4)))
    weight = torch.randn(24, 128, generator=generator) / 12
    own = (weight, torch.zeros(24), torch.ones(3), 1e-6, 1e-6, 4, torch.ones(32), 1e-6)
    with Called() as called, FixedBlocks():
        apart = ops.hyper_cross(y, streams, post, mix, *own)
    assert called.names == ["hyper_close", "hyper_enter"]
    assert called.tokens == [2 * 3, BLOCK]
    for one, other in zip(apart, ops.hyper_cross(y, streams, post, mix, *own), strict=True):
        torch.testing.assert_close(one, other)


def test_where_it_cannot_be_kept_it_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"^deterministic: is for CUDA"):
        LLM(str(folders["t32"]), device="cpu", deterministic=True)
    for name in ("t32", "t4"):
        own = EngineConfig(model=str(folders[name]), deterministic=True, kv_cache_dtype="fp8")
        with pytest.raises(ConfigError, match=r"^deterministic: attention over FP8 rows"):
            own.check_deterministic("cuda")
    with pytest.raises(ConfigError, match=r"^deterministic: must be"):
        EngineConfig(model="demo", deterministic=1)  # type: ignore[arg-type]
