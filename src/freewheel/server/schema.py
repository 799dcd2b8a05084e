# SPDX-License-Identifier: Apache-2.0
"""Fields that several endpoints share. Every number, text and list has a bound.

Names are OpenAI's, and vLLM's where OpenAI has none. A field that is not in the schema is refused
by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from freewheel.server.failures import ApiError

MAX_TEXT = 4 << 20
"""Characters of one text; the body's own limit comes first by default."""
MAX_CHOICES = 128
MAX_PROMPTS = 256

Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
ShortText = Annotated[str, StringConstraints(max_length=512)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
IdText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=1 << 21)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
"""vLLM's: the lower goes first; 0 if nothing is said."""


Port = Annotated[int, Field(ge=1, le=65535)]
Room = Annotated[int, Field(ge=0, lt=1 << 63)]


class Strict(BaseModel):
    """No coercion, no unknown field, no NaN."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


class StreamOptions(Strict):
    """`include_usage`: a last chunk with the usage. `continuous_usage_stats`: in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Strict):
    """vLLM's: one form that the answer is held to."""

    json_: dict[str, Any] | Text | None = Field(default=None, alias="json")
    regex: Annotated[str, StringConstraints(max_length=1 << 16)] | None = None
    choice: Annotated[list[ShortText], Field(min_length=1, max_length=1024)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class Sampling(Strict):
    """How tokens are chosen and when an answer ends."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=8)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: (
        Annotated[dict[IdText, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024)]
        | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=1 << 17)] | None = None
    bad_words: Annotated[list[StopText], Field(max_length=1024)] | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1, le=128)] | None = None
    thinking_token_budget: Count | None = None


class Usual(Strict):
    """What clients of vLLM and of SGLang send with every chat: the only value that there is."""

    separate_reasoning: Literal[True] | None = None
    stream_reasoning: Literal[True] | None = None
    include_reasoning: Literal[True] | None = None


class KvTransfer(Strict):
    """vLLM's: a prefill engine is told `do_remote_decode` and answers with the rest, which a
    decode engine is then told."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: ShortText | None = None
    remote_block_ids: None = None
    remote_host: ShortText | None = None
    remote_port: Port | None = None
    remote_request_id: ShortText | None = None


class Choices(Sampling):
    """What the two older endpoints of OpenAI have in common."""

    model: ShortText | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: ShortText | None = None
    priority: Priority | None = None
    cache_salt: ShortText | None = None
    return_token_ids: bool | None = None
    return_pieces: bool | None = Field(
        default=None,
        description="Streamed choices also carry `pieces` and, in a chat, `reasoning_pieces`: "
        "[text, whether it was an accepted draft, place of its token]. One event is one round.",
    )
    bootstrap_host: ShortText | None = Field(
        default=None,
        description="SGLang's, as routers send them to both engines of a pair: the prefill "
        "engine's address and port, and the room in which the prompt's pages change hands.",
    )
    bootstrap_port: Port | None = None
    bootstrap_room: Room | None = None
    kv_transfer_params: KvTransfer | None = None

    def check_stream(self) -> None:
        """Raise ApiError 400 for settings of a stream that is not asked for."""
        if self.stream_options is not None and not self.stream:
            message = "stream_options: goes with stream: true, and only with it"
            raise ApiError(400, message, param="stream_options", code="invalid_value")
