# SPDX-License-Identifier: Apache-2.0
"""GET /debug/rounds for the page, /debug/round as a trace: what the engine did last."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from freewheel.server.respond import json_response
from freewheel.server.serving import Served

router = APIRouter()


@router.get("/debug/rounds")
async def rounds(serving: Served, after: Annotated[int, Query(ge=0, lt=1 << 53)] = 0) -> Response:
    """Rounds and waits numbered above `after`, and how things stand."""
    link = serving.link
    ready = link.ready
    about = {
        "model": serving.settings.model_name,
        "engine": link.state,
        "restarts": link.restarts,
        "device": None if ready is None else ready.device,
        "graph": None if ready is None else ready.graph,
        "drafter": None if ready is None else ready.drafter,
        "depth": None if ready is None else ready.depth,
        "context_len": None if ready is None else ready.context_len,
        "load": link.load,
    }
    return json_response(serving.recent.since(after) | about)


@router.get("/debug/round")
async def trace(serving: Served) -> Response:
    """The last rounds as a trace: open it in Perfetto."""
    ready = serving.link.ready
    found = json_response(serving.recent.trace("cpu" if ready is None else ready.device))
    found.headers["content-disposition"] = 'attachment; filename="rounds.json"'
    return found
