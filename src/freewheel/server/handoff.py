# SPDX-License-Identifier: Apache-2.0
"""What a request says of the engine that computes its prompt, in SGLang's words or in vLLM's."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from freewheel.config import EngineConfig
from freewheel.server.failures import ApiError
from freewheel.server.schema import Choices, KvTransfer
from freewheel.server.serving import Serving
from freewheel.spec import Handoff
from freewheel.spec.handoff import KV_PORT


@dataclass(frozen=True)
class Handing:
    """The engine's part, and what the answer is to say of it."""

    handoff: Handoff | None = None
    answer: dict[str, Any] | None = None

    def told(self) -> dict[str, Any]:
        """Fields of the answer."""
        return {} if self.answer is None else {"kv_transfer_params": self.answer}


def handing_of(body: Choices, serving: Serving, prompts: int = 1) -> Handing:
    """What `body`, of so many prompts, asks of the engine besides its answer. Raises ApiError."""
    room, params = body.bootstrap_room, body.kv_transfer_params
    config, choices = serving.link.config, prompts * (body.n or 1)
    if room is None and params is None:
        if body.bootstrap_host is not None or body.bootstrap_port is not None:
            raise _wrong("bootstrap_room", "is missing; it names the prompt's pages")
        return Handing()
    param = "kv_transfer_params" if room is None else "bootstrap_room"
    if room is not None and params is not None:
        raise _wrong(param, "and kv_transfer_params say the same thing in two ways; give one")
    if config.role is None:
        raise _wrong(param, "this engine has no role: start it with --role prefill or decode")
    if choices != 1:
        raise _wrong(param, "goes with one prompt and one answer")
    if room is not None:
        port = body.bootstrap_port or KV_PORT
        source = None if body.bootstrap_host is None else (body.bootstrap_host, port)
        if config.role == "decode" and source is None:
            raise _wrong("bootstrap_host", "is missing; a decode engine must be told whom to ask")
        handing = Handing(Handoff(str(room), source))
        _check_peer(handing, config, "bootstrap_host")
        return handing
    assert params is not None
    if config.role == "decode":
        handing = _fetching(params)
        _check_peer(handing, config, "kv_transfer_params.remote_host")
        return handing
    return _offering(params, config.kv_host, serving.kv_port)


def _offering(params: KvTransfer, host: str, port: int) -> Handing:
    if not params.do_remote_decode:
        raise _wrong("kv_transfer_params", "a prefill engine is told do_remote_decode: true")
    room = params.remote_request_id or secrets.token_hex(16)
    answer = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_host": host,
        "remote_port": port,
        "remote_request_id": room,
    }
    return Handing(Handoff(room), answer)


def _fetching(params: KvTransfer) -> Handing:
    if not params.do_remote_prefill:
        raise _wrong("kv_transfer_params", "a decode engine is told do_remote_prefill: true")
    host, port, room = params.remote_host, params.remote_port, params.remote_request_id
    if host is None or port is None or room is None:
        raise _wrong(
            "kv_transfer_params",
            "lacks remote_host, remote_port or remote_request_id, which the prefill engine's "
            "answer has",
        )
    return Handing(Handoff(room, (host, port)))


def _check_peer(handing: Handing, config: EngineConfig, param: str) -> None:
    """Raise ApiError if `param` sends a decode engine where it may not fetch."""
    assert handing.handoff is not None
    source = handing.handoff.source
    if config.role != "decode" or source is None:
        return
    if (why := config.wire.why_not_from(*source)) is not None:
        raise _wrong(param, why)


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param)
