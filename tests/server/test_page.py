# SPDX-License-Identifier: Apache-2.0
"""The page at `/`: it stands alone, and what it shows is what the engine did."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from freewheel.server.routes.page import FILES
from tests.server.running import Running
from tests.waiting import PATIENCE

ASKED = {"prompt": "Emma was", "temperature": 0, "max_tokens": 40, "ignore_eos": True}


def test_the_page_loads_nothing_from_elsewhere_and_has_nothing_inline() -> None:
    index = FILES["index.html"].decode()
    links = re.findall(r"(?:src|href)=\"([^\"]+)\"", index)
    assert links and all(link.startswith("/") for link in links)
    assert "style=" not in index and not re.search(r"\son\w+=", index)
    assert re.findall(r"<script[^>]*>(.*?)</script>", index, re.DOTALL) == [""]
    for name, content in FILES.items():
        text = content.decode().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://|//cdn", text), name
        assert "innerHTML" not in text, "model output is text, never markup"


def test_every_file_that_the_page_names_is_served(server: Running) -> None:
    index = server.http.get("/")
    assert index.headers["content-type"].startswith("text/html")
    named = set(re.findall(r"\"(/page/[^\"]+)\"", index.text))
    named |= set(re.findall(r"from \"(/page/[^\"]+)\"", FILES["page.js"].decode()))
    assert named == {f"/page/{name}" for name in FILES if name != "index.html"}
    for path in named:
        found = server.http.get(path)
        assert found.status_code == 200
        assert found.headers["x-content-type-options"] == "nosniff"
    assert server.http.get("/page/page.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/health", "/ready"])
def test_a_head_is_answered_like_a_get_without_its_body(server: Running, path: str) -> None:
    head, got = server.http.head(path), server.http.get(path)
    assert head.status_code == got.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]
    assert head.headers["content-length"] == got.headers["content-length"]


def test_pieces_join_to_the_text_and_mark_what_was_drafted(server: Running) -> None:
    body = ASKED | {
        "stream": True,
        "return_pieces": True,
        "stream_options": {"include_usage": True},
    }
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    *chunks, last = [json.loads(line) for line in lines[:-1]]
    drafts = 0
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert "".join(text for text, _, _ in choice["pieces"]) == choice["text"]
        marks = [accepted for _, accepted, _ in choice["pieces"]]
        assert marks == sorted(marks, reverse=True), "accepted drafts come first in a round"
        drafts += sum(marks)
    details = last["usage"]["completion_tokens_details"]
    assert 0 < drafts <= details["accepted_prediction_tokens"]


def test_rounds_are_told_once_each_and_add_up(server: Running) -> None:
    server.wait_until_idle()
    before = server.http.get("/debug/rounds").json()["number"]
    usage = server.post("/v1/completions", **ASKED).json()["usage"]
    server.wait_until_idle()
    found = server.http.get("/debug/rounds", params={"after": before}).json()
    assert sum(one["tokens"] for one in found["rounds"]) >= usage["completion_tokens"]
    assert found["waits"][0]["kind"] == "first"
    assert found["load"]["running"] == 0
    again = server.http.get("/debug/rounds", params={"after": found["number"]}).json()
    assert again["rounds"] == again["waits"] == []


def test_the_trace_has_a_lane_for_host_and_device(server: Running) -> None:
    server.post("/v1/completions", **ASKED)
    events = server.http.get("/debug/round").json()["traceEvents"]
    lanes = {one["args"]["name"]: one["tid"] for one in events if one["ph"] == "M"}
    assert set(lanes) == {"host", "device (cpu)"}
    rounds = [one for one in events if one["ph"] == "X" and one["tid"] == lanes["device (cpu)"]]
    assert rounds
    ends = [one["ts"] + one["dur"] for one in rounds]
    starts = [one["ts"] for one in rounds]
    assert all(start >= end - 0.2 for start, end in zip(starts[1:], ends, strict=False))
    assert {one["name"] for one in events if one["tid"] == lanes["host"] and one["ph"] == "X"} == {
        "plan",
        "launch",
        "wait for the letter",
        "deliver",
    }


@pytest.mark.slow
def test_a_browser_shows_an_answer_with_its_drafts(server: Running, tmp_path: Path) -> None:
    """Needs playwright and a Chromium. With PAGE_PICTURE set, the picture is left there."""
    playwright = pytest.importorskip("playwright.sync_api")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1280, "height": 960})
        page.set_default_timeout(PATIENCE * 1000)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.url)
        for mode, text in (("Chat", "What is the capital of France?"), ("Continue", "Emma was")):
            page.click(f"#modes >> text={mode}")
            page.fill("#text", text)
            page.click("#send")
            page.locator(".counts").nth(0 if mode == "Chat" else 1).wait_for()
        assert "The capital of France" in page.inner_text("#turns")
        assert page.locator(".draft.d1").count() > 3
        spans = page.locator(".turn.model").nth(1).locator("[data-place]")
        chosen = spans.nth(spans.count() - 3)
        chosen.click()
        page.locator("#picks-note", has_text="layers select up to").wait_for()
        begun = server.post("/tokenize", prompt="Emma was").json()["count"]
        at = begun + int(chosen.get_attribute("data-place") or 0)
        assert page.inner_text("#picks-now") == f"position {at}"
        drawn = page.evaluate("""() => {
            const canvas = document.getElementById("picks");
            const bytes = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return bytes.data.filter((byte, at) => at % 4 === 3 && byte > 0).length;
        }""")
        assert drawn > 1000
        page.focus("#picks")
        page.keyboard.press("ArrowLeft")
        page.locator(".chosen").and_(spans.nth(spans.count() - 4)).wait_for()
        page.hover("#picks", position={"x": 200, "y": 40})
        page.locator("#picks-note", has_text="selected in").wait_for()
        page.mouse.move(5, 5)
        page.focus("#text")
        page.locator("#accepted-now", has_text=re.compile(".")).wait_for()
        page.locator("#about", has_text="demo on cpu").wait_for()
        page.screenshot(path=os.environ.get("PAGE_PICTURE", str(tmp_path / "page.png")))
        chromium.close()
    assert not errors
