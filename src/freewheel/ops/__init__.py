# SPDX-License-Identifier: Apache-2.0
"""The kernel contracts: every device computation that a model or a round is made of.

One function a contract, declared in `registry` as `torch.ops.freewheel.<name>`. Its body is the
specification: plain torch, static shapes, no host read. Faster bodies for one kind of device lie in
a package of that device's name and must agree with the specification.

This package imports torch and `freewheel.errors`, nothing else of the engine. A kernel sees tensors
of rows, lengths, pages and slots. It never knows about requests.
"""

from freewheel.ops import cpu
from freewheel.ops.adjusting import adjust, apply_adjustments
from freewheel.ops.attention import index_logits, sparse_mla, topk_slots
from freewheel.ops.cache import store_index_key, store_latent
from freewheel.ops.checksums import sum_pages, sum_tokens
from freewheel.ops.choosing import choose
from freewheel.ops.clamped import (
    clamped_experts,
    clamped_silu_mul,
    route_best,
    route_by_token,
)
from freewheel.ops.codecs import (
    dequantise_blocks,
    dequantise_mxfp4,
    quantise_blocks,
    quantise_mxfp4,
)
from freewheel.ops.collective import (
    MEETINGS,
    all_gather,
    all_reduce,
    all_reduce_in_order,
    all_to_all,
    join_group,
    leave_group,
    own_experts,
    scatter_sum,
    scatter_sum_in_order,
    split_embedding,
)
from freewheel.ops.compressed import (
    compress,
    entry_slots,
    open_query,
    plan_closings,
    project_raw,
    rope_tail,
    store_key,
    store_raw,
    window_slots,
)
from freewheel.ops.constraining import constrain, follow, store_table
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
from freewheel.ops.dispatch import combine_tokens, dispatch_tokens
from freewheel.ops.guiding import HELD, apply_masks, guide
from freewheel.ops.hyper import hyper_close, hyper_collapse, hyper_open
from freewheel.ops.latents import (
    absorb_query,
    expand_values,
    index_queries,
    norm_latents,
    place_queries,
    sparse_mla_values,
    values_apart,
)
from freewheel.ops.linear import wide_linear
from freewheel.ops.openings import block_open_latents, open_latents_apart
from freewheel.ops.packed import (
    fp8_index_logits,
    fp8_index_queries,
    fp8_norm_latents,
    fp8_place_queries,
    fp8_sparse_mla,
)
from freewheel.ops.packed_keys import (
    fp8_place_heads,
    fp8_store_entries,
    fp8_store_index_entries,
    fp8_window_attention,
)
from freewheel.ops.placing import open_queries, place_inputs
from freewheel.ops.quantised import block_experts, block_linear, mxfp4_experts
from freewheel.ops.reading import (
    add_norm_apart,
    block_add_rms_norm,
    wide_route,
    wide_route_apart,
    wide_route_best,
    wide_route_best_apart,
)
from freewheel.ops.registry import (
    FAKES,
    IMPLEMENTATIONS,
    SPECIFICATIONS,
    kernels_lack,
    kernels_loaded,
    load_ahead,
    load_kernels,
)
from freewheel.ops.repacking import repack_mxfp4, repackable, repacked_experts
from freewheel.ops.scoring import score
from freewheel.ops.sharing import MANY_TOKENS, parts_for, shared_products
from freewheel.ops.sinks import sink_attention
from freewheel.ops.steps import (
    hyper_cross,
    hyper_cross_apart,
    hyper_enter,
    place_heads,
    store_entries,
    window_attention,
)

__all__ = [
    "FAKES",
    "HELD",
    "IMPLEMENTATIONS",
    "MANY_TOKENS",
    "MEETINGS",
    "SPECIFICATIONS",
    "absorb_query",
    "add_norm_apart",
    "add_rms_norm",
    "adjust",
    "all_gather",
    "all_reduce",
    "all_reduce_in_order",
    "all_to_all",
    "apply_adjustments",
    "apply_inbox",
    "apply_masks",
    "block_add_rms_norm",
    "block_experts",
    "block_linear",
    "block_open_latents",
    "choose",
    "clamped_experts",
    "clamped_silu_mul",
    "combine_tokens",
    "commit",
    "compress",
    "constrain",
    "cpu",
    "dequantise_blocks",
    "dequantise_mxfp4",
    "dispatch_tokens",
    "entry_slots",
    "expand_values",
    "follow",
    "fp8_index_logits",
    "fp8_index_queries",
    "fp8_norm_latents",
    "fp8_place_heads",
    "fp8_place_queries",
    "fp8_sparse_mla",
    "fp8_store_entries",
    "fp8_store_index_entries",
    "fp8_window_attention",
    "grouped_experts",
    "guide",
    "hyper_close",
    "hyper_collapse",
    "hyper_cross",
    "hyper_cross_apart",
    "hyper_enter",
    "hyper_open",
    "index_logits",
    "index_queries",
    "join_group",
    "kernels_lack",
    "kernels_loaded",
    "layer_norm",
    "leave_group",
    "load_ahead",
    "load_kernels",
    "lookup",
    "mxfp4_experts",
    "norm_latents",
    "open_latents_apart",
    "open_queries",
    "open_query",
    "open_round",
    "open_step",
    "own_experts",
    "parts_for",
    "place_heads",
    "place_inputs",
    "place_queries",
    "plan_closings",
    "project_raw",
    "quantise_blocks",
    "quantise_mxfp4",
    "repack_mxfp4",
    "repackable",
    "repacked_experts",
    "rms_norm",
    "rope",
    "rope_tail",
    "route",
    "route_best",
    "route_by_token",
    "scatter_sum",
    "scatter_sum_in_order",
    "score",
    "shared_products",
    "silu_mul",
    "sink_attention",
    "sparse_mla",
    "sparse_mla_values",
    "split_embedding",
    "store_entries",
    "store_index_key",
    "store_key",
    "store_latent",
    "store_raw",
    "store_table",
    "sum_pages",
    "sum_tokens",
    "topk_slots",
    "values_apart",
    "wide_linear",
    "wide_route",
    "wide_route_apart",
    "wide_route_best",
    "wide_route_best_apart",
    "window_attention",
    "window_slots",
    "write_draft",
]
