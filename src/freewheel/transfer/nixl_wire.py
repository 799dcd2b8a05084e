# SPDX-License-Identifier: Apache-2.0
"""Slots by NIXL (UCX): over RDMA, NVLink or shared memory, whatever both ends have.

The reader reads, and NIXL tells the other end when it has. The line stays open meanwhile, so that
each notices when the other is gone.
"""

from __future__ import annotations

import base64
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from freewheel.transfer.libraries import installed
from freewheel.transfer.line import Line, WireError
from freewheel.transfer.wire import Memory, Pair

if installed() == "nixl_cu13":
    from nixl_cu13 import _api as nixl  # pyright: ignore[reportMissingImports]  (an extra)
else:
    from nixl_cu12 import _api as nixl  # pyright: ignore[reportMissingImports]

DRAM = "DRAM"
LOOK = 0.0005
"""Seconds between two looks whether something has arrived: a transfer of a few MB takes as long."""

NOTE_SECONDS = 2.0
"""For the note of a reader that has gone: it had what it wanted, or nothing comes of it."""

_nixl = cast(Any, nixl)  # its types are strings that name nothing
FAILURES = tuple(
    one
    for one in vars(_nixl.nixlBind).values()
    if isinstance(one, type) and issubclass(one, Exception)
)


class NixlWire:
    """An agent whose registered memory is that of all slots."""

    name = "nixl"

    def __init__(self, memory: Memory) -> None:
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._memory = memory
        self._lock = threading.Lock()
        # Its own thread would never sleep: whoever waits here looks, which is progress enough.
        quiet = _nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = _nixl.nixl_agent(f"freewheel-{secrets.token_hex(8)}", quiet)
        stretches = [(address, size, 0, "") for address, size in memory.stretches()]
        self._registered = self._agent.register_memory(stretches, DRAM)
        self._card = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self._known: dict[str, str] = {}
        self._notes: set[str] = set()

    def card(self) -> dict[str, str]:
        return {"agent": self._card}

    def read(self, line: Line, card: dict[str, str], pairs: Sequence[Pair], note: str) -> None:
        agent = card.get("agent", "")
        try:
            with self._lock:
                other = self._meet(agent)
                if not pairs:
                    self._agent.send_notif(other, note.encode())
                    return
                handle = self._prepare(other, pairs, note)
            self._run(line, handle)
        except (*FAILURES, ValueError) as error:
            self._part(agent)
            raise WireError(f"nixl: {error}") from error

    def _prepare(self, other: str, pairs: Sequence[Pair], note: str) -> Any:
        size = self._memory.slot_bytes
        own = [(self._memory.address(pair.own), size, 0) for pair in pairs]
        theirs = [(pair.address, size, 0) for pair in pairs]
        descriptions = (self._agent.get_xfer_descs(each, DRAM) for each in (own, theirs))
        return self._agent.initialize_xfer("READ", *descriptions, other, note.encode())

    def _run(self, line: Line, handle: Any) -> None:
        try:
            with self._lock:
                state = self._agent.transfer(handle)
            while state == "PROC":
                if line.gone(LOOK):
                    raise WireError("the other engine went away")
                self._check_time(line)
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
        finally:
            with self._lock, suppress(*FAILURES):
                self._agent.release_xfer_handle(handle)  # ends what is still under way
        if state != "DONE":
            raise WireError(f"nixl: the transfer ended as {state}")

    def serve(self, line: Line, slots: Sequence[int], note: str) -> None:
        del slots
        while not self._noted(note):
            if line.gone(LOOK):
                self._await(note)
                return
            self._check_time(line)

    def _await(self, note: str) -> None:
        """Of a reader whose line has ended. Its note goes another way, and may come behind that."""
        late = time.monotonic() + NOTE_SECONDS
        while not self._noted(note):
            if time.monotonic() > late:
                raise WireError("the reader went away")
            time.sleep(LOOK)

    def close(self) -> None:
        with self._lock, suppress(*FAILURES):
            self._agent.deregister_memory(self._registered)

    def _noted(self, note: str) -> bool:
        with self._lock:
            for notes in self._agent.get_new_notifs().values():
                self._notes.update(one.decode("ascii", "replace") for one in notes)
            found = note in self._notes
            self._notes.discard(note)
        return found

    def _meet(self, card: str) -> str:
        """The other agent's name."""
        if card not in self._known:
            name = self._agent.add_remote_agent(base64.b64decode(card, validate=True))
            self._known[card] = name.decode() if isinstance(name, bytes) else name
        return self._known[card]

    def _part(self, card: str) -> None:
        """Forget an agent that failed: it may be gone, and then nothing else would say so."""
        with self._lock:
            name = self._known.pop(card, None)
            if name is not None:
                with suppress(*FAILURES):
                    self._agent.remove_remote_agent(name)

    @staticmethod
    def _check_time(line: Line) -> None:
        if time.monotonic() > line.until:
            raise WireError("nixl: not done within the time that a request waits for its pages")
