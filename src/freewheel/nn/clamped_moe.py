# SPDX-License-Identifier: Apache-2.0
"""Experts with clamped activations, chosen by score or by the token's id (DeepSeek-V4, 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel import ops
from freewheel.nn.linear import Linear, load_linear, load_wide_linear
from freewheel.nn.source import WeightSource, wide_dtype
from freewheel.spec.compressed import ClampedMoeSpec


@dataclass(frozen=True)
class ClampedMlp:
    """down(silu(min(gate x, limit)) * clamp(up x))."""

    gate_up: Linear  # [2 * I, H]
    down: Linear  # [H, I]
    limit: float

    def __call__(self, x: Tensor) -> Tensor:  # [B, W, H] -> [B, W, H]
        return self.down(ops.clamped_silu_mul(self.gate_up(x), self.limit))


@dataclass(frozen=True)
class ClampedMoe:
    """The experts of each token, and the shared ones. Exactly one of `bias` and `table` is there.

    With a table the token alone says which experts; their weights still follow from scores.
    """

    spec: ClampedMoeSpec
    router: Linear  # float32 [E, H]
    bias: Tensor | None  # float32 [E]
    table: Tensor | None  # int32 [V, top_k]
    gate_up: Tensor  # float [E, 2 * I, H]
    down: Tensor  # float [E, H, I]
    shared: ClampedMlp | None

    def __call__(self, x: Tensor, tokens: Tensor) -> Tensor:
        """[B, W, H] of x [B, W, H] and its tokens, int32 [B, W]."""
        spec, logits = self.spec, self.router(x)
        if self.table is not None:
            weights, ids = ops.route_by_token(logits, self.table, tokens, spec.scale)
        else:
            assert self.bias is not None
            weights, ids = ops.route_best(logits, self.bias, spec.top_k, spec.scale)
        routed = ops.clamped_experts(x, self.gate_up, self.down, ids, weights, spec.limit)
        return routed if self.shared is None else routed + self.shared(x)


def load_clamped_moe(
    source: WeightSource, moe: ClampedMoeSpec, name: str, width: int, *, hashed: int | None
) -> ClampedMoe:
    """The layer stored under `name`. `hashed`: the vocabulary, if the token's id chooses."""
    gate_up, down = _load_experts(source, moe, f"{name}.experts", width)
    bias = table = None
    if hashed is None:
        bias = source.tensor(f"{name}.gate.bias", (moe.experts,), wide_dtype(source.dtype))
    else:
        table = source.ids(f"{name}.gate.tid2eid", (hashed, moe.top_k), moe.experts)
    return ClampedMoe(
        spec=moe,
        router=load_wide_linear(source, f"{name}.gate", moe.experts, width),
        bias=bias,
        table=table,
        gate_up=gate_up,
        down=down,
        shared=_load_shared(source, moe, f"{name}.shared_experts", width) if moe.shared else None,
    )


def _load_shared(source: WeightSource, moe: ClampedMoeSpec, name: str, width: int) -> ClampedMlp:
    inner = moe.shared * moe.width
    gate = source.tensor(f"{name}.w1.weight", (inner, width))
    joined = gate.new_empty(2 * inner, width)
    joined[:inner].copy_(gate)
    joined[inner:].copy_(source.tensor(f"{name}.w3.weight", (inner, width)))
    return ClampedMlp(Linear(joined), load_linear(source, f"{name}.w2", width, inner), moe.limit)


def _load_experts(
    source: WeightSource, moe: ClampedMoeSpec, name: str, width: int
) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, H] and down [E, H, I], stored either so or expert by expert."""
    inner = moe.width
    if source.has(f"{name}.gate_up_proj"):
        gate_up = source.tensor(f"{name}.gate_up_proj", (moe.experts, 2 * inner, width))
        return gate_up, source.tensor(f"{name}.down_proj", (moe.experts, width, inner))
    first = source.tensor(f"{name}.0.w1.weight", (inner, width))
    gate_up = first.new_empty(moe.experts, 2 * inner, width)
    down = first.new_empty(moe.experts, width, inner)
    for expert in range(moe.experts):
        own = f"{name}.{expert}"
        gate = first if expert == 0 else source.tensor(f"{own}.w1.weight", (inner, width))
        gate_up[expert, :inner].copy_(gate)
        gate_up[expert, inner:].copy_(source.tensor(f"{own}.w3.weight", (inner, width)))
        down[expert].copy_(source.tensor(f"{own}.w2.weight", (width, inner)))
    return gate_up, down
