# SPDX-License-Identifier: Apache-2.0
"""The page shows thoughts and calls apart from text, and takes a call's result."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn

from tests.server.scripted import Script
from tests.server.test_answers import ARGUMENTS, BLOCK, NAMES, PARAMETERS
from tests.waiting import PATIENCE, wait_for


@contextmanager
def served(script: Script) -> Iterator[str]:
    """Its address, on loopback."""
    config = uvicorn.Config(script.app, port=0, log_level="error", ws="none")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(running.serve()))
    thread.start()
    try:
        wait_for("listening", lambda: running.started)
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()


@pytest.mark.slow
def test_a_browser_shows_thoughts_and_calls_and_takes_results(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here")
    script = Script()
    script.script(f"Which city?</think>I look.{BLOCK}")
    with served(script) as url, playwright.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(PATIENCE * 1000)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        page.click("#tool-setting summary")
        tools = [{"name": name, "parameters": PARAMETERS} for name in NAMES]
        page.fill("#tools", json.dumps(tools))
        page.check("#thinking")
        page.fill("#text", "Rome?")
        page.click("#send")
        page.locator(".counts").nth(0).wait_for()
        assert page.inner_text(".thought") == "Which city?"
        assert page.locator(".call summary").all_inner_texts() == list(NAMES)
        assert json.loads(page.locator(".call code").nth(0).inner_text()) == ARGUMENTS
        assert "DSML" not in page.inner_text("#turns")
        assert "get_weather" in (page.get_attribute("#text", "placeholder") or "")
        script.script("</think>Sunny.")
        for result in ("sun", "pong"):
            page.fill("#text", result)
            page.click("#send")
        page.locator(".counts").nth(1).wait_for()
        assert page.locator(".call samp").all_inner_texts() == ["sun", "pong"]
        assert page.locator(".turn.model").nth(1).inner_text().startswith("Sunny.")
        page.screenshot(path=os.environ.get("PAGE_PICTURE", str(tmp_path / "page.png")))
        chromium.close()
    assert not errors
    prompt = script.tokenizer.decode(script.link.asked[-1][0], False)
    assert "<think>Which city?</think>I look." in prompt
    assert "<result>sun</result>\n<result>pong</result>" in prompt
