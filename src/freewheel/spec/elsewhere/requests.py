# SPDX-License-Identifier: Apache-2.0
"""What a request says, in Python and over HTTP, by the names of vLLM and SGLang.

`ours` is a field of SamplingParams, an argument of a method of LLM, or a field of a body.
"""

from __future__ import annotations

from freewheel.spec.elsewhere.rows import Row, Section

_MANY = "give the prompt so many times: llm.generate([prompt] * n)"
_STRUCTURED = "json_schema, regex, choice, grammar and json_object are fields of their own here"
_NO_BEAMS = "there is no beam search"
_HIDDEN = "there are none to be had"
_ADAPTERS = "there are no adapters"
_GREEDY = "temperature is 0 for greedy decoding"
_ALIKE = "presence_penalty frequency_penalty repetition_penalty"

PARAMS: Section = (
    "Sampling parameters",
    (
        Row("temperature", "temperature", "temperature"),
        Row("top_p", "top_p", "top_p"),
        Row("top_k", "top_k", "top_k", "0 or -1 is off"),
        Row("min_p", "min_p", "min_p"),
        *(Row(name, name, name) for name in _ALIKE.split()),
        Row("repeat_penalty", "", "repetition_penalty"),
        Row("logit_bias", "logit_bias", "logit_bias", "at most 300 tokens"),
        Row("bad_words", "", "bad_words"),
        Row("allowed_token_ids", "", "allowed_token_ids"),
        Row(
            "max_tokens",
            "max_new_tokens max_completion_tokens max_length max_gen_len",
            "max_tokens",
            "256 unless something else is said; vLLM has 16, SGLang 128",
        ),
        Row("min_tokens", "min_new_tokens min_length", "min_tokens"),
        Row("stop stop_sequences stop_strings stop_words", "stop", "stop"),
        Row("", "stop_regex", "", "an answer ends at texts and tokens; regex is of all of it"),
        Row("stop_token_ids stop_ids eos_token_id", "stop_token_ids", "stop_token_ids"),
        Row("ignore_eos", "ignore_eos", "ignore_eos"),
        Row("seed random_seed", "sampling_seed", "seed"),
        Row("logprobs n_probs", "top_logprobs top_logprobs_num", "logprobs", "0 to 20"),
        Row("prompt_logprobs", "", "prompt_logprobs", "0 to 20"),
        Row("flat_logprobs", "", "", "logprobs have one form (docs/api.md, results)"),
        Row("skip_special_tokens", "skip_special_tokens", "skip_special_tokens"),
        Row(
            "spaces_between_special_tokens",
            "spaces_between_special_tokens",
            "",
            "no spaces are put between tokens",
        ),
        Row("include_stop_str_in_output", "no_stop_trim", "include_stop_str_in_output"),
        Row("guided_json schema response_format", "json_schema", "json_schema"),
        Row("guided_regex", "regex", "regex"),
        Row("guided_choice", "", "choice"),
        Row("guided_grammar", "ebnf", "grammar", "Lark, or BNF with ::="),
        Row(
            "structural_tag",
            "structural_tag",
            "",
            "a chat has it as response_format (docs/serving.md); calls of tools: tool_choice and "
            "strict; forms behind a token: grammar and grammar_trigger",
        ),
        Row("structured_outputs guided_decoding", "", "", _STRUCTURED),
        Row("thinking_budget reasoning_budget", "", "thinking_token_budget"),
        Row("n num_return_sequences", "n", "", _MANY),
        Row("best_of", "", "", "answers are not ranked; " + _MANY),
        Row("use_beam_search length_penalty", "beam_width", "", _NO_BEAMS),
        Row("do_sample", "", "", _GREEDY),
        Row("detokenize", "", "", "an answer has text and token_ids"),
        Row("output_kind", "stream_interval", "", "LLM.stream gives an answer round by round"),
        Row("truncate_prompt_tokens", "", "", "a prompt that is too long is refused, never cut"),
        Row(
            "logits_processors extra_args",
            "custom_params",
            "",
            "no code of a caller runs in a round; logit_bias and grammar do",
        ),
        Row("stream", "stream", "", "LLM.stream gives an answer as it comes"),
        Row("priority", "priority", "", "LLM.generate and LLM.stream have it"),
        Row("cache_salt", "extra_key", "", "cache_salt of LLM.generate and LLM.stream is it"),
    ),
)

ARGUMENTS: Section = (
    "Arguments of `LLM.generate`, `LLM.chat` and `Engine.generate`",
    (
        Row(
            "prompts prompt prompt_token_ids inputs",
            "prompt input_ids text",
            "prompts prompt",
            'text, token ids, {"prompt": ..} or {"prompt_token_ids": ..}, or a list of these',
        ),
        Row("sampling_params sampling_param", "sampling_params", "params", "SamplingParams"),
        Row("messages conversation", "", "messages"),
        Row("priority", "priority", "priority", "the lower goes first"),
        Row("chat_template_kwargs", "", "thinking", "and effort, how much"),
        Row("continue_final_message", "", "continue_final_message"),
        Row(
            "add_generation_prompt",
            "",
            "continue_final_message",
            "False is the opposite of it",
        ),
        Row(
            "chat_template chat_template_content_format",
            "",
            "",
            "it is the model folder's own (docs/serving.md, conversations and tools)",
        ),
        Row("tools", "", "", "freewheel serve has them (docs/serving.md)"),
        Row("use_tqdm", "", "", "there is no bar to switch off"),
        Row("lora_request", "lora_path", "", _ADAPTERS),
        Row("mm_processor_kwargs", "image_data audio_data video_data", "", "models are for text"),
        Row(
            "",
            "return_logprob logprob_start_len token_ids_logprob",
            "",
            "SamplingParams has logprobs and prompt_logprobs",
        ),
        Row("", "stream", "", "LLM.stream gives an answer as it comes"),
        Row("return_hidden_states", "return_hidden_states", "", _HIDDEN),
    ),
)

PROMPTS: Section = (
    "Prompts as mappings",
    (
        Row("prompt", "text", "prompt"),
        Row("prompt_token_ids", "input_ids", "prompt_token_ids"),
        Row("cache_salt", "extra_key", "cache_salt"),
        Row(
            "multi_modal_data multi_modal_uuids mm_processor_kwargs",
            "image_data audio_data video_data",
            "",
            "models are for text alone: leave it out",
        ),
        Row("prompt_embeds", "input_embeds", "", "a prompt is text or token ids"),
        Row(
            "encoder_prompt decoder_prompt token_type_ids",
            "",
            "",
            "models have no encoder: give one prompt",
        ),
    ),
)

FIELDS: Section = (
    "Fields of `/v1/completions` and `/v1/chat/completions`",
    (
        Row("max_length", "max_new_tokens", "max_tokens"),
        Row("stop_sequences stop_strings", "", "stop"),
        Row("", "min_new_tokens", "min_tokens"),
        Row("random_seed", "sampling_seed", "seed"),
        Row("num_return_sequences", "", "n"),
        Row(
            "guided_json guided_regex guided_choice guided_grammar guided_decoding_backend "
            "guided_whitespace_pattern json_schema",
            "regex ebnf",
            "structured_outputs response_format",
        ),
        Row("structured_outputs", "", "structured_outputs", "one of the forms in docs/serving.md"),
        Row("format", "", "response_format"),
        Row("", "no_stop_trim", "include_stop_str_in_output"),
        Row("thinking_budget reasoning_budget", "", "thinking_token_budget"),
        Row("cache_salt", "extra_key", "cache_salt"),
        Row("priority", "priority", "priority", "the lower goes first"),
        Row("return_token_ids", "", "return_token_ids"),
        Row("chat_template_kwargs", "chat_template_kwargs", "chat_template_kwargs"),
        Row(
            "include_reasoning",
            "separate_reasoning stream_reasoning",
            "include_reasoning",
            "true, which is what there is",
        ),
        Row("best_of", "", "", "answers are not ranked; n gives several"),
        Row("use_beam_search length_penalty", "", "", _NO_BEAMS),
        Row("do_sample", "", "", _GREEDY),
        Row("", "sampling_params", "", "its fields stand in the request itself, but for /generate"),
        Row(
            "extra_body",
            "extra_body",
            "",
            "its fields stand in the request itself: it is the Python client's word",
        ),
        Row(
            "logits_processors",
            "custom_logit_processor custom_params",
            "",
            "no code of a caller runs in a round; logit_bias does",
        ),
        Row("suffix", "suffix", "", "answers continue a prompt; nothing is filled in"),
        Row(
            "add_special_tokens",
            "",
            "",
            "the model's own begin token is added to text; give token ids, which /tokenize makes, "
            "for a prompt without it",
        ),
        Row("request_id", "rid", "", "send it as the header x-request-id"),
        Row("return_hidden_states", "return_hidden_states", "", _HIDDEN),
        Row("lora_request", "lora_path", "", _ADAPTERS),
        Row("", "stop_regex", "", "an answer ends at texts and tokens"),
        Row("truncate_prompt_tokens", "", "", "a prompt that is too long is refused, never cut"),
        Row(
            "spaces_between_special_tokens",
            "spaces_between_special_tokens",
            "",
            "no spaces are put between tokens",
        ),
        Row("chat_template documents", "", "", "the model folder's own encoding is used"),
        Row("mm_processor_kwargs", "image_data audio_data", "", "models are for text"),
        Row(
            "structural_tag",
            "structural_tag",
            "",
            "a chat has it as response_format of type structural_tag",
        ),
    ),
)
"""Beside those of OpenAI, and vLLM's that have vLLM's names (docs/serving.md)."""

PLACES = {
    "response_format.schema": "json_schema.schema",
    "response_format.name": "json_schema.name",
    "response_format.strict": "json_schema.strict",
    "response_format.description": "json_schema.description",
    "sampling_params.seed": "sampling_seed",
    "tool_choice.function": "name, beside type",
    "tool_choice.allowed_tools": "mode and tools, beside type",
    "tool_choice.tools.function": "name, beside type",
    "tool_choice.name": "function.name",
    "tool_choice.allowed_tools.tools.name": "function.name",
    "tool_choice.mode": "allowed_tools.mode",
    "tool_choice.tools": "allowed_tools.tools",
}
"""Fields one level too high, or too deep; without places in lists."""

NATIVE = {
    "prompt": "text",
    "prompt_token_ids": "input_ids",
    "max_tokens": "sampling_params.max_new_tokens",
    "max_completion_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "logprobs": "return_logprob and top_logprobs_num",
    "messages": "text, or /v1/chat/completions",
}
"""What `/generate`, in SGLang's words, has for fields of the other addresses."""
