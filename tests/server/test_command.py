# SPDX-License-Identifier: Apache-2.0
"""`freewheel serve` before it serves: what it reads, and what it says when it cannot."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from freewheel.cli import main, serve
from freewheel.errors import ConfigError, FreewheelError
from freewheel.server.run import check_port


def test_a_missing_library_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FreewheelError, match=r"'no_such_library'.*\.\[server\]"):
        serve.check_libraries(frozenset({"no_such_library"}), "serve", "server")


def test_keys_come_from_the_file_and_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n  two  \n", "utf-8")
    monkeypatch.delenv("FREEWHEEL_API_KEY", raising=False)
    assert serve.read_keys(None) == ()
    assert serve.read_keys(file) == ("one", "two")
    monkeypatch.setenv("FREEWHEEL_API_KEY", "three")
    assert serve.read_keys(file) == ("three", "one", "two")


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n", b"\xff\xfe"])
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="api_key_file"):
        serve.read_keys(file)


def test_a_port_in_use_is_refused_before_anything_is_loaded() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: cannot listen on 127.0.0.1:{port}"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--port", "70000"], "port"),
        (["--max-batch", "0"], "--max-batch:"),
        (["--speculate", "9"], "speculate"),
        (["--queue-seconds", "0"], "--queue-seconds:"),
        (["--host", "0.0.0.0"], "--insecure"),
        (["no/such/folder", "--port", "0"], "no/such/folder"),
    ],
)
def test_a_bad_option_ends_it_at_once(
    options: list[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("FREEWHEEL_API_KEY", raising=False)
    monkeypatch.setattr(sys, "argv", ["freewheel", "serve", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
