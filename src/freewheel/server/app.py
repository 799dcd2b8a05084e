# SPDX-License-Identifier: Apache-2.0
"""The application: its routes, and what becomes of errors."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

import freewheel
from freewheel.server.admin import AdminSocket, listening_to_operator
from freewheel.server.failures import ApiError, error_bytes
from freewheel.server.invalid import refusal_of
from freewheel.server.routes import (
    chat,
    completions,
    generate,
    messages,
    page,
    refused,
    responses,
    rounds,
    selection,
    service,
    tokens,
)
from freewheel.server.routes.refused import ABSENT
from freewheel.server.serving import Serving
from freewheel.spec.elsewhere import address_hint

log = logging.getLogger("freewheel.server")

ROUTERS = (
    completions.router,
    chat.router,
    generate.router,
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
    route = request.scope.get("route")
    body = route.body_field if isinstance(route, APIRoute) else None
    kind = None if body is None else body.field_info.annotation
    errors = [one | {"loc": _inside(one)} for one in error.errors()]
    return _answer(request, refusal_of(errors, kind))


def _inside(error: Mapping[str, Any]) -> tuple[str | int, ...]:
    """The place in the body; of JSON that ends too early, pydantic's is a place in the text."""
    place = error["loc"]
    return place[1:] if place[:1] == ("body",) else place


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    hint = ""
    if error.status_code == 404:
        hint = address_hint(request.url.path, _addresses())
    elif error.status_code == 405 and error.headers is not None:
        hint = f"{request.url.path} takes {error.headers.get('Allow', 'no such method')}"
    text = f"{error.detail}: {hint}" if hint else f"{error.detail}"
    answer = _answer(request, ApiError(error.status_code, text))
    answer.headers.update(error.headers or {})
    return answer


def _addresses() -> list[str]:
    """All that the server answers at, but for those that it only refuses."""
    return [
        route.path
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, Route) and route.path not in ABSENT
    ]


async def _broken(request: Request, error: Exception) -> Response:
    """A fault of the server's own: this request ends, and the log has the rest."""
    log.error("%s failed", request.url.path, exc_info=error)
    return _answer(request, ApiError(500, "an internal error ended this request", code="internal"))
