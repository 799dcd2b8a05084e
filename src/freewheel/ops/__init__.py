# SPDX-License-Identifier: Apache-2.0
"""The kernel contracts: every device computation that a model or a round is made of.

One function a contract, declared in `registry` as `torch.ops.freewheel.<name>`. Its body is the
specification: plain torch, static shapes, no host read. Faster bodies for one kind of device lie in
a package of that device's name and must agree with the specification.

This package imports torch and `freewheel.errors`, nothing else of the engine. A kernel sees tensors
of rows, lengths, pages and slots. It never knows about requests.
"""

from freewheel.ops import cpu
from freewheel.ops.attention import index_logits, sparse_mla, topk_slots
from freewheel.ops.cache import store_index_key, store_latent
from freewheel.ops.choosing import choose
from freewheel.ops.decoding import (
    apply_inbox,
    commit,
    lookup,
    open_round,
    open_step,
    write_draft,
)
from freewheel.ops.dense import (
    add_rms_norm,
    grouped_experts,
    layer_norm,
    rms_norm,
    rope,
    route,
    silu_mul,
)
from freewheel.ops.linear import wide_linear
from freewheel.ops.registry import IMPLEMENTATIONS, SPECIFICATIONS, load_kernels

__all__ = [
    "IMPLEMENTATIONS",
    "SPECIFICATIONS",
    "add_rms_norm",
    "apply_inbox",
    "choose",
    "commit",
    "cpu",
    "grouped_experts",
    "index_logits",
    "layer_norm",
    "load_kernels",
    "lookup",
    "open_round",
    "open_step",
    "rms_norm",
    "rope",
    "route",
    "silu_mul",
    "sparse_mla",
    "store_index_key",
    "store_latent",
    "topk_slots",
    "wide_linear",
    "write_draft",
]
