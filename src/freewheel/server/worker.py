# SPDX-License-Identifier: Apache-2.0
"""The engine process: takes orders, runs rounds, reports.

Started as `python -m freewheel.server.worker ADDRESS`, with the EngineConfig as one line of JSON
on standard input. The other end of that pipe is the HTTP process: when it closes, this one ends.
An exception in a round ends the process too. That loses the requests under way, which are told so,
and leaves nothing half done: the HTTP process starts another.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict

import msgspec
import zmq

from freewheel import LLM
from freewheel.config import EngineConfig
from freewheel.engine import TokenEngine, TokenStep, kill_ranks
from freewheel.errors import (
    CheckpointError,
    ConfigError,
    FreewheelError,
    RankError,
    RequestError,
)
from freewheel.server import wire as m
from freewheel.server.logs import set_up_logs
from freewheel.spec import Form
from freewheel.spec.shape import ECHOES
from freewheel.structured import can_follow

log = logging.getLogger("freewheel.server")

LOST = 1
"""Exit code of an engine that has lost one of its processes."""
HEARTBEAT_SECONDS = 1.0
COMPILING_SECONDS = 0.01
"""How often an engine with nothing else to do looks whether a grammar is there."""


class Worker:
    """One engine and its line to the HTTP process."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._last_report = 0.0
        self._turn = 0
        self._begun: dict[str, int] = {}
        self._aborted: dict[str, int] = {}
        self._compilers = ThreadPoolExecutor(1, "grammars")
        self._compiling: dict[str, tuple[m.Submit, Future[Form | None]]] = {}

    def start(self, config: EngineConfig) -> TokenEngine:
        """Load the model and make every graph, so that no request waits for one."""
        begun = time.perf_counter()
        options = asdict(config)
        llm = LLM(options.pop("model"), progress=self._loading, **options)
        engine, resolved = TokenEngine(llm), llm.built.resolved
        # A CUDA graph takes a second, and everybody would wait for it; a tape a tenth of that.
        if resolved.graph == "cuda":
            llm.capture(extras=ECHOES, guided=can_follow())
        else:
            llm.capture()
        ready = m.Ready(
            context_len=llm.context_len,
            depth=config.depth,
            device=resolved.device,
            graph=resolved.graph,
            dtype=resolved.dtype,
            drafter=resolved.drafter,
            seconds=time.perf_counter() - begun,
            load=engine.load(),
            kv_port=engine.kv_port,
        )
        self._send(ready)
        return engine

    def run(self, engine: TokenEngine) -> None:
        """For ever: orders first, then a round. Raises what ends the engine."""
        while True:
            if not engine.busy:
                engine.check_ranks()
            for order in self._orders(0 if engine.busy else self._idle_seconds()):
                self._obey(engine, order)
            self._submit_compiled(engine)
            steps = self._step(engine)
            late = time.perf_counter() - self._last_report >= HEARTBEAT_SECONDS
            if steps or late or not engine.busy:
                self._report(engine, steps)

    def _step(self, engine: TokenEngine) -> list[TokenStep]:
        if not engine.busy:
            return []
        self._turn += 1
        return engine.step()

    def _report(self, engine: TokenEngine, steps: list[TokenStep]) -> None:
        told = [_told(step) for step in steps]
        obeyed = (self._turn, self._begun, self._aborted)
        self._send(m.Progress(told, engine.rounds(), engine.load(), *obeyed))
        self._begun, self._aborted = {}, {}

    def fail(self, error: FreewheelError) -> None:
        """Say why there will be no engine."""
        self._send(m.Unfit(str(error), isinstance(error, ConfigError | CheckpointError)))

    def _obey(self, engine: TokenEngine, order: m.Order) -> None:
        if isinstance(order, m.Abort):
            for request_id in order.ids:
                engine.abort(request_id)
                self._aborted[request_id] = self._turn
                _, future = self._compiling.pop(request_id, (None, None))
                if future is not None:
                    future.cancel()
        elif isinstance(order, m.Flush):
            engine.flush_prefixes()
        elif order.params.structure is None:
            self._submit(engine, order, lambda: None)
        else:
            # It may take seconds: in a thread of its own, while rounds go on.
            future = self._compilers.submit(engine.form_of, order.params)
            self._compiling[order.id] = order, future

    def _submit_compiled(self, engine: TokenEngine) -> None:
        """Queue those whose grammar is there; one that was refused is refused."""
        ready = [order for order, future in self._compiling.values() if future.done()]
        for order in ready:
            _, future = self._compiling.pop(order.id)
            self._submit(engine, order, future.result)

    def _submit(
        self, engine: TokenEngine, order: m.Submit, form: Callable[[], Form | None]
    ) -> None:
        try:
            engine.submit(
                order.id,
                order.prompt,
                order.params,
                order.cache_salt,
                form(),
                order.priority,
                order.tenant,
                order.shows,
                handoff=order.handoff,
            )
        except RequestError as error:
            self._send(m.Refused(order.id, error.field, str(error)))
        else:
            self._begun[order.id] = self._turn

    def _idle_seconds(self) -> float:
        """How long to wait for an order when no round is due."""
        return COMPILING_SECONDS if self._compiling else HEARTBEAT_SECONDS

    def _orders(self, wait_seconds: float) -> list[m.Order]:
        """All that are here; if none is, the first to come within so many seconds."""
        orders: list[m.Order] = []
        wait = round(wait_seconds * 1000)
        while self._socket.poll(wait):
            orders.append(m.decode_order(self._socket.recv()))
            wait = 0
        return orders

    def _loading(self, done: int, total: int) -> None:
        if time.perf_counter() - self._last_report >= 0.2 or done == total:
            self._send(m.Loading(done, total))

    def _send(self, report: m.Report) -> None:
        self._last_report = time.perf_counter()
        self._socket.send(m.encode(report))


def _told(step: TokenStep) -> m.Step:
    return m.Step(
        step.id,
        list(step.tokens),
        step.drafted,
        step.accepted,
        step.finish,
        step.queued_seconds,
        step.cached_tokens,
        step.cached_host_tokens,
        step.cached_disk_tokens,
        step.logprobs,
        step.prompt_logprobs,
        step.picks,
        step.fault,
    )


def open_socket(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """The worker's end. Queues are unbounded here: what waits in them is bounded by admission."""
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)
    return socket


def end_with_parent() -> None:
    """End this process, and the ranks that it leads, as soon as standard input closes."""

    def watch() -> None:
        # A buffered read would hold a lock that Python wants when this process ends by itself.
        while os.read(sys.stdin.fileno(), 1 << 12):
            pass
        kill_ranks()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """The process, whole. Returns an exit code if it could not start.

    Its arguments: where it is spoken to, and `--json-logs` if its log lines are to be JSON.
    """
    set_up_logs("--json-logs" in sys.argv[2:])
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    end_with_parent()
    context = zmq.Context[zmq.Socket[bytes]]()
    worker = Worker(open_socket(context, sys.argv[1]))
    try:
        engine = worker.start(config)
    except FreewheelError as error:
        worker.fail(error)
        context.destroy(linger=1000)
        return m.UNFIT
    try:
        worker.run(engine)
    except RankError as error:  # says all that is known here; whatever else ends it shows where
        log.error("%s", error)
        return LOST
    return 0


if __name__ == "__main__":
    sys.exit(main())
