# SPDX-License-Identifier: Apache-2.0
"""What the HTTP side may be told, checked once."""

from __future__ import annotations

import ipaddress
import re
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from freewheel.errors import ConfigError

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""In whose name a request is served: which of the API keys it showed. Tenants are served evenly."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Everything of the server that is not the engine's.

    `api_keys`: any of them opens what is not open to all. `queue_tokens`: prompt tokens that may
    wait for their first answer token; `max_requests`: answers under way or waiting; beyond either,
    a request is refused with 429. `queue_seconds`: how long a request may wait for its first token.
    `drain_seconds`: how long answers under way may take once the server was told to end.
    `stall_seconds`: silence of the engine after which it is taken for dead and replaced.
    `max_body_bytes` and `max_header_bytes` are checked before anything is parsed. `insecure`
    allows an address that others reach without a key. `admin_socket`: where an operator is
    listened to; nowhere without it. `otlp_endpoint`: the collector that gets a span for every
    answer; nobody does without it. `dump_dir`: where the requests of an engine that fails are
    written for `freewheel replay`; nowhere without it. Raises ConfigError.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    insecure: bool = False
    queue_tokens: int = 1 << 17
    max_requests: int = 512
    queue_seconds: float = 60.0
    drain_seconds: float = 30.0
    stall_seconds: float = 60.0
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 32 << 10
    metrics_prefix: str = "freewheel"
    json_logs: bool = False
    admin_socket: Path | None = None
    dump_dir: Path | None = None
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        _check("port", self.port, 0, 65535)
        _check("queue_tokens", self.queue_tokens, 1, 1 << 40)
        _check("max_requests", self.max_requests, 1, 1 << 20)
        _check("queue_seconds", self.queue_seconds, 0.01, 86400)
        _check("drain_seconds", self.drain_seconds, 0, 86400)
        _check("stall_seconds", self.stall_seconds, 2, 86400)
        _check("max_body_bytes", self.max_body_bytes, 1 << 10, 1 << 30)
        _check("max_header_bytes", self.max_header_bytes, 1 << 10, 1 << 20)
        if not self.metrics_prefix.isidentifier():
            raise ConfigError(f"metrics_prefix: must be a name, got {self.metrics_prefix!r}")
        if self.otlp_endpoint is not None and not re.match("https?://", self.otlp_endpoint):
            raise ConfigError(
                f"otlp_endpoint: must begin with http:// or https://, got {self.otlp_endpoint!r}"
            )
        if self.dump_dir is not None and not self.dump_dir.is_dir():
            raise ConfigError(f"dump_dir: {self.dump_dir} is no folder; make it first")
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise ConfigError("api_key: must be ASCII text, and not blank")
        if not self.local and not self.api_keys and not self.insecure:
            raise ConfigError(
                f"host: {self.host} can be reached from other machines; give an API key, or say "
                f"--insecure if whoever reaches it may use it"
            )

    @property
    def local(self) -> bool:
        """Only this machine reaches it."""
        if self.host in LOCAL_NAMES:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _check(option: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{option}: must be between {low:g} and {high:g}, got {value}")
