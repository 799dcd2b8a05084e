# SPDX-License-Identifier: Apache-2.0
"""Options about cards, the server and its logs, by the names of vLLM and SGLang."""

from __future__ import annotations

from freewheel.spec.elsewhere.rows import Row, Section

_TALK = (
    "it is built in, and read from the model's folder (docs/serving.md, conversations and tools)"
)
_CONTEXTS = "contexts are not cut; from so many tokens on, processes share the scan of index keys"

GPUS: Section = (
    "Many GPUs",
    (
        Row("tensor_parallel_size", "tp_size tensor_parallel_size", "tp"),
        Row(
            "data_parallel_size",
            "dp_size data_parallel_size enable_dp_attention",
            "dp",
            "copies of all but the experts, which are spread over all processes",
        ),
        Row(
            "enable_expert_parallel",
            "ep_size expert_parallel_size enable_ep_moe",
            "ep",
            "a switch, without a number",
        ),
        Row(
            "decode_context_parallel_size prefill_context_parallel_size dcp_* cp_*",
            "attn_cp_size attention_context_parallel_size enable_*_prefill_context_parallel "
            "*_prefill_cp_mode",
            "split_scan",
            _CONTEXTS,
        ),
        Row(
            "pipeline_parallel_size",
            "pp_size pipeline_parallel_size pp_*",
            "",
            "layers are not spread over stages; tp shares every layer",
        ),
        Row(
            "all2all_backend disable_custom_all_reduce disable_nccl_for_dp_synchronization",
            "moe_a2a_backend deepep_* disable_custom_all_reduce enable_mscclpp enable_*nvls "
            "enable_*symm_mem enable_p2p_check",
            "",
            "ranks exchange by NCCL, on CPUs by gloo",
        ),
        Row(
            "enable_eplb eplb_config expert_placement_strategy enable_elastic_ep",
            "*eplb* ep_num_redundant_experts ep_dispatch_algorithm init_expert_location "
            "*expert_distribution* *elastic_*",
            "",
            "experts stay where they were dealt out",
        ),
        Row(
            "distributed_executor_backend worker_cls worker_extension_cls",
            "",
            "",
            "the process that is started starts the others (docs/many-gpus.md)",
        ),
        Row(
            "nnodes node_rank master_addr master_port headless",
            "nnodes node_rank dist_init_addr nccl_init_addr nccl_port",
            "",
            "torchrun -m freewheel.worker starts ranks; several machines were never tried",
        ),
        Row(
            "data_parallel_*",
            "load_balance_method",
            "",
            "copies go in step, and one scheduler deals requests out to them",
        ),
        Row(
            "",
            "base_gpu_id gpu_id_step",
            "",
            "CUDA_VISIBLE_DEVICES says which cards there are",
        ),
        Row("numa_bind numa_bind_*", "numa_node", "", "numactl binds a process"),
        Row(
            "kv_transfer_config",
            "disaggregation_mode",
            "role",
            "prefill or decode (docs/many-gpus.md, prompts apart from answers)",
        ),
        Row("", "disaggregation_bootstrap_port", "kv_port"),
        Row("", "disaggregation_transfer_backend", "kv_wire", "auto, nixl or tcp"),
        Row("", "disaggregation_*", "", "docs/many-gpus.md says how prompts change engines"),
    ),
)

SERVER: Section = (
    "Server",
    (
        Row("host", "host", "host", "an address that others reach needs a key"),
        Row("port", "port", "port", "8000; SGLang's is 30000"),
        Row(
            "api_key",
            "api_key",
            "api_key_file",
            "or set FREEWHEEL_API_KEY; everybody on a machine sees the arguments of a process",
        ),
        Row("", "admin_api_key", "admin_socket", "the operator's orders are not on the port"),
        Row("uds", "", "", "clients come by --host and --port"),
        Row(
            "ssl_* enable_ssl_refresh",
            "ssl_* enable_ssl_refresh",
            "",
            "there is no TLS here: put a proxy in front",
        ),
        Row(
            "allow_credentials allowed_origins allowed_methods allowed_headers",
            "",
            "",
            "web pages of other origins are not let in (docs/serving.md, security)",
        ),
        Row("root_path", "fastapi_root_path", "", "let the proxy in front strip its prefix"),
        Row("middleware io_processor_plugin", "", "", "no code of others runs in the server"),
        Row(
            "tool_call_parser reasoning_parser enable_auto_tool_choice chat_template "
            "tool_parser_plugin reasoning_parser_plugin enable_reasoning tool_server "
            "chat_template_content_format exclude_tools_when_tool_choice_none",
            "tool_call_parser reasoning_parser chat_template hf_chat_template_name tool_server "
            "completion_template",
            "",
            _TALK,
        ),
        Row(
            "default_chat_template_kwargs reasoning_config trust_request_chat_template",
            "",
            "",
            "a request has chat_template_kwargs and thinking_token_budget",
        ),
        Row("response_role", "", "", "it is assistant"),
        Row(
            "config",
            "config",
            "",
            "options stand on the command line, or in a service's file "
            "(docs/serving.md, as a service)",
        ),
        Row("h11_max_*", "", "", "bodies have 8 MiB at most, heads 32 KiB"),
        Row(
            "api_server_count disable_frontend_multiprocessing renderer_num_workers",
            "tokenizer_worker_num detokenizer_worker_num *tokenizer_batch*",
            "",
            "there is one process for HTTP and one for the engine",
        ),
        Row("disable_fastapi_docs enable_offline_docs", "", "", "/openapi.json is all there is"),
        Row("enable_request_id_headers", "", "", "x-request-id is always sent"),
        Row("enable_force_include_usage", "", "", "a request has stream_options"),
        Row("return_tokens_as_token_ids tokens_only", "", "", "a request has return_token_ids"),
        Row("enable_server_load_tracking", "", "", "/v1/loads is always there"),
        Row("", "skip_server_warmup warmups", "", "on CUDA, graphs are made before /ready is 200"),
        Row("", "allow_auto_truncate", "", "a prompt that is too long is refused, never cut"),
        Row("", "grpc_mode", "", "clients come by HTTP"),
        Row("", "file_storage_path", "", "nothing of clients is stored"),
    ),
)

LOGS: Section = (
    "Logs, metrics and faults",
    (
        Row(
            "*log_requests max_log_len enable_log_outputs enable_log_deltas",
            "log_requests log_requests_*",
            "",
            "a request is one line, without its text; there is nothing to switch off",
        ),
        Row(
            "disable_log_stats aggregate_engine_logging enable_logging_iteration_details",
            "decode_log_interval enable_request_time_stats_logging show_time_cost",
            "",
            "/metrics has it, and the log does not",
        ),
        Row(
            "uvicorn_log_level log_config_file log_error_stack",
            "log_level log_level_http",
            "",
            "the operator's socket sets the level of a server that runs: POST /log_level "
            "(--admin-socket); --json-logs makes each line an object",
        ),
        Row(
            "disable_uvicorn_access_log disable_access_log_for_endpoints",
            "uvicorn_access_log_exclude_prefixes",
            "",
            "probes have a line only if they fail",
        ),
        Row(
            "otlp_traces_endpoint",
            "otlp_traces_endpoint enable_trace",
            "otlp_endpoint",
            "OTLP over HTTP: http://collector:4318/v1/traces",
        ),
        Row("collect_detailed_traces", "", "", "a span is of a whole answer, with its first token"),
        Row(
            "kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics "
            "show_hidden_metrics_for_version",
            "enable_metrics enable_metrics_* enable_mfu_metrics tokenizer_metrics_* bucket_* "
            "*_tokens_buckets collect_tokens_histogram export_metrics_*",
            "",
            "/metrics is always there, and has all of its metrics",
        ),
        Row("", "crash_dump_folder", "dump_dir", "`freewheel replay` repeats what lies there"),
        Row(
            "profiler_config enable_layerwise_nvtx_tracing",
            "enable_profile_cuda_graph enable_layerwise_nvtx_marker",
            "",
            "`freewheel bench decode --timeline FILE` and GET /debug/round write traces",
        ),
        Row("kv_events_config", "kv_events_config", "", "no events of the cache are sent"),
        Row("", "enable_nan_detection", "", "an answer whose logits held NaN ends with an error"),
        Row(
            "enable_return_routed_experts",
            "enable_return_hidden_states enable_return_routed_experts",
            "",
            "no inner values are given out; POST /debug/selection says what the indexers select",
        ),
    ),
)

BENCH: Section = (
    "`bench serve`",
    (
        Row("base_url", "base_url", "url"),
        Row("model", "model", "model"),
        Row("endpoint", "", "endpoint"),
        Row("num_prompts", "num_prompts", "num_prompts"),
        Row("request_rate", "request_rate", "request_rate"),
        Row("burstiness", "", "burstiness"),
        Row("max_concurrency", "max_concurrency", "max_concurrency"),
        Row("num_warmups", "warmup_requests", "num_warmups"),
        Row("random_input_len input_len", "random_input_len", "prompt_tokens"),
        Row("random_output_len output_len", "random_output_len", "max_tokens"),
        Row("dataset_path", "dataset_path", "prompt_file", "a text that prompts are cut from"),
        Row("goodput", "", "goodput"),
        Row("save_detailed", "output_details", "save_detailed"),
        Row("save_result result_filename", "output_file", "json", "on standard output"),
        Row("backend", "backend", "", "--url says where, --endpoint which one"),
        Row("dataset_name", "dataset_name", "", "prompts are cut from one text"),
    ),
)
"""Options of `vllm bench serve` and `sglang.bench_serving`."""
