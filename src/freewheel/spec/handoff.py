# SPDX-License-Identifier: Apache-2.0
"""A prompt that one engine computes and another answers, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.errors import ConfigError

ROLES = ("prefill", "decode")
"""What an engine does with a request that names a room: compute its prompt for another engine, or
fetch what another has computed."""


@dataclass(frozen=True)
class Handoff:
    """`room`: the name under which a prompt's pages change hands; whoever knows it may have them.

    `source`: host and port of the engine that computes the prompt; None on that engine itself.
    """

    room: str
    source: tuple[str, int] | None = None


@dataclass(frozen=True)
class Piece:
    """One block of a prompt in a slot of the host memory of the engine that computed it.

    `tokens`: a digest of all tokens that its pages follow from. `label`: what its checksum counts
    in for its key. `latest`: it has the pages too that a row needs which starts at its end.
    `address`: of the slot, for whoever reads it from outside.
    """

    slot: int
    address: int
    label: int
    latest: bool
    tokens: str


@dataclass(frozen=True)
class WireSettings:
    """How engines reach one another: where this one listens, by what the pages go (auto, nixl or
    tcp), whom it fetches from besides this machine, and how long a request waits for its pages.

    Raises ConfigError.
    """

    host: str
    port: int
    wire: str
    peers: tuple[str, ...]
    seconds: float

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("kv_host: must be an address to listen at, and is empty")
        if isinstance(self.port, bool) or not 0 <= self.port <= 65535:
            raise ConfigError(f"kv_port: must be between 0 and 65535, got {self.port!r}")
        if self.wire not in WIRES:
            raise ConfigError(f"kv_wire: must be one of {', '.join(WIRES)}; got {self.wire!r}")
        if isinstance(self.seconds, bool) or not 0.1 <= self.seconds <= 3600:
            raise ConfigError(f"kv_seconds: must be between 0.1 and 3600, got {self.seconds!r}")

    def may_fetch_from(self, host: str) -> bool:
        """Whether requests may send this engine there."""
        return host in (*LOOPBACK, *self.peers)


WIRES = ("auto", "nixl", "tcp")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
