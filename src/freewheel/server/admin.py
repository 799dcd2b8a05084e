# SPDX-License-Identifier: Apache-2.0
"""What an operator may do while the server runs, on a Unix socket that is the user's alone.

Not on the port that clients reach: a key for asking is no key for this. The socket's file has mode
0600, made before anybody can connect.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import uvicorn
from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from freewheel.errors import ConfigError
from freewheel.server.failures import ApiError, error_bytes
from freewheel.server.invalid import refusal_of
from freewheel.server.link import EngineState
from freewheel.server.serving import Serving
from freewheel.server.tickets import Ticket

log = logging.getLogger("freewheel.admin")

AdminSocket = socket.socket
_Kind = TypeVar("_Kind", bound="Order")


class Order(BaseModel):
    """What an order says besides its address. `usage`: how that is said."""

    model_config = ConfigDict(strict=True, extra="forbid")
    usage: ClassVar[str] = "this order has no fields"


class AbortOrder(Order):
    """`ids` as `/status` shows them; none stands for all."""

    usage = 'send {"ids": ["..", ..]} as /status shows them, or nothing for all'
    ids: Annotated[list[str], Field(max_length=1 << 20)] | None = None


class LevelOrder(Order):
    usage = 'send {"level": "debug"}, or "info", "warning" or "error"'
    level: Literal["debug", "info", "warning", "error"]


def _order(kind: type[_Kind]) -> Callable[[Request], Awaitable[_Kind]]:
    """Reads an order: no body is an object without fields, and a local socket has no need of a
    content type. Raises ApiError 400, naming the field and the fix."""

    async def read(request: Request) -> _Kind:
        try:
            return kind.model_validate_json(await request.body() or b"{}")
        except ValidationError as error:
            found = refusal_of(error.errors(), kind)
            text = f"{found.message}; {kind.usage}"
            raise ApiError(400, text, param=found.param, code=found.code) from error

    return read


Plain = Annotated[Order, Depends(_order(Order))]
Abort = Annotated[AbortOrder, Depends(_order(AbortOrder))]
Level = Annotated[LevelOrder, Depends(_order(LevelOrder))]


async def _refused(_: Request, error: Exception) -> Response:
    """The project's form of an error, for whatever was asked."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{error.detail}: docs/serving.md lists the orders")
    assert isinstance(error, ApiError)
    return Response(error_bytes(error), error.status, error.headers(), "application/json")


def build_admin(serving: Serving) -> FastAPI:
    """`GET /status`, and `POST` for what changes something."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    link = serving.link
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _refused)

    @app.get("/status")
    async def status(_: Plain) -> dict[str, Any]:
        now = time.perf_counter()
        return {
            "engine": link.state,
            "pid": link.pid,
            "restarts": link.restarts,
            "failure": link.unfit or None,
            "draining": serving.draining,
            "requests": [_told(ticket, now) for ticket in link.ledger.live.values()],
        }

    @app.post("/abort")
    async def abort(order: Abort) -> dict[str, int]:
        live = link.ledger.live
        wanted = live.keys() if order.ids is None else live.keys() & set(order.ids)
        tickets = [live[one] for one in tuple(wanted)]
        link.give_up(tickets, ApiError(503, "the operator ended this request", code="aborted"))
        log.warning("%d requests were ended by the operator", len(tickets))
        return {"aborted": len(tickets)}

    @app.post("/flush_cache")
    async def flush_cache(_: Plain) -> dict[str, bool]:
        ready = link.state is EngineState.READY
        if ready:
            link.flush()
        return {"flushed": ready}

    @app.post("/drain")
    async def drain(_: Plain) -> dict[str, bool]:
        serving.draining = True
        log.warning("draining: no new requests until told to resume")
        return {"draining": True}

    @app.post("/resume")
    async def resume(_: Plain) -> dict[str, bool]:
        serving.draining = serving.ending
        return {"draining": serving.draining}

    @app.post("/restart")
    async def restart(_: Plain) -> dict[str, int]:
        lost = len(link.ledger.live)
        log.info("the operator restarts the engine; requests lost: %d", lost)
        link.kill()
        return {"lost": lost}

    @app.post("/log_level")
    async def log_level(order: Level) -> dict[str, str]:
        logging.getLogger("freewheel").setLevel(order.level.upper())
        return {"level": order.level}

    return app


def _told(ticket: Ticket, now: float) -> dict[str, Any]:
    return {
        "id": ticket.id,
        "prompt_tokens": len(ticket.prompt),
        "tokens": ticket.tokens,
        "waits": ticket.waits,
        "seconds": round(now - ticket.opened, 3),
    }


def open_admin_socket(path: Path) -> AdminSocket:
    """Listen there. Raises ConfigError if the path is taken, too long or cannot be made.

    A socket to which nobody listens any more is not taken: its server was killed.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if path.is_socket() and listener.connect_ex(str(path)) == errno.ECONNREFUSED:
        path.unlink()
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        said = error.strerror or str(error)
        raise ConfigError(
            f"admin_socket: cannot listen at {path}: {said}; remove what is there, or give another"
        ) from error
    finally:
        os.umask(before)
    return listener


class AdminServer(uvicorn.Server):
    """uvicorn's, beside the one that clients reach, which alone minds signals."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def listening_to_operator(
    serving: Serving, listener: AdminSocket | None
) -> AsyncIterator[None]:
    """Meanwhile the admin socket is answered, if there is one."""
    if listener is None:
        yield
        return
    config = uvicorn.Config(
        build_admin(serving),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = AdminServer(config)
    answering = asyncio.create_task(server.serve([listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await answering
