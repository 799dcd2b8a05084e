# SPDX-License-Identifier: Apache-2.0
"""POST /debug/selection: which earlier tokens a token was chosen from, layer by layer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from freewheel.engine import ONE_TOKEN
from freewheel.server.generation import Talk
from freewheel.server.respond import Whole
from freewheel.server.schema import Priority, ShortText, Strict, Text, TokenIds
from freewheel.server.serving import Served

router = APIRouter()


class SelectionRequest(Strict):
    """`prompt`: all that stands before the token in question, as text or as ids.

    `return_token_strs`: the prompt's tokens as texts, too.
    """

    model: ShortText | None = None
    prompt: Text | TokenIds
    cache_salt: ShortText | None = None
    priority: Priority | None = None
    return_token_strs: bool = False


@router.post("/debug/selection")
async def selection(body: SelectionRequest, serving: Served) -> Response:
    """Queued and computed like any prompt; the lists come home in the letter of its last round."""
    model = serving.check_model(body.model)
    if isinstance(body.prompt, str):
        ids = await serving.encode(body.prompt)
    else:
        serving.check_ids(body.prompt, "prompt")
        ids = body.prompt
    serving.check_room(ids, 1, "prompt prompt")
    texts = await serving.token_texts(ids) if body.return_token_strs else None
    given = {"cache_salt": body.cache_salt, "priority": body.priority}
    generation = serving.generate([Talk(ids)], ONE_TOKEN, shows=True, **given)
    choice = generation.choices[0]

    def found() -> dict[str, Any]:
        of, told = serving.picked, choice.picks
        assert told is not None, "they come with the only token"
        shown: dict[str, Any] = {
            "model": model,
            "position": len(ids),
            "token_id": choice.token_ids[0],
            "ratio": of.ratio,
            "span": of.span,
            "window": of.window,
            "layers": [
                {"layer": layer, "picks": picks}
                for layer, picks in zip(of.layers, told, strict=True)
            ],
        }
        if texts is not None:
            shown["token_strs"] = texts
        return shown

    return Whole(generation, found)
