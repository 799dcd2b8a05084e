# SPDX-License-Identifier: Apache-2.0
"""The application in front of an engine that says what it is told to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, cast

import httpx

from freewheel.chat import open_chat
from freewheel.config import EngineConfig, find_model
from freewheel.engine import Tokenizer
from freewheel.server import wire
from freewheel.server.app import build_app
from freewheel.server.link import EngineState, Link
from freewheel.server.metrics import ServerMetrics
from freewheel.server.serving import Serving
from freewheel.server.settings import ServerSettings
from freewheel.server.tickets import Events, Ticket
from freewheel.spec import FinishReason, Handoff, SamplingParams

CONTEXT = 100_000


class ScriptedLink(Link):
    """Every request gets `rounds` of token ids, and then `finish`."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(EngineConfig(model="demo"), settings)
        self.rounds: list[list[int]] = []
        self.finish = FinishReason.STOP
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.state = EngineState.READY
        self.ready = wire.Ready(
            context_len=CONTEXT, depth=3, device="cpu", graph="tape", dtype="float32",
            drafter="mtp", seconds=0.0, load=cast("Any", None),
        )  # fmt: skip

    def start(self) -> None:
        return

    async def stop(self) -> None:
        return

    def check_ready(self) -> None:
        return

    def open(
        self,
        prompt: list[int],
        params: SamplingParams,
        events: Events,
        cache_salt: str = "",
        priority: int = 0,
        shows: bool = False,
        handoff: Handoff | None = None,
    ) -> Ticket:
        ticket = Ticket(f"{len(self.asked)}", prompt, params, events, opened=time.perf_counter())
        self.asked.append((prompt, params))
        for tokens in self.rounds[:-1]:
            events.put_nowait((ticket, wire.Step(ticket.id, tokens)))
        last = wire.Step(ticket.id, self.rounds[-1], finish=str(self.finish))
        events.put_nowait((ticket, last))
        return ticket

    def close(self, tickets: Sequence[Ticket], finish: FinishReason = FinishReason.ABORT) -> None:
        return


class Script:
    """Requests to it. `script` tells the engine what to say next."""

    def __init__(self, model: str = "demo", family: str = "deepseek_v32") -> None:
        folder = find_model(model)
        self.tokenizer = Tokenizer(folder)
        settings = ServerSettings(model_name=model)
        self.link = ScriptedLink(settings)
        self.serving = Serving(
            tokenizer=self.tokenizer,
            chat=open_chat(folder, family, self.tokenizer),
            vocab_size=1024,
            link=self.link,
            settings=settings,
            metrics=ServerMetrics(settings.metrics_prefix, model),
        )
        self.app = build_app(self.serving)

    def script(self, text: str, finish: FinishReason = FinishReason.STOP, each: int = 1) -> None:
        """Say `text`, in which control tokens count, `each` tokens a round, and end."""
        ids = self.tokenizer.encode_prompt(text)[1:]
        ids += [1] if finish is FinishReason.STOP else []
        self.link.rounds = [ids[at : at + each] for at in range(0, len(ids), each)]
        self.link.finish = finish

    def post(self, path: str, **body: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.post(path, json=body, timeout=60)

        return asyncio.run(run())

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Of a stream, parsed."""
        found = self.post(path, **body, stream=True)
        assert found.status_code == 200, found.text
        data = [line[6:] for line in found.text.splitlines() if line.startswith("data: ")]
        return [json.loads(one) for one in data if one != "[DONE]"]
