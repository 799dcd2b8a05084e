# SPDX-License-Identifier: Apache-2.0
"""Feed-forward layers: a dense one, and a mixture of experts (DeepSeek-V3, section 2.1.2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freewheel import ops
from freewheel.errors import UnsupportedModel
from freewheel.nn.cut import inputs_of, outputs_of
from freewheel.nn.experts import ExpertNames, Experts, load_experts, with_shared
from freewheel.nn.linear import Linear, Projection, load_joined, load_linear, load_wide_linear
from freewheel.nn.source import WeightSource, wide_dtype
from freewheel.nn.summed import Summed, summed
from freewheel.spec.model import DsaSpec, MoeSpec


@dataclass(frozen=True)
class DenseMlp:
    """down(silu(gate x) * up x)."""

    gate_up: Projection  # [2 * I, H]
    down: Projection  # [H, I]

    def __call__(self, x: Tensor) -> Tensor:  # [B, W, H] -> [B, W, H]
        return self.down(ops.silu_mul(self.gate_up(x)))


@dataclass(frozen=True)
class MoeMlp:
    """The best experts of each token, and the shared ones. Routing is computed in float32.

    `shared` None: there is none, or `experts` run it along with theirs.
    """

    spec: MoeSpec
    router: Linear  # float32 [E, H]
    bias: Tensor  # float32 [E]
    experts: Experts
    shared: DenseMlp | None

    def __call__(self, x: Tensor) -> Tensor:  # [B, W, H] -> [B, W, H]
        spec = self.spec
        weights, ids = ops.wide_route(
            x,
            self.router.weight,
            self.bias,
            spec.groups,
            spec.top_groups,
            spec.top_k,
            spec.normalise,
            spec.scale,
        )  # float [B, W, top_k], int32 [B, W, top_k]
        routed = self.experts(x, ids, weights)
        return routed if self.shared is None else routed + self.shared(x)


Mlp = DenseMlp | MoeMlp | Summed[DenseMlp] | Summed[MoeMlp]

PARTS = ExpertNames("gate_proj", "up_proj", "down_proj")


def load_mlp(source: WeightSource, spec: DsaSpec, name: str, sparse: bool) -> Mlp:
    """The feed-forward layer stored under `name`. Ranks share its widths, or its experts."""
    if not sparse:
        own = load_dense_mlp(source, name, spec.hidden_size, spec.dense_width)
        return summed(own, source.mesh)
    if spec.moe is None:
        raise UnsupportedModel(
            f"{name}: a mixture of experts, but config.json describes no experts"
        )
    return summed(load_moe_mlp(source, spec.moe, name, spec.hidden_size), source.mesh)


def load_dense_mlp(source: WeightSource, name: str, width: int, inner: int) -> DenseMlp:
    """gate_proj and up_proj joined into one projection, and down_proj: this rank's width of them.

    What ranks compute is to be summed.
    """
    share = source.mesh.layer
    names = (f"{name}.{PARTS.gate}", f"{name}.{PARTS.up}")
    gate_up = load_joined(source, names, (inner, inner), width, outputs_of(share))
    down = load_linear(source, f"{name}.{PARTS.down}", width, inner, inputs_of(share))
    return DenseMlp(gate_up, down)


def load_moe_mlp(source: WeightSource, moe: MoeSpec, name: str, width: int) -> MoeMlp:
    """Router, its selection bias, experts and shared experts stored under `name`.

    What ranks compute is to be summed.
    """
    shape = (moe.width, width)
    experts = load_experts(source, f"{name}.experts", PARTS, moe.experts, shape, None)
    shared = None
    if moe.shared:
        shared = load_dense_mlp(source, f"{name}.shared_experts", width, moe.shared * moe.width)
        whole = with_shared(experts, shared.gate_up, shared.down)
        experts, shared = (experts, shared) if whole is None else (whole, None)
    bias_name = f"{name}.gate.e_score_correction_bias"
    return MoeMlp(
        spec=moe,
        router=load_wide_linear(source, f"{name}.gate", moe.experts, width),
        bias=source.tensor(bias_name, (moe.experts,), wide_dtype(source.dtype)),
        experts=experts,
        shared=shared,
    )
