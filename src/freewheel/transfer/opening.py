# SPDX-License-Identifier: Apache-2.0
"""Which wire an engine uses."""

from __future__ import annotations

from importlib import import_module

from freewheel.errors import ConfigError
from freewheel.transfer.libraries import installed
from freewheel.transfer.tcp_wire import TcpWire
from freewheel.transfer.wire import Memory, Wire


def open_wire(wanted: str, memory: Memory) -> Wire:
    """`wanted`: nixl, tcp, or auto for NIXL where it is installed. Raises ConfigError."""
    found = installed() is not None
    if wanted == "nixl" and not found:
        raise ConfigError(
            'kv_wire: "nixl", but the library is not installed: '
            'pip install --no-deps "nixl-cu12>=1.5.1" (or nixl-cu13), or use kv_wire="tcp"'
        )
    if wanted == "tcp" or not found:
        return TcpWire(memory)
    return vars(import_module("freewheel.transfer.nixl_wire"))["NixlWire"](memory)
