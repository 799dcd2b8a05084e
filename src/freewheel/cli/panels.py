# SPDX-License-Identifier: Apache-2.0
"""Under which heading the help of a command with many options has each of them."""

from __future__ import annotations

FIRST = frozenset(
    "prompt system thinking effort max_tokens temperature speculate host port api_key_file url "
    "model batch rounds requests num_prompts request_rate make_trace vary to json".split()
)
"""Used most: they come first, under no heading of their own."""

PANELS: dict[str, str] = {
    "Model and device": "device dtype load_format context_len graph threads deterministic",
    "Sampling": "top_p top_k min_p seed stop stop_token_id min_tokens ignore_eos presence_penalty "
    "frequency_penalty repetition_penalty logit_bias bad_word allowed_token_id",
    "Structured output": "schema regex choice json_object grammar thinking_token_budget "
    "grammar_seconds",
    "Speculation": "drafter accept",
    "Memory and cache": "kv_cache_dtype cache_bytes pages page_size prefix_cache host_cache_gb "
    "disk_cache_gb disk_cache_dir",
    "Batches and rounds": "max_batch prefill_batch prefill_share chunk run_ahead max_requests "
    "queue_tokens queue_seconds",
    "Workload": "context endpoint prompt_tokens prompt_file burstiness max_concurrency num_warmups "
    "goodput block limit slow_host",
    "Time of a round": "fixed_ms token_us key_ns costs",
    "Many GPUs": "tp dp ep check_ranks role kv_host kv_port kv_wire kv_peers kv_key_file "
    "kv_seconds",
    "Server": "served_name insecure drain_seconds admin_socket",
    "Output and logs": "logprobs prompt_logprobs timeline save_detailed metrics_prefix json_logs "
    "otlp_endpoint",
    "Faults": "canary strict perturb perturb_seed guard dump_dir stall_seconds",
}
"""Headings in their order, and the options under each, the most used first."""

MANY = 15
"""Options from which on a command's help has headings."""

_PLACES = {
    name: (title, names.split().index(name))
    for title, names in PANELS.items()
    for name in names.split()
}


def panel_of(option: str) -> str | None:
    """Its heading; None: it has none."""
    return None if option in FIRST else _PLACES.get(option, (None, 0))[0]


def place_of(option: str) -> tuple[int, int]:
    """Where it stands among the options of any command."""
    title, place = _PLACES.get(option, (None, 0))
    if option in FIRST or title is None:
        return -1, 0
    return list(PANELS).index(title), place
