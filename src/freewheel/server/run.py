# SPDX-License-Identifier: Apache-2.0
"""From settings to a server that runs until it is told to end, and then finishes its answers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from importlib import import_module
from pathlib import Path
from types import FrameType

import uvicorn

from freewheel.chat import Chat, open_chat
from freewheel.config import EngineConfig, find_model
from freewheel.engine import Tokenizer, survey
from freewheel.errors import ConfigError, FreewheelError, UnsupportedModel
from freewheel.server.admin import AdminSocket, open_admin_socket
from freewheel.server.app import build_app
from freewheel.server.failures import ending
from freewheel.server.gate import Gate
from freewheel.server.link import EngineState, Link
from freewheel.server.logs import set_up_logs, start
from freewheel.server.metrics import ServerMetrics
from freewheel.server.protocol import bounded_protocol
from freewheel.server.serving import Serving
from freewheel.server.settings import ServerSettings
from freewheel.spec import ModelSpec
from freewheel.spec.handoff import KV_PORT, LOOPBACK
from freewheel.spec.picks import picked_layers

log = logging.getLogger("freewheel.server")


def serve(config: EngineConfig, settings: ServerSettings) -> None:
    """Serve until a signal. Raises CheckpointError, ConfigError or FreewheelError at the start."""
    found, tokenizer = survey(config), Tokenizer(find_model(config.model))
    check_port(settings.host, settings.port)
    if not settings.json_logs:  # else the command line has, before its own first line
        set_up_logs(as_json=False)
    path = settings.admin_socket
    listener = None if path is None else open_admin_socket(path)
    try:
        _serve(Link(config, settings), found.spec, tokenizer, listener)
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _serve(link: Link, spec: ModelSpec, tokenizer: Tokenizer, admin: AdminSocket | None) -> None:
    settings = link.settings
    metrics = ServerMetrics(settings.metrics_prefix, settings.model_name)
    metrics.watch(link)
    serving = Serving(
        tokenizer=tokenizer,
        chat=_chat(find_model(link.config.model), spec.family, tokenizer),
        vocab_size=spec.vocab_size,
        link=link,
        settings=settings,
        metrics=metrics,
        picked=picked_layers(spec),
    )
    http = uvicorn.Config(
        Gate(build_app(serving, admin), serving),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=bounded_protocol(settings.max_header_bytes),
        ws="none",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
        backlog=1024,
    )
    server = Server(http, serving)
    spans = None
    if settings.otlp_endpoint is not None:
        spans_to = vars(import_module("freewheel.server.spans"))["spans_to"]
        spans = spans_to(settings.otlp_endpoint, settings.model_name)
        serving.traced = spans.end
    try:
        server.run()
    finally:
        if spans is not None:
            spans.close()
        link.clear_away()  # who is told twice to end does not end in order
    link.raise_if_unfit()
    if not server.started:
        raise FreewheelError(f"port: cannot listen on {settings.host}:{settings.port}")


def _chat(folder: Path, family: str, tokenizer: Tokenizer) -> Chat | UnsupportedModel:
    """How the model is talked to, or why it cannot be: completions work all the same."""
    try:
        return open_chat(folder, family, tokenizer)
    except UnsupportedModel as error:
        log.warning("%s", error)
        return error


def check_port(host: str, port: int) -> None:
    """Raise ConfigError, before anything is loaded, if nobody can listen there."""

    async def listen() -> None:
        server = await asyncio.start_server(lambda *_: None, host, port)
        server.close()
        await server.wait_closed()

    try:
        asyncio.run(listen())
    except OSError as error:
        raise ConfigError(
            f"port: cannot listen on {host}:{port}: {_why(error)}; give another with --port, "
            f"or another --host"
        ) from error


def _why(error: OSError) -> str:
    """The system's own words, if there are: asyncio repeats the address before them."""
    number = error.errno or 0  # of a host's name it is the resolver's, and below zero
    return os.strerror(number) if number > 0 else str(error.strerror or error)


def role_of(link: Link) -> str | None:
    """What the engine, once it is ready, does for others or they for it; None without a role."""
    config, ready = link.config, link.ready
    if ready is None or ready.load.handoffs is None:
        return None
    wire = ready.load.handoffs.wire
    if config.role == "prefill":
        host = f"[{config.kv_host}]" if ":" in config.kv_host else config.kv_host
        place = f"{host}:{ready.kv_port}" + ranks_at(config)
        return f"role prefill: hands prompts over at {place}, wire {wire}"
    peers = ", ".join((f"{LOOPBACK[0]}:{KV_PORT}", *config.kv_peers))
    return f"role decode: fetches prompts from {peers} as requests say, wire {wire}"


def ranks_at(config: EngineConfig) -> str:
    """Where ranks other than 0 listen, as a part of a sentence; empty where there are none."""
    others = config.tp * config.dp - 1
    if not others:
        return ""
    ports = f"port {config.kv_port + 1}" + (f" to {config.kv_port + others}" if others > 1 else "")
    return f", other ranks at {ports if config.kv_port else 'free ports'}"


class Server(uvicorn.Server):
    """uvicorn's, that finishes answers before it ends, and says where it listens."""

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self._serving = serving
        self._told_to_end: float | None = None
        self._announced: int | None = None  # the engine said to be ready: how many went before it
        self._hurries = False

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for one in server.sockets:
                host, port = one.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                start.info(
                    "serving %s at http://%s:%d as soon as the engine has started",
                    self._serving.settings.model_name,
                    shown,
                    port,
                )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the end; another one ends at once, a third without order."""
        if self._told_to_end is not None:
            self.force_exit = self._hurries
            self.should_exit = self._hurries = True
            # Whoever is cut off is told so; what it breaks in is no fault to look into.
            logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
            self.config.timeout_graceful_shutdown = 1
            return
        self._told_to_end = time.monotonic()
        self._serving.draining = self._serving.ending = True
        log.info(
            "told to end by %s: no new requests; answers under way, %d now, have %g s; told again, "
            "it ends at once",
            signal.Signals(sig).name,
            len(self._serving.link.ledger.live),
            self._serving.settings.drain_seconds,
        )

    def _announce(self, first: bool) -> None:
        """An engine is ready: the server's first, or one after another."""
        link = self._serving.link
        seconds = link.ready.seconds if link.ready else 0.0
        if not first:
            log.info("the engine is ready again, after %.1f s", seconds)
            return
        if (told := role_of(link)) is not None:
            start.info("%s", told)
        start.info("ready")
        log.info("the engine is ready after %.1f s", seconds)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        link = self._serving.link
        if link.state is EngineState.READY and self._announced != link.restarts:
            self._announce(first=self._announced is None)
            self._announced = link.restarts
        if link.state is EngineState.UNFIT:
            return True
        if self._told_to_end is not None:
            waited = time.monotonic() - self._told_to_end
            late = self._hurries or waited > self._serving.settings.drain_seconds
            if late or not link.ledger.live:
                # Who is told now still has the time that uvicorn gives connections to end.
                link.give_up(list(link.ledger.live.values()), ending())
                return True
        return await super().on_tick(counter)
