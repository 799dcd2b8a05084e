# SPDX-License-Identifier: Apache-2.0
"""A prompt that one engine computes and another answers, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address

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
    `wire`: by what pages go: nixl, tcp, or auto: NIXL where it is installed. `peers`: from where a
    decode engine may fetch besides KV_PORT of this machine's own address, as host:port, or as host
    for every port of it; an IPv6 address with a port stands in brackets. `seconds`: how long a
    prompt is waited for before it is computed after all, and how long a computed one is held.
    `key_file`: holds the key that engines must share; None: whoever comes is served.
    """

    host: str = "127.0.0.1"
    port: int = KV_PORT
    wire: str = "auto"
    peers: tuple[str, ...] = ()
    seconds: float = 30.0
    key_file: str | None = None

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("kv_host: must be an address to listen at, and is empty")
        if isinstance(self.port, bool) or not 0 <= self.port <= 65535:
            raise ConfigError(f"kv_port: must be between 0 and 65535, got {self.port!r}")
        if self.wire not in WIRES:
            raise ConfigError(f"kv_wire: must be one of {', '.join(WIRES)}; got {self.wire!r}")
        if type(self.peers) is not tuple:
            raise ConfigError(f"kv_peers: must be a tuple of hosts, got {self.peers!r}")
        for peer in self.peers:
            _read_peer(str(peer))
        if self.key_file is not None and not str(self.key_file):
            raise ConfigError(f"kv_key_file: must be the path of a file, got {self.key_file!r}")
        if isinstance(self.seconds, bool) or not 0.1 <= self.seconds <= 3600:
            raise ConfigError(f"kv_seconds: must be between 0.1 and 3600, got {self.seconds!r}")

    def may_fetch_from(self, host: str, port: int) -> bool:
        """Whether requests may send this engine there."""
        allowed = ((LOOPBACK[0], KV_PORT), *map(_read_peer, self.peers))
        return any(_alike(host) == _alike(one) and of in (None, port) for one, of in allowed)

    def why_not_from(self, host: str, port: int) -> str | None:
        """Why requests may not send this engine there, and the cure; None if they may."""
        if self.may_fetch_from(host, port):
            return None
        return f"{host!r}, port {port}, is no peer of this engine; allow it with --kv-peer"


def _alike(host: str) -> str:
    """One name for all names of this machine's own address."""
    return LOOPBACK[0] if host.lower() in LOOPBACK else host.lower()


def _read_peer(peer: str) -> tuple[str, int | None]:
    """Host and port, or None for all of its ports. Raises ConfigError."""
    wrong = ConfigError(
        f"kv_peers: must be hosts or host:port, an IPv6 address with a port in brackets; got "
        f"{peer!r}"
    )
    host, mark, port = peer.rpartition(":")
    if not mark or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        host, port = peer, ""  # no port, or an IPv6 address by itself
    elif not (port.isascii() and port.isdigit() and 0 < int(port) <= 65535):
        raise wrong
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or any(letter in "[]/" or letter.isspace() for letter in host):
        raise wrong
    if ":" in host:
        try:
            IPv6Address(host)
        except ValueError as error:
            raise wrong from error
    return host, int(port) if port else None


def check_role(role: str | None, wire: WireSettings, prefix_cache: bool, ranks: int) -> None:
    """Raise ConfigError for a role that there is not, or that an engine of such options cannot
    have, and for a wire without a role."""
    if role is None:
        if wire != WireSettings():
            raise ConfigError(
                "kv_host, kv_port, kv_wire, kv_peers, kv_seconds, kv_key_file: are for engines "
                "with a role; give role as well"
            )
        return
    if role not in ROLES:
        raise ConfigError(f"role: must be one of {', '.join(ROLES)}; got {role!r}")
    if not prefix_cache:
        raise ConfigError("role: pages that are handed over are prefixes; turn prefix_cache on")
    if role == "prefill" and wire.port + ranks > 1 << 16:
        raise ConfigError(
            f"kv_port: {wire.port} and one more for each other rank, {ranks - 1} of them, end "
            "beyond 65535; give a lower one"
        )
