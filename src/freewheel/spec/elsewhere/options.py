# SPDX-License-Identifier: Apache-2.0
"""Options of `vllm serve`, `sglang.launch_server` and their engines, and what they are here.

`ours` is a field of EngineConfig or an option of `freewheel serve`. `deployment` has the rest.
"""

from __future__ import annotations

from freewheel.spec.elsewhere.rows import Row, Section

_TRUST = "trust_remote" + "_code"
_ADAPTERS = "lora_* *_lora *_lora_* *_loras"
_TEXT = "models are for text alone"
_KERNELS = "kernels are chosen by the device and by how the weights are stored"
_SHARE = "0.5 of the rounds while prompts wait and answers are under way; more is sooner"

MODEL: Section = (
    "Model and numbers",
    (
        Row("model", "model_path model", "model", "a folder that is here, or a shipped model"),
        Row("served_model_name", "served_model_name", "served_name", "one name"),
        Row(
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init",
            "tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init",
            "",
            "it is the model folder's own tokenizer.json",
        ),
        Row("max_model_len", "context_length", "context_len"),
        Row("dtype", "dtype", "dtype", "float32, bfloat16 or float64; float16 is not used"),
        Row("kv_cache_dtype", "kv_cache_dtype", "kv_cache_dtype", "auto, bf16, fp8 or fp8-index"),
        Row(
            "calculate_kv_scales kv_cache_dtype_skip_layers",
            "quantization_param_path",
            "",
            "every row of the cache has scales of its own",
        ),
        Row("load_format", "load_format", "load_format", "safetensors or dummy"),
        Row(
            "model_loader_extra_config ignore_patterns pt_load_map_location safetensors_* "
            "max_parallel_loading_workers use_tqdm_on_load",
            "model_loader_extra_config custom_weight_loader weight_loader_*",
            "",
            "safetensors are read in one way, and nothing else is read",
        ),
        Row(
            "quantization quantization_config allow_deprecated_quantization",
            "quantization torchao_config modelopt_* rl_quant_profile quantize_and_serve",
            "",
            "weights run as they are stored; `freewheel convert` stores them otherwise",
        ),
        Row(
            "hf_overrides hf_config_path config_format model_impl",
            "json_model_override_args model_impl",
            "",
            "config.json in the model's folder says what the model is",
        ),
        Row(
            "generation_config override_generation_config",
            "sampling_defaults preferred_sampling_params",
            "",
            "a request says how it is sampled; of generation_config.json the ends are read",
        ),
        Row(_TRUST, _TRUST, "", "no code of a checkpoint is ever run"),
        Row(
            "revision code_revision download_dir hf_token",
            "revision download_dir model_checksum",
            "",
            "nothing is downloaded: model is a folder that is here",
        ),
        Row("seed", "random_seed", "", "a request has it: SamplingParams(seed=..)"),
        Row("", "device", "device", "auto, cpu or cuda"),
        Row(
            "runner task convert pooler_config override_pooler_config",
            "is_embedding",
            "",
            "answers are all that is computed: no embeddings, no scores",
        ),
        Row(
            "enable_prompt_embeds mm_* *_mm_* media_io_kwargs allowed_*media* language_model_only "
            "video_pruning_rate",
            "enable_multimodal mm_* keep_mm_* encoder_* language_only",
            "",
            _TEXT,
        ),
        Row(_ADAPTERS, _ADAPTERS, "", "there are no adapters"),
        Row(
            "enforce_eager",
            "disable_cuda_graph",
            "graph",
            "eager is the one without graphs",
        ),
        Row(
            "compilation_config cudagraph_capture_sizes max_cudagraph_capture_size",
            "cuda_graph_bs disable_cuda_graph_padding *piecewise_cuda_graph* *torch_compile*",
            "",
            "every shape of a round has a graph, and there are as many as --max-batch needs",
        ),
        Row(
            "attention_backend attention_config moe_backend linear_backend kernel_config "
            "enable_flashinfer_autotune disable_cascade_attn",
            "*attention_backend sampling_backend dsa_* nsa_* *_gemm_backend moe_runner_backend "
            "*flashinfer* triton_attention_* disable_shared_experts_fusion enable_fused_*",
            "",
            _KERNELS,
        ),
        Row("", "enable_deterministic_inference", "deterministic", "on CUDA"),
        Row(
            "logits_processors",
            "enable_custom_logit_processor",
            "",
            "no code of a caller runs in a round; a request has logit_bias and grammars",
        ),
        Row("max_logprobs", "", "", "20 alternatives at most, on every server"),
        Row("logprobs_mode", "", "", "log-probabilities are of the model's own logits"),
        Row(
            "enable_sleep_mode enable_cumem_allocator",
            "enable_memory_saver *_cpu_backup",
            "",
            "an engine keeps its memory until it ends",
        ),
    ),
)

MEMORY: Section = (
    "Memory and cache",
    (
        Row(
            "gpu_memory_utilization",
            "mem_fraction_static",
            "cache_bytes",
            "in bytes, not a share of the memory; `freewheel plan` says what weights take",
        ),
        Row("kv_cache_memory_bytes", "", "cache_bytes"),
        Row("num_gpu_blocks_override", "", "cache_bytes", "in bytes, not in blocks"),
        Row("", "max_total_tokens", "cache_bytes", "in bytes, not in tokens"),
        Row("block_size", "page_size", "page_size"),
        Row(
            "enable_prefix_caching no_enable_prefix_caching",
            "disable_radix_cache disable_chunked_prefix_cache",
            "prefix_cache",
            "on unless --no-prefix-cache (prefix_cache=False) is given",
        ),
        Row(
            "prefix_caching_hash_algo prefix_cache_retention_interval",
            "radix_eviction_policy",
            "",
            "blocks used longest ago go first; they are found by a keyed BLAKE2b",
        ),
        Row("", "hicache_ratio", "host_cache_gb", "in GB of 10^9 bytes, not a ratio"),
        Row(
            "swap_space kv_offloading_size",
            "hicache_size enable_hierarchical_cache",
            "host_cache_gb",
            "in GB of 10^9 bytes, of each rank",
        ),
        Row(
            "kv_offloading_backend",
            "hicache_storage_backend",
            "disk_cache_gb",
            "files of one folder, --disk-cache-dir",
        ),
        Row(
            "",
            "hicache_* enable_lmcache",
            "",
            "there is one way down to host memory and files, and back (decisions 27 and 36)",
        ),
        Row(
            "cpu_offload_* offload_*",
            "cpu_offload_gb offload_* kt_*",
            "",
            "weights stay on the devices; tp shares them among several",
        ),
        Row(
            "enable_prompt_tokens_details",
            "enable_cache_report",
            "",
            "usage always says how many tokens were cached, and where",
        ),
    ),
)

BATCHES: Section = (
    "Batches and rounds",
    (
        Row("max_num_seqs", "max_running_requests cuda_graph_max_bs", "max_batch"),
        Row(
            "max_num_batched_tokens",
            "chunked_prefill_size max_prefill_tokens",
            "chunk",
            "prompt tokens of each request in a round, not of all together",
        ),
        Row(
            "enable_chunked_prefill long_prefill_token_threshold",
            "enable_dynamic_chunking",
            "chunk",
            "prompts are always computed in chunks of so many tokens",
        ),
        Row(
            "max_num_partial_prefills max_long_partial_prefills",
            "prefill_max_requests",
            "prefill_batch",
        ),
        Row(
            "",
            "enable_mixed_chunk enable_prefill_delayer prefill_delayer_*",
            "prefill_share",
            _SHARE,
        ),
        Row(
            "scheduling_policy scheduler_cls",
            "schedule_policy *priority_scheduling* schedule_low_priority_values_first",
            "",
            "always by priority, the lower first, and evenly among keys (decision 20)",
        ),
        Row(
            "scheduler_reserve_full_isl",
            "schedule_conservativeness num_reserved_decode_tokens",
            "",
            "a row that finds no page gives way and goes on later (num_preemptions_total)",
        ),
        Row("", "max_queued_requests", "max_requests", "those that are answered count, too"),
        Row("async_scheduling", "disable_overlap_schedule", "run_ahead", "0 waits for every round"),
        Row("num_scheduler_steps", "num_continuous_decode_steps", "run_ahead"),
        Row("stream_interval", "stream_interval", "", "one event of a stream is one round"),
        Row(
            "enable_dbo ubatch_size dbo_*",
            "enable_two_batch_overlap enable_single_batch_overlap tbo_*",
            "",
            "a round is not cut in two",
        ),
        Row("", "watchdog_timeout soft_watchdog_timeout", "stall_seconds"),
        Row(
            "structured_outputs_config guided_decoding_backend",
            "grammar_backend disable_outlines_disk_cache",
            "",
            "there is one way, and it is chosen by the form (docs/api.md, structured output)",
        ),
        Row(
            "",
            "constrained_json_*",
            "",
            "by a schema, at most one space stands between the parts of JSON",
        ),
    ),
)

DRAFTS: Section = (
    "Speculation",
    (
        Row(
            "speculative_config num_speculative_tokens spec_tokens",
            "speculative_num_steps speculative_num_draft_tokens",
            "speculate",
            "drafts a round, 3 unless something else is said; 0 switches them off",
        ),
        Row(
            "spec_method spec_model speculative_model",
            "speculative_algorithm speculative_draft_model_path speculative_draft_model",
            "drafter",
            "mtp is the model's own layer, lookup repeats the text; there are no other models",
        ),
        Row("", "speculative_eagle_topk", "", "drafts are a chain, not a tree"),
        Row(
            "",
            "speculative_accept_threshold_*",
            "",
            "tokens are those of the model without "
            "drafts: nothing is accepted for being nearly as likely",
        ),
        Row(
            "",
            "speculative_ngram_* speculative_* enable_multi_layer_eagle",
            "",
            "the drafter has no settings of its own",
        ),
    ),
)
