# SPDX-License-Identifier: Apache-2.0
"""Experts with clamped activations, chosen by score or by the token's id (DeepSeek-V4, 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel import ops
from freewheel.nn.cut import inputs_of, outputs_of
from freewheel.nn.experts import ExpertNames, Experts, load_experts, with_shared
from freewheel.nn.linear import Linear, Projection, load_joined, load_linear, load_wide_linear
from freewheel.nn.source import WeightSource, wide_dtype
from freewheel.nn.summed import Summed, summed
from freewheel.spec.compressed import ClampedMoeSpec

PARTS = ExpertNames(gate="w1", up="w3", down="w2")


@dataclass(frozen=True)
class ClampedMlp:
    """down(silu(min(gate x, limit)) * clamp(up x))."""

    gate_up: Projection  # [2 * I, H]
    down: Projection  # [H, I]
    limit: float

    def __call__(self, x: Tensor) -> Tensor:  # [B, W, H] -> [B, W, H]
        return self.down(ops.clamped_silu_mul(self.gate_up(x), self.limit))


@dataclass(frozen=True)
class ClampedMoe:
    """The experts of each token, and the shared ones. Exactly one of `bias` and `table` is there.

    With a table the token alone says which experts; their weights still follow from scores.
    `shared` None: there is none, or `experts` run it along with theirs.
    """

    spec: ClampedMoeSpec
    router: Linear  # float32 [E, H]
    bias: Tensor | None  # float32 [E]
    table: Tensor | None  # int32 [V, top_k]
    experts: Experts
    shared: ClampedMlp | None

    def __call__(self, x: Tensor, tokens: Tensor) -> Tensor:
        """[B, W, H] of x [B, W, H] and its tokens, int32 [B, W]."""
        spec, router = self.spec, self.router
        if self.table is not None:
            weights, ids = ops.route_by_token(router(x), self.table, tokens, spec.scale)
        else:
            assert self.bias is not None
            weights, ids = ops.wide_route_best(x, router.weight, self.bias, spec.top_k, spec.scale)
        routed = self.experts(x, ids, weights)
        return routed if self.shared is None else routed + self.shared(x)


def load_clamped_moe(
    source: WeightSource, moe: ClampedMoeSpec, name: str, width: int, *, hashed: int | None
) -> ClampedMoe | Summed[ClampedMoe]:
    """The layer stored under `name`. `hashed`: the vocabulary, if the token's id chooses.

    Ranks share its widths, or its experts.
    """
    shape = (moe.width, width)
    experts = load_experts(source, f"{name}.experts", PARTS, moe.experts, shape, moe.limit)
    shared = bias = table = None
    if moe.shared:
        shared = _load_shared(source, moe, f"{name}.shared_experts", width)
        whole = with_shared(experts, shared.gate_up, shared.down)
        experts, shared = (experts, shared) if whole is None else (whole, None)
    if hashed is None:
        bias = source.tensor(f"{name}.gate.bias", (moe.experts,), wide_dtype(source.dtype))
    else:
        table = source.ids(f"{name}.gate.tid2eid", (hashed, moe.top_k), moe.experts)
    own = ClampedMoe(
        spec=moe,
        router=load_wide_linear(source, f"{name}.gate", moe.experts, width),
        bias=bias,
        table=table,
        experts=experts,
        shared=shared,
    )
    return summed(own, source.mesh)


def _load_shared(source: WeightSource, moe: ClampedMoeSpec, name: str, width: int) -> ClampedMlp:
    inner, share = moe.shared * moe.width, source.mesh.layer
    names = (f"{name}.{PARTS.gate}", f"{name}.{PARTS.up}")
    gate_up = load_joined(source, names, (inner, inner), width, outputs_of(share))
    down = load_linear(source, f"{name}.{PARTS.down}", width, inner, inputs_of(share))
    return ClampedMlp(gate_up, down, moe.limit)
