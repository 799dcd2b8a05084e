# SPDX-License-Identifier: Apache-2.0
"""Options and fields by the names that other engines have for them: what to write here instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    "prefix_cache": "enable_prefix_caching no_enable_prefix_caching disable_radix_cache",
    "cache_bytes": "gpu_memory_utilization mem_fraction_static kv_cache_memory_bytes "
    "num_gpu_blocks_override max_total_tokens",
    "host_cache_gb": "swap_space hicache_size hicache_ratio kv_offloading_size",
    "graph": "enforce_eager disable_cuda_graph compilation_config",
    "deterministic": "enable_deterministic_inference",
    "run_ahead": "async_scheduling disable_overlap_schedule",
    "model": "model_path model_name",
}
_BUT = {
    "prompt tokens of each request in a round, not of all together": "max_num_batched_tokens",
    "in bytes, not a share of the memory": "gpu_memory_utilization mem_fraction_static",
    "in bytes, not in blocks": "num_gpu_blocks_override",
    "in bytes, not in tokens": "max_total_tokens",
    "in GB of 10^9 bytes, not a ratio": "hicache_ratio",
    "eager is the one without graphs": "enforce_eager disable_cuda_graph",
    "prompts are always computed in chunks of so many tokens": "enable_chunked_prefill",
    "on unless --no-prefix-cache (prefix_cache=False) is given": "enable_prefix_caching "
    "no_enable_prefix_caching disable_radix_cache",
    "0 waits for every round": "disable_overlap_schedule",
}
"""What is to be known of names that do not mean quite the same."""
_COMMANDS = {
    "served_name": "served_model_name",
    "num_prompts": "requests num_requests",
    "requests": "num_prompts num_requests",
}
"""Options that commands have besides an engine's."""
_TALK = (
    "it is built in, and read from the model's folder (docs/serving.md, conversations and tools)"
)
_REASONS = {
    _TALK: "tool_call_parser reasoning_parser enable_auto_tool_choice chat_template "
    "tool_parser_plugin enable_reasoning tool_server chat_template_content_format",
    "there is nothing to switch off: a request is one line, without its text": (
        "disable_log_requests no_enable_log_requests disable_log_stats"
    ),
    "weights stay on the devices; tp shares them among several": "cpu_offload_gb",
    "no code of a checkpoint is ever run": "trust_remote_code allow_remote_code",
    "it is the model folder's own tokenizer.json": "tokenizer tokenizer_path tokenizer_mode",
    "weights run as they are stored; `freewheel convert` stores them otherwise": "quantization",
    "nothing is downloaded: model is a folder that is here": "revision download_dir hf_token",
    "layers are not spread over stages; tp shares every layer": "pipeline_parallel_size pp_size",
    "kernels are chosen by the device and by how the weights are stored": "attention_backend",
    "a request has it: SamplingParams(seed=..)": "seed random_seed",
    "a server's option: freewheel serve --served-name": "served_model_name",
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
_ARGUMENTS = {
    "sampling_params": "params",
    "sampling_param": "params",
    "prompt_token_ids": "prompts prompt",
    "input_ids": "prompts prompt",
    "text": "prompts prompt",
    "inputs": "prompts prompt",
    "conversation": "messages",
}
_NO_ARGUMENTS = {
    "use_tqdm": "there is no bar to switch off",
    "lora_request": "there are no adapters",
    "return_hidden_states": "there are none to be had",
}
_MORE = " (docs/api.md says more)"
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
    "include_stop_str_in_output": "no_stop_trim",
}
_REQUEST_ID = "send it as the header x-request-id"
_NOT_IN_REQUESTS = {
    "best_of": "answers are not ranked; n gives several",
    "use_beam_search": "there is no beam search",
    "length_penalty": "there is no beam search",
    "do_sample": "temperature is 0 for greedy decoding",
    "sampling_params": "its fields stand in the request itself",
    "extra_body": "its fields stand in the request itself: it is the Python client's word",
    "logits_processors": "no code of a caller runs in a round; logit_bias does",
    "suffix": "answers continue a prompt; nothing is filled in",
    "add_special_tokens": "the model's own begin token is added to text; give token ids, which "
    "/tokenize makes, for a prompt without it",
    "rid": _REQUEST_ID,
    "request_id": _REQUEST_ID,
    "return_hidden_states": "there are none to be had",
    "lora_path": "there are no adapters",
    "lora_request": "there are no adapters",
}
_IN_PLACES = {
    "response_format.schema": "json_schema.schema",
    "response_format.name": "json_schema.name",
    "response_format.strict": "json_schema.strict",
    "response_format.description": "json_schema.description",
}
"""Fields one level too high."""
_ADDRESSES = {
    "/generate": "POST /v1/completions continues a prompt",
    "/health_generate": "GET /ready says whether a request would be served",
    "/get_server_info": "GET /v1/loads has the load, GET /version the version",
    "/server_info": "GET /v1/loads has the load, GET /version the version",
    "/get_model_info": "GET /v1/models has the model",
    "/model_info": "GET /v1/models has the model",
    "/get_load": "GET /v1/loads has the load",
    "/flush_cache": "the operator's socket has it (--admin-socket)",
    "/abort_request": "the operator's socket has it as POST /abort (--admin-socket); a client "
    "closes its connection",
}
"""Of other servers, and what has their place here."""


def _turned(names: dict[str, str]) -> dict[str, str]:
    return {theirs: own for own, all_of_them in names.items() for theirs in all_of_them.split()}


_ABSENT, _NAMES, _NOTES = _turned(_REASONS), _turned(_ELSEWHERE), _turned(_BUT)
_PARAMS, _FIELDS = _turned(_IN_PARAMS), _turned(_IN_REQUESTS)
_LIKENESS = 0.78
"""Of a name that was meant: less finds one that only shares a word."""


def near(name: str, known: Iterable[str]) -> str | None:
    """The name that is most like a misspelt one; None if none is."""
    close = get_close_matches(name, list(known), n=1, cutoff=_LIKENESS)
    return close[0] if close else None


def _noted(advice: str, name: str) -> str:
    return f"{advice}: {_NOTES[name]}" if name in _NOTES else advice


def hint(name: str, known: Iterable[str]) -> str:
    """What somebody who writes `name` as an engine's option may have meant, as the end of a
    sentence. `known`: the options that there are."""
    if name in _ABSENT:
        return _ABSENT[name]
    meant = _NAMES.get(name) or near(name, known)
    return "docs/api.md lists them" if meant is None else f"{_noted(f'use {meant}', name)}{_MORE}"


def option_hint(option: str, known: Iterable[str], standing: Mapping[str, str]) -> str:
    """The same for `--option` of a command; empty if nothing is known of it.

    `known`: its options; `standing`: arguments that stand without a name, and how they are given.
    """
    name, there = option.lstrip("-").split("=", 1)[0].replace("-", "_"), list(known)
    meant = next((own for own, names in _COMMANDS.items() if _is_in(name, names, own, there)), None)
    if meant is None and name in _ABSENT:
        return _ABSENT[name]
    meant = meant or _NAMES.get(name) or near(name, [*there, *standing]) or ""
    if meant in standing:
        return f"the {meant} stands without an option: {standing[meant]}"
    return _noted(f"use --{meant.replace('_', '-')}", name) if meant in there else ""


def _is_in(name: str, names: str, own: str, there: list[str]) -> bool:
    return own in there and name in names.split()


def params_hint(name: str, known: Iterable[str]) -> str:
    """The same for a field of SamplingParams."""
    if name in _NOT_IN_PARAMS:
        return _NOT_IN_PARAMS[name]
    meant = _PARAMS.get(name) or near(name, known)
    return "docs/api.md lists them" if meant is None else f"use {meant}"


def argument_hint(name: str, known: Iterable[str], wishes: Iterable[str]) -> str:
    """The same for an argument of a method of LLM. `wishes`: the fields of SamplingParams."""
    if name in _NO_ARGUMENTS:
        return _NO_ARGUMENTS[name]
    there = list(known)
    meant = next((one for one in _ARGUMENTS.get(name, "").split() if one in there), None)
    if meant is None and name in wishes:
        return f"use params=SamplingParams({name}=..)"
    meant = meant or near(name, there)
    return "docs/api.md lists them" if meant is None else f"use {meant}"


def address_hint(path: str) -> str:
    """What has the place of another server's address here; empty if nothing is known of it."""
    return _ADDRESSES.get(path, "")


def field_hint(name: str, known: Iterable[str] = (), inside: str = "") -> str:
    """The same for a field of a request over HTTP, which may have those that are `known`; empty if
    nothing is known of it. `inside`: the field that it stands in, if any."""
    if (meant := _IN_PLACES.get(f"{inside}.{name}")) is not None:
        return f"use {meant}"
    if name in _NOT_IN_REQUESTS:
        return _NOT_IN_REQUESTS[name]
    meant = _FIELDS.get(name) or near(name, known)
    return f"use {meant}" if meant else ""
