# SPDX-License-Identifier: Apache-2.0
"""POST /tokenize and /detokenize: vLLM's names."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from freewheel.server.failures import ApiError
from freewheel.server.respond import json_response
from freewheel.server.routes.chat import MAX_MESSAGES, ChatMessage, Talked, as_messages
from freewheel.server.schema import ShortText, Strict, Text, TokenId
from freewheel.server.serving import Served

router = APIRouter()


class TokenizeRequest(Talked):
    """`prompt`, or `messages` as a conversation, with what a chat says of thinking and tools.

    `add_special_tokens` false: plain text.
    """

    model: ShortText | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """Ids, special ones spelt out."""

    model: ShortText | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 21)]


@router.post("/tokenize")
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(body: TokenizeRequest, serving: Served) -> Response:
    """Ids of a text or of a conversation."""
    serving.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give either prompt or messages", param="prompt")
    if body.messages is not None:
        calling = body.calling()
        ask = body.ask(calling, body.messages)
        talk = await serving.converse(as_messages(body.messages), ask, calling)
        ids = talk.ids
    elif body.add_special_tokens:
        ids = await serving.encode(body.prompt or "")
    else:
        ids = serving.tokenizer.encode_text(body.prompt or "")
    found = {"tokens": ids, "count": len(ids), "max_model_len": serving.context_len}
    if body.return_token_strs:
        found["token_strs"] = [serving.tokenizer.decode([one], False) for one in ids]
    return json_response(found)


@router.post("/detokenize")
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(body: DetokenizeRequest, serving: Served) -> Response:
    """The text of ids."""
    serving.check_model(body.model)
    serving.check_ids(body.tokens, "tokens")
    return json_response({"prompt": serving.tokenizer.decode(body.tokens, False)})
