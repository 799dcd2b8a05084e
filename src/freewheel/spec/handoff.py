# SPDX-License-Identifier: Apache-2.0
"""A prompt that one engine computes and another answers, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.errors import ConfigError

ROLES = ("prefill", "decode")
"""What an engine does with a request that names a room: compute its prompt for another engine, or
fetch what another has computed."""


KV_PORT = 8998
"""Where routers that know no other ask for computed prompts."""

WIRES = ("auto", "nixl", "tcp")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
    """How engines reach one another. Raises ConfigError.

    `host` and `port`: where a prefill engine is asked for prompts (port 0 takes a free one).
    `wire`: by what pages go: nixl, tcp, or auto: NIXL where it is installed. `peers`: hosts besides
    this machine's own address from which a decode engine may fetch. `seconds`: how long a prompt is
    waited for before it is computed after all, and how long a computed one is held.
    """

    host: str = "127.0.0.1"
    port: int = KV_PORT
    wire: str = "auto"
    peers: tuple[str, ...] = ()
    seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("kv_host: must be an address to listen at, and is empty")
        if isinstance(self.port, bool) or not 0 <= self.port <= 65535:
            raise ConfigError(f"kv_port: must be between 0 and 65535, got {self.port!r}")
        if self.wire not in WIRES:
            raise ConfigError(f"kv_wire: must be one of {', '.join(WIRES)}; got {self.wire!r}")
        if type(self.peers) is not tuple:
            raise ConfigError(f"kv_peers: must be a tuple of hosts, got {self.peers!r}")
        if isinstance(self.seconds, bool) or not 0.1 <= self.seconds <= 3600:
            raise ConfigError(f"kv_seconds: must be between 0.1 and 3600, got {self.seconds!r}")

    def may_fetch_from(self, host: str) -> bool:
        """Whether requests may send this engine there."""
        return host in (*LOOPBACK, *self.peers)


def check_role(role: str | None, wire: WireSettings, prefix_cache: bool, ranks: int) -> None:
    """Raise ConfigError for a role that there is not, or that an engine of such options cannot
    have, and for a wire without a role."""
    if role is None:
        if wire != WireSettings():
            raise ConfigError(
                "kv_host, kv_port, kv_wire, kv_peers, kv_seconds: are for engines with a role; "
                "give role as well"
            )
        return
    if role not in ROLES:
        raise ConfigError(f"role: must be one of {', '.join(ROLES)}; got {role!r}")
    if not prefix_cache:
        raise ConfigError("role: pages that are handed over are prefixes; turn prefix_cache on")
    if ranks > 1:
        raise ConfigError("role: works on one device yet; use tp=1, dp=1")
