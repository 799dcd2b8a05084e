# SPDX-License-Identifier: Apache-2.0
"""What a client is told when it gets no answer, in OpenAI's words and in Anthropic's."""

from __future__ import annotations

import json
from typing import Any

MESSAGE_LIMIT = 600
"""Characters of a message: part of it may be the client's own text."""

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A request ends with `status`. `param` is the field to blame, with those that it stands in and
    dots between; `code` is for programs to read."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MESSAGE_LIMIT else message[:MESSAGE_LIMIT] + "..."
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        if self.status == 429:
            return "rate_limit_error"
        if self.status == 401:
            return "authentication_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self, anthropic: bool = False) -> dict[str, Any]:
        """The JSON of the answer, or of the event that ends a stream."""
        if anthropic:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}


def error_bytes(error: ApiError, anthropic: bool = False) -> bytes:
    """The body as bytes, whatever letters the message quotes."""
    text = json.dumps(error.body(anthropic), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def too_long(prompt_tokens: int, context_len: int, param: str) -> ApiError:
    """A prompt that leaves no room for an answer."""
    return ApiError(
        400,
        f"{param}: the prompt has {prompt_tokens} tokens; a context of {context_len} holds at most "
        f"{context_len - 1} with one token of answer",
        param=param,
        code="context_length_exceeded",
    )


def engine_lost() -> ApiError:
    """The engine process ended under a request."""
    return ApiError(
        503, "the engine failed and is restarting; try again", code="engine_lost", retry_after=5
    )


def ending() -> ApiError:
    """The server was told to end, and takes nothing new."""
    return ApiError(503, "the server is ending", code="draining", retry_after=5)


def draining() -> ApiError:
    """The operator lets nothing new in for now."""
    message = "draining: no new requests are taken until /resume"
    return ApiError(503, message, code="draining", retry_after=5)


def not_ready(why: str) -> ApiError:
    """There is no engine to ask."""
    return ApiError(503, f"not ready: {why}", code="not_ready", retry_after=2)
