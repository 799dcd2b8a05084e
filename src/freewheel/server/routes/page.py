# SPDX-License-Identifier: Apache-2.0
"""GET /: one page, and the files that it needs. They are read once, so no path is ever opened."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from freewheel.server.failures import ApiError

router = APIRouter()

KINDS = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES = {
    file.name: file.read_bytes()
    for file in (files("freewheel.server") / "static").iterdir()
    if file.name.rpartition(".")[2] in KINDS
}


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def index() -> Response:
    """The page."""
    return _file("index.html")


@router.api_route("/page/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def page_file(name: str) -> Response:
    """A file of the page."""
    if name not in FILES or name == "index.html":
        raise ApiError(404, "there is no such file")
    return _file(name)


def _file(name: str) -> Response:
    headers = {"cache-control": "no-cache"}
    return Response(FILES[name], headers=headers, media_type=KINDS[name.rpartition(".")[2]])
