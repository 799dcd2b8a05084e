# SPDX-License-Identifier: Apache-2.0
"""Options and fields by the names that other engines have for them: what to write here instead."""

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
_IN_PARAMS = {
    "max_tokens": "max_new_tokens max_completion_tokens max_length max_gen_len",
    "min_tokens": "min_new_tokens min_length",
    "stop": "stop_sequences stop_strings stop_words",
    "stop_token_ids": "stop_ids eos_token_id",
    "json_schema": "guided_json schema response_format",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar ebnf",
    "logprobs": "top_logprobs top_logprobs_num n_probs",
    "repetition_penalty": "repeat_penalty",
    "thinking_token_budget": "thinking_budget reasoning_budget",
    "seed": "random_seed sampling_seed",
}
_STRUCTURED = "json_schema, regex, choice, grammar and json_object are fields of their own here"
_MANY = "give the prompt so many times: llm.generate([prompt] * n)"
_NOT_IN_PARAMS = {
    "n": _MANY,
    "num_return_sequences": _MANY,
    "best_of": "answers are not ranked; " + _MANY,
    "structured_outputs": _STRUCTURED,
    "guided_decoding": _STRUCTURED,
    "use_beam_search": "there is no beam search",
    "do_sample": "temperature is 0 for greedy decoding",
    "length_penalty": "there is no beam search",
    "logits_processors": "no code of a caller runs in a round; logit_bias and grammar do",
    "stream": "LLM.stream gives an answer as it comes",
    "priority": "LLM.generate and LLM.stream have it",
    "cache_salt": "LLM.generate and LLM.stream have it",
}
_IN_REQUESTS = {
    "structured_outputs or response_format": "guided_json guided_regex guided_choice "
    "guided_grammar guided_decoding_backend guided_whitespace_pattern json_schema regex ebnf",
    "max_tokens": "max_new_tokens max_length",
    "stop": "stop_sequences stop_strings",
    "min_tokens": "min_new_tokens",
    "thinking_token_budget": "thinking_budget reasoning_budget",
    "n": "num_return_sequences",
    "seed": "random_seed sampling_seed",
    "response_format": "structured_outputs format",
}
_NOT_IN_REQUESTS = {
    "best_of": "answers are not ranked; n gives several",
    "use_beam_search": "there is no beam search",
    "length_penalty": "there is no beam search",
    "do_sample": "temperature is 0 for greedy decoding",
    "sampling_params": "its fields stand in the request itself",
    "extra_body": "its fields stand in the request itself: it is the Python client's word",
    "logits_processors": "no code of a caller runs in a round; logit_bias does",
    "suffix": "answers continue a prompt; nothing is filled in",
}


def _turned(names: dict[str, str]) -> dict[str, str]:
    return {theirs: own for own, all_of_them in names.items() for theirs in all_of_them.split()}


_ABSENT, _NAMES = _turned(_REASONS), _turned(_ELSEWHERE)
_PARAMS, _FIELDS = _turned(_IN_PARAMS), _turned(_IN_REQUESTS)


def _own(name: str, names: dict[str, str], known: Iterable[str]) -> str | None:
    close = get_close_matches(name, list(known), n=1)
    return names.get(name) or (close[0] if close else None)


def hint(name: str, known: Iterable[str]) -> str:
    """What somebody who writes `name` as an engine's option may have meant, as the end of a
    sentence. `known`: the options that there are."""
    if name in _ABSENT:
        return _ABSENT[name]
    meant = _own(name, _NAMES, known)
    return "docs/api.md lists them" if meant is None else f"{meant} is; docs/api.md says more"


def option_hint(option: str, known: Iterable[str]) -> str:
    """The same for `--option` of a command; empty if nothing is known of it."""
    name, there = option.lstrip("-").split("=", 1)[0].replace("-", "_"), list(known)
    if name in _ABSENT and name not in there:
        return _ABSENT[name]
    meant = _own(name, _NAMES, there)
    return "" if meant not in there else f"--{meant.replace('_', '-')} is"


def params_hint(name: str, known: Iterable[str]) -> str:
    """The same for a field of SamplingParams."""
    if name in _NOT_IN_PARAMS:
        return _NOT_IN_PARAMS[name]
    meant = _own(name, _PARAMS, known)
    return "docs/api.md lists them" if meant is None else f"{meant} is"


def field_hint(name: str) -> str:
    """The same for a field of a request over HTTP; empty if nothing is known of it."""
    if name in _NOT_IN_REQUESTS:
        return _NOT_IN_REQUESTS[name]
    return f"{_FIELDS[name]} is" if name in _FIELDS else ""
