# SPDX-License-Identifier: Apache-2.0
"""Kernels of other projects, called beside ours where a folder holds them.

The folder's layout: `flashmla_sgl/` (FlashMLA as sgl-flash-mla packs it), `vllm_kernels/lib/`
(libraries of vLLM) and `vllm_kernels/vllm_deep_gemm/` (DeepGEMM; it compiles at its first call,
with the toolkit at CUDA_HOME). Each is loaded when it is first needed; what does not load is
reported with the reason, never passed over. Peers' caches are FP8; beside ops over bfloat16 caches
they hold the same rows, rounded, and read about half the bytes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from freewheel.ops.rows import write_keys
from freewheel.runtime.kernel_cells import (
    LATENT_ATTENTION,
    PACKED_KEY,
    PAGE,
    RANK,
    ROPE,
    TOP_K,
    WINDOW_ATTENTION,
    Cell,
)  # fmt: skip
from freewheel.runtime.kernel_inputs import Inputs

Call = Callable[[], object]


@dataclass(frozen=True)
class Peer:
    """`prepare` turns one set of inputs into a call; `serves` says for which cells it can."""

    name: str
    op: str
    serves: Callable[[Cell], bool]
    prepare: Callable[[Path, Inputs], Call]


def _import_from(folder: Path, name: str) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)


def fp8_latents(latent: Tensor) -> Tensor:
    """Rows of 656 bytes: 512 values in FP8, four float32 scales, 64 in bfloat16.

    Scales are powers of two of tiles of 128, as FlashMLA documents its V3.2 cache.
    """
    pages, size, _ = latent.shape
    rows = torch.empty(pages, size, 656, dtype=torch.uint8, device=latent.device)
    tiles = latent[..., :RANK].float().unflatten(-1, (4, 128))
    scales = torch.exp2(torch.ceil(torch.log2((tiles.abs().amax(-1) / 448).clamp_min(1e-4))))
    values = (tiles / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
    rows[..., :RANK] = values.view(torch.uint8)
    rows[..., RANK : RANK + 16] = scales.contiguous().view(torch.uint8)
    rows[..., RANK + 16 :] = latent[..., RANK:].contiguous().view(torch.uint8)
    return rows.view(torch.float8_e4m3fn).unsqueeze(2)


def _flash_mla(root: Path, inputs: Inputs) -> Call:
    module = _import_from(root / "flashmla_sgl", "flash_mla")
    query, latent, slots, scale, _ = inputs.args
    padded, (plan, _) = _padded(query), module.get_mla_metadata()
    packed = latent.dtype == torch.uint8
    rows = latent.view(torch.float8_e4m3fn)[:, :, None] if packed else fp8_latents(latent)

    def call() -> Tensor:
        return module.flash_mla_with_kvcache(
            padded, rows, None, None, RANK, plan, None, scale, False, True, slots, use_legacy=True
        )[0]

    return call


def _padded(query: Tensor) -> Tensor:
    """[B, W, 64 or 128, D] of query [B, W, H, D]: FlashMLA knows no other numbers of heads."""
    heads = 64 if query.shape[2] <= 64 else 128
    return torch.nn.functional.pad(query, (0, 0, 0, heads - query.shape[2]))


def fp8_keys(keys: Tensor) -> Tensor:
    """float8 [n_pages, page_size, 1, 584], pages a multiple of 576 bytes apart.

    FlashMLA's V4 cache is ours but for that distance. `keys`: bfloat16, or packed already.
    """
    pages, size, _ = keys.shape
    if keys.dtype != torch.uint8:
        every = torch.arange(pages * size, device=keys.device).view(pages, size)
        packed = torch.zeros(pages, size, PACKED_KEY, dtype=torch.uint8, device=keys.device)
        write_keys(packed, keys, every, ROPE)
        keys = packed
    apart = -(-size * PACKED_KEY // 576) * 576
    spread = torch.zeros(pages, apart, dtype=torch.uint8, device=keys.device)
    spread[:, : size * PACKED_KEY] = keys.reshape(pages, -1)
    strides = (apart, PACKED_KEY, PACKED_KEY, 1)
    return spread.view(torch.float8_e4m3fn).as_strided((pages, size, 1, PACKED_KEY), strides)


def _flash_mla_windows(root: Path, inputs: Inputs) -> Call:
    """Without the turn back of the output, which ours does besides."""
    module = _import_from(root / "flashmla_sgl", "flash_mla")
    query, keys, slots, entries, entry_slots, sinks, scale, *_ = inputs.args
    padded, (plan, _) = _padded(query), module.get_mla_metadata()
    sinks = torch.nn.functional.pad(sinks, (0, padded.shape[2] - query.shape[2]))
    keys, entries = fp8_keys(keys), fp8_keys(entries)

    def call() -> Tensor:
        return module.flash_mla_with_kvcache(
            padded, keys, None, None, RANK, plan, None, scale, False, True, slots, sinks, entries,
            entry_slots, use_legacy=True,
        )[0]  # fmt: skip

    return call


def fp8_index_keys(keys: Tensor) -> Tensor:
    """uint8 [n_pages, page_size, 1, 132]: a page's values in FP8, behind them its keys' scales."""
    pages, size, dim = keys.shape
    wide = keys.float()
    scales = wide.abs().amax(-1).clamp_min(1e-4) / 448
    raw = torch.empty(pages, size * (dim + 4), dtype=torch.uint8, device=keys.device)
    values = (wide / scales[..., None]).to(torch.float8_e4m3fn)
    raw[:, : size * dim] = values.view(pages, -1).view(torch.uint8)
    raw[:, size * dim :] = scales.contiguous().view(torch.uint8).view(pages, -1)
    return raw.view(pages, size, 1, dim + 4)


def _deep_gemm(root: Path, inputs: Inputs) -> Call:
    module = _import_from(root / "vllm_kernels", "vllm_deep_gemm")
    query, gates, keys, table, rows, lens, _ = inputs.args
    batch, width, heads, dim = query.shape
    pages = table[rows.long()]
    if width not in (1, 2, 4):  # the kernel knows no other widths: queries become rows
        pages, lens = pages.repeat_interleave(width, 0), lens.view(-1, 1)
    packed = query.to(torch.float8_e4m3fn)
    cache = keys[:, :, None] if keys.dtype == torch.uint8 else fp8_index_keys(keys)
    packed = packed.view(lens.shape[0], lens.shape[1], heads, dim)
    units = torch.cuda.get_device_properties(query.device).multi_processor_count
    plan = module.get_paged_mqa_logits_metadata(
        lens, PAGE, units // 2 if lens.shape[1] == 4 else units
    )
    gates, longest = gates.view(batch * width, heads), table.shape[1] * PAGE

    def call() -> object:
        return module.fp8_fp4_paged_mqa_logits(
            (packed, None), cache, gates, lens, pages, plan, longest
        )

    return call


def _vllm_topk(name: str) -> Callable[[Path, Inputs], Call]:
    def prepare(root: Path, inputs: Inputs) -> Call:
        torch.ops.load_library(str(root / "vllm_kernels/lib/_C_stable_libtorch.abi3.so"))
        kernel: Any = torch._ops.ops._C.__getattr__(name)
        logits, _, _, lens, *_ = inputs.args
        flat, space = logits.flatten(0, 1), torch.zeros(1 << 20, dtype=torch.uint8)
        space, lens = space.to(logits.device), lens.flatten()
        out = torch.empty(flat.shape[0], TOP_K, dtype=torch.int32, device=logits.device)
        return lambda: kernel(flat, lens, out, space, TOP_K, flat.shape[1])

    return prepare


PEERS = (
    *(Peer("FlashMLA", op, lambda _: True, _flash_mla) for op in LATENT_ATTENTION),
    *(Peer("FlashMLA", op, lambda _: True, _flash_mla_windows) for op in WINDOW_ATTENTION),
    Peer("DeepGEMM", "index_logits", lambda _: True, _deep_gemm),
    Peer("DeepGEMM", "fp8_index_logits", lambda _: True, _deep_gemm),
    Peer("vLLM persistent", "topk_slots", lambda _: True, _vllm_topk("persistent_topk")),
    Peer(
        "vLLM cooperative", "topk_slots", lambda cell: cell.tokens <= 64,
        _vllm_topk("cooperative_topk"),
    ),
)  # fmt: skip
