# SPDX-License-Identifier: Apache-2.0
"""Fields of requests that are taken with one value only, or not at all, and what to do instead."""

from __future__ import annotations

_KEPT = "this server keeps no answers: send the earlier turns with each request"
_THOUGHTS = "thoughts are always a field of their own; reasoning_effort: none has none of them"
_TEXT = "this server takes text"
_PLAIN = "thoughts are plain text here, and are sent as they are"
_LENGTH = "the model has no such setting: say in the prompt how long an answer should be"

ONE_VALUE = {
    "store": _KEPT,
    "background": "this server keeps no answers to be fetched later: stream them",
    "previous_response_id": _KEPT,
    "conversation": _KEPT,
    "truncation": "a prompt that is too long is refused: leave out what may go",
    "encrypted_content": _PLAIN,
    "summary": _PLAIN,
    "verbosity": _LENGTH,
    "include_obfuscation": "streams are not padded",
    "separate_reasoning": _THOUGHTS,
    "stream_reasoning": _THOUGHTS,
    "include_reasoning": _THOUGHTS,
    "remote_block_ids": "pages are found by remote_request_id",
    "spaces_between_special_tokens": "text is joined as the tokenizer joins it",
    "stop_regex": "use stop for texts that end an answer, or regex for the whole of it",
    "custom_params": "no code of clients runs here; use logit_bias, or a form of the answer",
    "custom_logit_processor": "no code of clients runs here; use logit_bias, or a form of the "
    "answer",
    "token_ids_logprob": "use top_logprobs_num, which gives the likeliest",
    "input_embeds": "a prompt is text or token ids",
    "image_data": _TEXT,
    "audio_data": _TEXT,
    "video_data": _TEXT,
    "lora_path": "adapters are not loaded: serve a checkpoint that has it merged",
    "return_hidden_states": "hidden states stay on the device",
    "refusal": "answers have content alone: send it as that",
    "audio": _TEXT,
    "function_call": "use tool_calls",
    "citations": "text has no sources here: leave them out",
    "service_tier": "requests are served alike; priority lets one go first",
    "modalities": "this server only generates text",
    "tools.type": "this server runs no tools of its own: it takes functions, which its client runs",
}
"""By the last part of a field's path, or by the last two."""

ABSENT = {
    "audio": "this server only generates text",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "prediction": "drafts need no help of clients",
    "verbosity": _LENGTH,
    "web_search_options": "this server opens no connections; give a function as a tool",
    "prompt_cache_retention": "prompts are kept while there is room",
    "include": "an answer has all that there is: leave it out",
    "top_logprobs": "log-probabilities are top_logprobs in a chat, logprobs in a completion and "
    "top_logprobs_num in /generate",
    "max_tool_calls": "this server runs no tools of its own: its client counts their calls",
    "container": "this server runs no tools of its own",
    "mcp_servers": "this server opens no connections; give functions as tools",
    "context_management": "a prompt is taken whole: leave out what may go",
}
"""Of OpenAI's and Anthropic's own, those that a request has nowhere here."""


def reason_of(path: list[str]) -> str:
    """Why a field takes one value only, and what to do; empty if nothing is known of it.

    `path`: to the field, from the request; places in lists do not matter.
    """
    names = [part for part in path if not part.isdigit()]
    return ONE_VALUE.get(".".join(names[-2:])) or ONE_VALUE.get(names[-1] if names else "") or ""
