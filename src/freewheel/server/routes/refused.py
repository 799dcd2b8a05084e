# SPDX-License-Identifier: Apache-2.0
"""Endpoints of OpenAI that this server does not have, said clearly."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from freewheel.server.failures import ApiError

router = APIRouter()

ABSENT = {
    "/v1/embeddings": "embeddings",
    "/v1/audio/speech": "speech",
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "translation",
    "/v1/images/generations": "images",
    "/v1/images/edits": "images",
    "/v1/images/variations": "images",
    "/v1/moderations": "moderation",
    "/v1/rerank": "reranking",
    "/v1/score": "scoring",
}


def _refuse(what: str) -> ApiError:
    return ApiError(
        501,
        f"{what}: this server only generates text; it has no such model",
        code="not_implemented",
    )


def _add(path: str, what: str) -> None:
    async def refused() -> Response:
        raise _refuse(what)

    router.add_api_route(path, refused, methods=["POST"], name=what, include_in_schema=False)


for _path, _what in ABSENT.items():
    _add(_path, _what)
