# SPDX-License-Identifier: Apache-2.0
"""Commands, addresses, metrics and variables of the environment, by the names of others."""

from __future__ import annotations

from freewheel.spec.elsewhere.rows import Row, Section

_TEXT = "this server only generates text"
_LIFE = "says whether a request would be served"

ADDRESSES: Section = (
    "Addresses",
    (
        Row("/v1/completions", "/v1/completions", "/v1/completions"),
        Row("/v1/chat/completions", "/v1/chat/completions", "/v1/chat/completions"),
        Row("", "/generate", "/generate", "SGLang's words, fields and figures"),
        Row("/v1/responses", "/v1/responses", "/v1/responses", "stateless"),
        Row(
            "/v1/responses/*",
            "/v1/responses/*",
            "",
            "no answer is kept: each is whole, or streamed, where it was asked for",
        ),
        Row("/v1/messages", "/v1/messages", "/v1/messages"),
        Row("/v1/models", "/v1/models", "/v1/models"),
        Row("/tokenize", "/tokenize", "/tokenize"),
        Row("/detokenize", "/detokenize", "/detokenize"),
        Row("/health", "/health", "/health", "says that the process lives"),
        Row("/ping", "/ping", "/ping", "as /ready, for whoever sends requests once it is 200"),
        Row("", "/health_generate", "/ready", _LIFE),
        Row("/metrics", "/metrics", "/metrics", "vLLM's names with the prefix freewheel:"),
        Row("/version", "/get_server_info /server_info", "/version", "/v1/loads has the load"),
        Row("", "/get_model_info /model_info", "/v1/models", "has the model"),
        Row("/load", "/get_load /v1/loads", "/v1/loads", "has the load"),
        Row(
            "/start_profile /stop_profile",
            "/start_profile /stop_profile",
            "/debug/round",
            "has the last rounds as a trace",
        ),
        Row(
            "/reset_prefix_cache",
            "/flush_cache",
            "",
            "the operator's socket has it as POST /flush_cache (--admin-socket)",
        ),
        Row(
            "",
            "/abort_request",
            "",
            "the operator's socket has it as POST /abort (--admin-socket); a client closes its "
            "connection",
        ),
        Row(
            "/pause /resume /is_paused",
            "/pause_generation /continue_generation",
            "",
            "the operator's socket has POST /drain and /resume (--admin-socket)",
        ),
        Row(
            "",
            "/configure_logging",
            "",
            "the operator's socket has POST /log_level (--admin-socket)",
        ),
        Row(
            "/sleep /wake_up /is_sleeping",
            "/release_memory_occupation /resume_memory_occupation",
            "",
            "an engine keeps its memory until it ends",
        ),
        Row(
            "/collective_rpc",
            "/update_weights_from_disk /update_weights_from_tensor "
            "/update_weights_from_distributed /init_weights_update_group",
            "",
            "weights are read once: start another server for others",
        ),
        Row(
            "/v1/load_lora_adapter /v1/unload_lora_adapter",
            "/load_lora_adapter /unload_lora_adapter",
            "",
            "there are no adapters",
        ),
        Row(
            "/v1/embeddings /pooling /classify /v1/classify /score /v1/score /rerank /v1/rerank "
            "/v2/rerank",
            "/encode /classify /v1/embeddings /v1/score /v1/rerank",
            "",
            _TEXT,
        ),
        Row(
            "/v1/audio/transcriptions /v1/audio/translations", "/v1/audio/transcriptions", "", _TEXT
        ),
        Row(
            "",
            "/open_session /close_session",
            "",
            "prompts that begin alike find each other's pages without one",
        ),
        Row(
            "/inference/v1/generate /generative_scoring",
            "",
            "",
            "POST /v1/completions takes token ids, and echo with logprobs scores a text",
        ),
        Row("/tokenizer_info", "", "", "the model's folder has tokenizer.json"),
        Row(
            "",
            "/start_expert_distribution_record /stop_expert_distribution_record "
            "/dump_expert_distribution_record",
            "",
            "experts stay where they were dealt out",
        ),
        Row(
            "",
            "/separate_reasoning /parse_function_call",
            "",
            "a chat's answer has reasoning_content and tool_calls apart",
        ),
    ),
)

METRICS: Section = (
    "Metrics",
    (
        Row("num_requests_running", "num_running_reqs", "num_requests_running"),
        Row("num_requests_waiting", "num_queue_reqs", "num_requests_waiting"),
        Row("kv_cache_usage_perc gpu_cache_usage_perc", "token_usage", "kv_cache_usage_perc"),
        Row("num_preemptions_total", "num_retracted_reqs", "num_preemptions_total"),
        Row("prompt_tokens_total", "prompt_tokens_total", "prompt_tokens_total"),
        Row("generation_tokens_total", "generation_tokens_total", "generation_tokens_total"),
        Row(
            "prefix_cache_queries_total",
            "",
            "prefix_cache_queries_total",
        ),
        Row(
            "prefix_cache_hits_total",
            "cached_tokens_total cache_hit_rate",
            "prefix_cache_hits_total",
            "a rate is hits over queries",
        ),
        Row("external_prefix_cache_hits_total", "", "external_prefix_cache_hits_total", "by tier"),
        Row(
            "request_success_total",
            "num_requests_total num_aborted_requests_total",
            "request_success_total",
            "by finished_reason",
        ),
        Row(
            "time_to_first_token_seconds",
            "time_to_first_token_seconds",
            "time_to_first_token_seconds",
        ),
        Row(
            "inter_token_latency_seconds time_per_output_token_seconds",
            "inter_token_latency_seconds",
            "inter_token_latency_seconds",
        ),
        Row(
            "e2e_request_latency_seconds",
            "e2e_request_latency_seconds",
            "e2e_request_latency_seconds",
        ),
        Row("request_queue_time_seconds", "queue_time_seconds", "request_queue_time_seconds"),
        Row("request_prefill_time_seconds", "", "request_prefill_time_seconds"),
        Row("request_decode_time_seconds", "", "request_decode_time_seconds"),
        Row("spec_decode_num_drafts_total", "", "spec_decode_num_drafts_total"),
        Row("spec_decode_num_draft_tokens_total", "", "spec_decode_num_draft_tokens_total"),
        Row(
            "spec_decode_num_accepted_tokens_total",
            "spec_accept_length spec_accept_rate",
            "spec_decode_num_accepted_tokens_total",
            "a rate is accepted over draft tokens; a length is one more than accepted over drafts",
        ),
        Row(
            "spec_decode_num_accepted_tokens_per_pos_total",
            "",
            "spec_decode_num_accepted_tokens_per_pos_total",
        ),
        Row("", "gen_throughput", "", "it is the rate of generation_tokens_total"),
        Row("", "num_used_tokens", "", "/v1/loads has it, and kv_pages has pages by state"),
        Row(
            "request_prompt_tokens request_generation_tokens iteration_tokens_total "
            "request_inference_time_seconds request_params_* request_time_per_output_token_seconds",
            "",
            "",
            "there are no histograms of sizes and wishes; sums of tokens are counters",
        ),
        Row(
            "lora_requests_info cache_config_info engine_sleep_state",
            "utilization",
            "",
            "kv_pages has what the cache holds",
        ),
    ),
)
"""Behind `vllm:`, `sglang:` and `freewheel:` (`--metrics-prefix vllm` changes the last)."""

ENVIRONMENT: Section = (
    "Environment",
    (
        Row("VLLM_API_KEY", "", "FREEWHEEL_API_KEY"),
        Row(
            "VLLM_CACHE_ROOT",
            "SGLANG_CACHE_DIR SGLANG_DG_CACHE_DIR",
            "FREEWHEEL_KERNEL_CACHE",
            "compiled kernels alone",
        ),
        Row(
            "TRITON_CACHE_DIR",
            "TRITON_CACHE_DIR",
            "TRITON_CACHE_DIR",
            "if FREEWHEEL_KERNEL_CACHE is not set",
        ),
        Row("XDG_CACHE_HOME", "", "XDG_CACHE_HOME", "under which caches are kept"),
        Row("CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "", "as everywhere: CUDA reads it"),
        Row("NCCL_* GLOO_*", "NCCL_* GLOO_*", "", "as everywhere: the libraries read them"),
        Row(
            "HF_TOKEN HF_HOME HF_HUB_OFFLINE VLLM_USE_MODELSCOPE",
            "HF_TOKEN HF_HOME SGLANG_USE_MODELSCOPE",
            "",
            "nothing is downloaded",
        ),
        Row(
            "VLLM_LOGGING_LEVEL VLLM_CONFIGURE_LOGGING",
            "SGLANG_LOGGING_CONFIG_PATH",
            "",
            "POST /log_level of the operator's socket",
        ),
        Row(
            "VLLM_*",
            "SGLANG_* SGL_*",
            "",
            "no other variable changes what is done: options do",
        ),
    ),
)

COMMANDS: Section = (
    "Commands",
    (
        Row("vllm serve", "sglang.launch_server", "serve"),
        Row("vllm chat", "", "chat", "the model is in the same process"),
        Row("vllm complete", "", "generate", "the model is in the same process"),
        Row("vllm bench serve", "sglang.bench_serving", "bench serve"),
        Row("vllm bench throughput", "sglang.bench_offline_throughput", "bench offline"),
        Row("vllm bench latency", "sglang.bench_one_batch", "bench decode"),
        Row("vllm collect-env", "sglang.check_env", "inspect"),
        Row("vllm run-batch", "", "", "LLM.generate takes a list of any length"),
        Row("", "sglang_router smg", "", "both work in front of these servers (docs/serving.md)"),
    ),
)
