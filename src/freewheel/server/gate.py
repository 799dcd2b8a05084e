# SPDX-License-Identifier: Apache-2.0
"""What every request passes before anything of it is parsed: who it is, how large, whether now.

Everything needs a key but what `OPEN` names, if the server has keys at all. Without keys the
server listens on this machine alone; then a web page that somebody visits is the one who could
reach it unasked, so a request with a foreign Origin or Host is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freewheel.server.failures import ApiError, error_bytes
from freewheel.server.link import EngineState
from freewheel.server.serving import Serving
from freewheel.server.settings import LOCAL_NAMES, TENANT
from freewheel.server.tickets import TRACE_PARENT

log = logging.getLogger("freewheel.access")

OPEN = frozenset({"/health", "/ready", "/ping"})
"""Open to all. So is the page, whose files are the package's own and hold nothing of anybody."""
PROBES = frozenset({*OPEN, "/metrics", "/v1/loads"})
"""Asked every few seconds by programs: what they ask is no news."""
OPEN_FILES = re.compile(r"/(?:page/[a-z]+\.(?:css|js|svg))?")
AUTHORITY = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//(?:\[([^\]]*)\]|([^/:@\[\]]*))(?::\d+)?/?", re.I)
BODY_SECONDS = 60.0
"""How long a body may take to come."""
GOOD_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
GOOD_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
SAFE_HEADERS = (
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Gate:
    """The application around the application."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._serving = app, serving
        self._keys = [_digest(key) for key in serving.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._pass(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers(scope)
        given = headers.get("x-request-id", "")
        request_id = given if GOOD_ID.fullmatch(given) else secrets.token_hex(8)
        outward = _Outward(scope, send, request_id)
        parent = headers.get("traceparent", "")
        TRACE_PARENT.set(parent if GOOD_PARENT.fullmatch(parent) else "")
        try:
            self._check(scope, headers)
            body = await self._body(receive)
            if body is not None:
                await self._app(scope, _Replayed(body, receive), outward)
        except ApiError as error:
            await outward.refuse(error)
        finally:
            outward.note(starting=self._serving.link.state is EngineState.STARTING)

    async def _body(self, receive: Receive) -> bytes | None:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await _read_body(receive, self._serving.settings.max_body_bytes)
        except TimeoutError:
            raise ApiError(408, "the body did not come in time", code="slow_body") from None

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Raise ApiError for whoever may not come in."""
        path, settings = scope["path"], self._serving.settings
        is_open = path in OPEN or OPEN_FILES.fullmatch(path) is not None
        if self._keys:
            if not is_open:
                self._check_key(headers)
        elif settings.local:
            _check_neighbour(headers)
        if not is_open and (closed := self._serving.closed()) is not None:
            raise closed
        length = headers.get("content-length", "0")
        if not length.isdigit() or len(length) > 15 or int(length) > settings.max_body_bytes:
            raise _too_large(settings.max_body_bytes)

    def _check_key(self, headers: Mapping[str, str]) -> None:
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        found = _digest(given)
        known = 0
        for number, key in enumerate(self._keys, 1):  # all of them: the time tells nothing of which
            known = max(known, number * hmac.compare_digest(found, key))
        TENANT.set(f"key {known}")
        if not known:
            raise ApiError(401, _why_no_key(headers, given), code="invalid_api_key")


class _Outward:
    """Sends, with the headers that every answer has, and remembers how it went."""

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self._scope, self._send, self._id = scope, send, request_id
        self._begun = time.perf_counter()
        self._status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            own = (*SAFE_HEADERS, (b"x-request-id", self._id.encode()))
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun."""
        if self._status:
            return
        body = error_bytes(error, self._scope["path"].startswith("/v1/messages"))
        headers = [(name.encode(), value.encode()) for name, value in error.headers().items()]
        headers += [(b"content-type", b"application/json"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(body)).encode()))
        await self({"type": "http.response.start", "status": error.status, "headers": headers})
        await self({"type": "http.response.body", "body": body})

    def note(self, starting: bool) -> None:
        """One line in the log; of a probe that found nothing wrong, for those who look closely.

        That an engine which is `starting` is not there yet is what a probe is sent to find.
        """
        fields = {
            "request_id": self._id,
            "method": self._scope["method"],
            "path": self._scope["path"],
            "status": self._status or None,  # None: the client left before there was one
            "ms": round(1000 * (time.perf_counter() - self._begun), 1),
        }
        expected = 200 <= self._status < 300 or (starting and self._status == 503)
        quiet = self._scope["path"] in PROBES and expected
        level = logging.DEBUG if quiet else logging.INFO
        log.log(level, json.dumps(fields), extra={"fields": fields})


async def _read_body(receive: Receive, limit: int) -> bytes | None:
    """The whole body; None if the client left. Raises ApiError once it is over the limit."""
    parts: list[bytes] = []
    total, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
        total += len(parts[-1])
        if total > limit:
            raise _too_large(limit)
    return b"".join(parts)


class _Replayed:
    """Receives a body that was read, and then whatever else comes."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _why_no_key(headers: Mapping[str, str], given: str) -> str:
    """What is wrong with a key that is not one of this server's; nothing of it is repeated."""
    if given:
        return "the API key that was sent is none of this server's"
    if headers.get("authorization", "").strip():
        return "the Authorization header holds no API key: send Authorization: Bearer KEY"
    return "an API key is needed: Authorization: Bearer KEY"


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8")).digest()


def _check_neighbour(headers: Mapping[str, str]) -> None:
    """Raise ApiError 403 for what a browser sends in the name of another site's page."""
    host = _host_name(f"//{headers.get('host', 'localhost')}")
    origin = headers.get("origin")
    if host not in LOCAL_NAMES or (origin is not None and _host_name(origin) not in LOCAL_NAMES):
        raise ApiError(
            403,
            "without an API key this server answers this machine's own programs and page alone; "
            "start it with a key to reach it under another name",
            code="foreign_origin",
        )


def _host_name(url: str) -> str:
    """The name or address in `//name:port`, or nothing for what is not of that form."""
    found = AUTHORITY.fullmatch(url)
    return (found[1] or found[2] or "").lower() if found else ""
