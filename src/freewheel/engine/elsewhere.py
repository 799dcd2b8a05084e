# SPDX-License-Identifier: Apache-2.0
"""Options by the names that other engines have for them: what to write here instead."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_ELSEWHERE = {
    "tp": "tensor_parallel_size tp_size",
    "dp": "data_parallel_size dp_size",
    "ep": "enable_expert_parallel enable_ep_moe expert_parallel_size ep_size",
    "context_len": "max_model_len context_length max_seq_len max_context_len_to_capture",
    "max_batch": "max_num_seqs max_running_requests cuda_graph_max_bs",
    "chunk": "max_num_batched_tokens chunked_prefill_size enable_chunked_prefill",
    "speculate": "speculative_config num_speculative_tokens speculative_num_steps "
    "speculative_num_draft_tokens speculative_eagle_topk",
    "drafter": "speculative_algorithm speculative_model speculative_draft_model_path",
    "page_size": "block_size",
    "prefix_cache": "enable_prefix_caching disable_radix_cache",
    "cache_bytes": "gpu_memory_utilization mem_fraction_static kv_cache_memory_bytes "
    "num_gpu_blocks_override max_total_tokens",
    "host_cache_gb": "swap_space cpu_offload_gb hicache_size hicache_ratio kv_offloading_size",
    "graph": "enforce_eager disable_cuda_graph compilation_config",
    "deterministic": "enable_deterministic_inference",
    "run_ahead": "async_scheduling disable_overlap_schedule",
    "model": "model_path model_name",
}
_REASONS = {
    "no code of a checkpoint is ever run": "trust_remote_code allow_remote_code",
    "it is the model folder's own tokenizer.json": "tokenizer tokenizer_path tokenizer_mode",
    "weights run as they are stored; `freewheel convert` stores them otherwise": "quantization",
    "nothing is downloaded: model is a folder that is here": "revision download_dir hf_token",
    "layers are not spread over stages; tp shares every layer": "pipeline_parallel_size pp_size",
    "kernels are chosen by the device and by how the weights are stored": "attention_backend",
    "a request has it: SamplingParams(seed=..)": "seed random_seed",
    "a server has it: freewheel serve --served-name": "served_model_name",
}
_ABSENT = {name: reason for reason, names in _REASONS.items() for name in names.split()}
_NAMES = {theirs: own for own, names in _ELSEWHERE.items() for theirs in names.split()}


def hint(name: str, known: Iterable[str]) -> str:
    """What somebody who writes `name` may have meant, as the end of a sentence."""
    if name in _ABSENT:
        return _ABSENT[name]
    close = get_close_matches(name, list(known), n=1)
    meant = _NAMES.get(name) or (close[0] if close else None)
    return "docs/api.md lists them" if meant is None else f"{meant} is; docs/api.md says more"
