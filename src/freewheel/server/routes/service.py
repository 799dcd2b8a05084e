# SPDX-License-Identifier: Apache-2.0
"""What operators, routers and dashboards ask: health, load, metrics, the model's name."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

import freewheel
from freewheel.server.failures import ApiError
from freewheel.server.link import EngineState
from freewheel.server.metrics import usage_share
from freewheel.server.respond import json_response
from freewheel.server.serving import Served, Serving

router = APIRouter()

SILENT_SHARE = 0.25
"""Share of the time after which a silent engine is replaced, when it no longer counts as ready."""


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> Response:
    """This process lives. Whether requests can be served is `/ready`'s business."""
    return json_response({"status": "ok"})


@router.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)
@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(serving: Served) -> Response:
    """200 if a request sent now would be served, else 503 and why not.

    `/ping` is the same under the name by which SageMaker asks whether it may send requests.
    """
    link = serving.link
    found: dict[str, Any] = {"ready": True, "engine": link.state, "restarts": link.restarts}
    silent = time.monotonic() - link.heard
    if (closed := serving.closed()) is not None:
        found |= {"ready": False, "reason": closed.message}
    elif link.state is not EngineState.READY:
        found |= {"ready": False, "reason": f"the engine is {link.state}"}
        if link.state is EngineState.STARTING and link.loading is not None:
            found["loaded"] = f"{link.loading.done} of {link.loading.total} bytes"
    elif silent > SILENT_SHARE * serving.settings.stall_seconds:
        found |= {"ready": False, "reason": f"the engine has been silent for {silent:.0f} s"}
    return json_response(found, 200 if found["ready"] else 503)


@router.get("/version")
async def version() -> Response:
    """Freewheel's version."""
    return json_response({"version": freewheel.__version__})


@router.get("/metrics")
async def metrics(serving: Served) -> Response:
    """Prometheus's text format."""
    return Response(serving.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/models")
async def models(serving: Served) -> Response:
    """The one model that is served."""
    return json_response({"object": "list", "data": [_model_object(serving)]})


@router.get("/v1/models/{name:path}")
async def model(name: str, serving: Served) -> Response:
    """The model by its name."""
    serving.check_model(name)
    return json_response(_model_object(serving))


@router.get("/v1/loads")
async def loads(serving: Served) -> Response:
    """What a router needs to choose among replicas."""
    link, load = serving.link, serving.link.load
    if load is None:
        raise ApiError(503, f"not ready: the engine is {link.state}", code="not_ready")
    waiting = sum(ticket.waits for ticket in link.ledger.live.values())
    one = {
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": max(load.waiting, waiting - load.running, 0),
        "num_total_reqs": len(link.ledger.live),
        "num_used_tokens": load.tokens,
        "num_waiting_tokens": link.ledger.waiting_tokens,
        "max_running_requests": load.rows.total,
        "token_usage": round(usage_share(load.pages), 4),
        "pages": {
            pool.name: {
                "total": pool.total,
                "free": pool.free,
                "cached": pool.cached,
                "owned": pool.owned,
                "quarantined": pool.quarantined,
            }
            for pool in load.pages
        },
    }
    return json_response({"timestamp": time.time(), "dp_rank_count": 1, "loads": [one]})


def _model_object(serving: Serving) -> dict[str, Any]:
    link = serving.link
    length = None if link.ready is None else link.ready.context_len
    return {
        "id": serving.settings.model_name,
        "object": "model",
        "created": serving.created,
        "owned_by": "freewheel",
        "root": serving.settings.model_name,
        "max_model_len": length,
    }
