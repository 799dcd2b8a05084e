# SPDX-License-Identifier: Apache-2.0
"""Feed-forward layers: a dense one, and a mixture of experts (DeepSeek-V3, section 2.1.2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel import ops
from freewheel.errors import UnsupportedModel
from freewheel.nn.linear import Linear, load_linear, load_wide_linear
from freewheel.nn.source import WeightSource, wide_dtype
from freewheel.spec.model import DsaSpec, MoeSpec


@dataclass(frozen=True)
class DenseMlp:
    """down(silu(gate x) * up x)."""

    gate_up: Linear  # [2 * I, H]
    down: Linear  # [H, I]

    def __call__(self, x: Tensor) -> Tensor:  # [B, W, H] -> [B, W, H]
        return self.down(ops.silu_mul(self.gate_up(x)))


@dataclass(frozen=True)
class MoeMlp:
    """The best experts of each token, and the shared ones. Routing is computed in float32."""

    spec: MoeSpec
    router: Linear  # float32 [E, H]
    bias: Tensor  # float32 [E]
    gate_up: Tensor  # float [E, 2 * I, H]
    down: Tensor  # float [E, H, I]
    shared: DenseMlp | None

    def __call__(self, x: Tensor) -> Tensor:  # [B, W, H] -> [B, W, H]
        spec = self.spec
        weights, ids = ops.route(
            self.router(x),
            self.bias,
            spec.groups,
            spec.top_groups,
            spec.top_k,
            spec.normalise,
            spec.scale,
        )  # float [B, W, top_k], int32 [B, W, top_k]
        experts = (x, self.gate_up, self.down, ids, weights)
        if self.shared is None:
            return ops.grouped_experts(*experts)
        return ops.grouped_experts(*experts, self.shared.gate_up.weight, self.shared.down.weight)


Mlp = DenseMlp | MoeMlp


def load_mlp(source: WeightSource, spec: DsaSpec, name: str, sparse: bool) -> Mlp:
    """The feed-forward layer stored under `name`."""
    if not sparse:
        return load_dense_mlp(source, name, spec.hidden_size, spec.dense_width)
    if spec.moe is None:
        raise UnsupportedModel(
            f"{name}: a mixture of experts, but config.json describes no experts"
        )
    return load_moe_mlp(source, spec.moe, name, spec.hidden_size)


def load_dense_mlp(source: WeightSource, name: str, width: int, inner: int) -> DenseMlp:
    """gate_proj and up_proj joined into one projection, and down_proj."""
    gate_up = load_linear_pair(source, name, inner, width)
    return DenseMlp(Linear(gate_up), load_linear(source, f"{name}.down_proj", width, inner))


def load_linear_pair(source: WeightSource, name: str, inner: int, width: int) -> Tensor:
    """[2 * inner, width]: gate_proj above up_proj."""
    gate = source.tensor(f"{name}.gate_proj.weight", (inner, width))
    joined = gate.new_empty(2 * inner, width)
    joined[:inner].copy_(gate)
    joined[inner:].copy_(source.tensor(f"{name}.up_proj.weight", (inner, width)))
    return joined


def load_moe_mlp(source: WeightSource, moe: MoeSpec, name: str, width: int) -> MoeMlp:
    """Router, its selection bias, experts and shared experts stored under `name`."""
    gate_up, down = _load_experts(source, moe, f"{name}.experts", width)
    shared = None
    if moe.shared:
        shared = load_dense_mlp(source, f"{name}.shared_experts", width, moe.shared * moe.width)
    bias_name = f"{name}.gate.e_score_correction_bias"
    return MoeMlp(
        spec=moe,
        router=load_wide_linear(source, f"{name}.gate", moe.experts, width),
        bias=source.tensor(bias_name, (moe.experts,), wide_dtype(source.dtype)),
        gate_up=gate_up,
        down=down,
        shared=shared,
    )


def _load_experts(
    source: WeightSource, moe: MoeSpec, name: str, width: int
) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, H] and down [E, H, I], stored either so or expert by expert."""
    if source.has(f"{name}.gate_up_proj"):
        gate_up = source.tensor(f"{name}.gate_up_proj", (moe.experts, 2 * moe.width, width))
        return gate_up, source.tensor(f"{name}.down_proj", (moe.experts, width, moe.width))
    first = source.tensor(f"{name}.0.gate_proj.weight", (moe.width, width))
    gate_up = first.new_empty(moe.experts, 2 * moe.width, width)
    down = first.new_empty(moe.experts, width, moe.width)
    for expert in range(moe.experts):
        own = f"{name}.{expert}"
        gate = first if expert == 0 else source.tensor(f"{own}.gate_proj.weight", first.shape)
        gate_up[expert, : moe.width].copy_(gate)
        gate_up[expert, moe.width :].copy_(source.tensor(f"{own}.up_proj.weight", first.shape))
        down[expert].copy_(source.tensor(f"{own}.down_proj.weight", (width, moe.width)))
    return gate_up, down
