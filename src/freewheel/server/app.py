# SPDX-License-Identifier: Apache-2.0
"""The application: its routes, and what becomes of errors."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

import freewheel
from freewheel.server.admin import AdminSocket, listening_to_operator
from freewheel.server.failures import ApiError, error_bytes
from freewheel.server.naming import fields_at
from freewheel.server.routes import (
    chat,
    completions,
    messages,
    page,
    refused,
    responses,
    rounds,
    selection,
    service,
    tokens,
)
from freewheel.server.serving import Serving
from freewheel.spec.elsewhere import field_hint

log = logging.getLogger("freewheel.server")

ROUTERS = (
    completions.router,
    chat.router,
    messages.router,
    responses.router,
    tokens.router,
    service.router,
    rounds.router,
    selection.router,
    page.router,
    refused.router,
)


def build_app(serving: Serving, admin: AdminSocket | None = None) -> FastAPI:
    """All routes, for one model. The engine starts and ends with it.

    `admin`: where an operator is listened to meanwhile.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        serving.link.start()
        async with listening_to_operator(serving, admin):
            yield
        await serving.link.stop()
        serving.close()

    # Its interactive pages load scripts from elsewhere; the document itself is enough.
    app = FastAPI(
        title="Freewheel",
        version=freewheel.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.serving = serving
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _broken)
    return app


def _answer(request: Request, error: ApiError) -> Response:
    body = error_bytes(error, request.url.path.startswith("/v1/messages"))
    return Response(body, error.status, error.headers(), "application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _answer(request, error)


async def _invalid(request: Request, error: Exception) -> Response:
    """A body that does not fit the schema: OpenAI's status and body, and the field's name."""
    assert isinstance(error, RequestValidationError)
    # Of the ways in which a value may be meant, the one that it fits furthest says most.
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    unknown = first["type"] == "extra_forbidden"
    parts = [str(part) for part in first["loc"] if part != "body"]
    ends = len(parts) - 1 if unknown else len(parts)
    where = [part for place, part in enumerate(parts) if place == ends or _is_name(part)]
    field = next((part for part in where if not part.isdigit()), None)
    path = ".".join(where)
    message = first["msg"]
    if unknown:
        hint = field_hint(parts[-1], _fields_of(request, parts))
        message = "is not a field that this server knows" + (f"; {hint}" if hint else "")
    elif first["type"] == "model_attributes_type" and not where:
        path, message = "body", "must be a JSON object, sent with content-type: application/json"
    elif first["type"] == "json_invalid":
        path, field, message = "body", None, "is not valid JSON"
    text = f"{path}: {message}" if path else f"body: {message}"
    return _answer(request, ApiError(400, text, param=field, code="invalid_value"))


def _fields_of(request: Request, place: list[str]) -> list[str]:
    """What may stand there in the body of a request to this address."""
    route = request.scope.get("route")
    body = route.body_field if isinstance(route, APIRoute) else None
    return [] if body is None else fields_at(body.field_info.annotation, place)


def _is_name(part: str) -> bool:
    """A field's name or a place in a list: not what pydantic calls one way of several."""
    return part.isidentifier() or part.isdigit() or not part.isascii()


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = _answer(request, ApiError(error.status_code, f"{error.detail}"))
    answer.headers.update(error.headers or {})
    return answer


async def _broken(request: Request, error: Exception) -> Response:
    """A fault of the server's own: this request ends, and the log has the rest."""
    log.error("%s failed", request.url.path, exc_info=error)
    return _answer(request, ApiError(500, "an internal error ended this request", code="internal"))
