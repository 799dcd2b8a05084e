# SPDX-License-Identifier: Apache-2.0
"""However a command is ended, the terminal has its cursor again; and key files are looked at."""

from __future__ import annotations

import logging
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from freewheel.cli.serve import keys_of
from freewheel.errors import ConfigError
from freewheel.transfer.keys import read_key

HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
BARS = {
    "loading": "from freewheel.cli.terminal import loading\nwith loading('a model') as told:\n",
    "counting": "from freewheel.cli.terminal import counting\nwith counting('x', 9, lambda: 3):\n",
}
WAIT = "    import sys, time\n    print('begun', flush=True)\n    time.sleep(600)\n"


@pytest.mark.parametrize("bar", BARS)
def test_sigterm_under_a_bar_leaves_a_cursor(bar: str) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", BARS[bar] + WAIT],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(slave)
    said = b""
    while b"begun" not in said:  # beside the bar
        said += os.read(master, 1 << 12)
    process.send_signal(signal.SIGTERM)
    try:
        while more := os.read(master, 1 << 12):
            said += more
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert process.wait() == -signal.SIGTERM
    assert HIDE in said and said.rindex(SHOW) > said.rindex(HIDE)


@pytest.mark.parametrize(
    ("mode", "warned"),
    [(0o600, False), (0o400, False), (0o640, True), (0o604, True), (0o622, True)],
)
def test_a_key_file_that_others_may_read_is_warned_of(
    mode: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    file.write_text("a-key-of-more-than-sixteen-letters\n")
    file.chmod(mode)
    for option, read in (("api_key_file", keys_of), ("kv_key_file", lambda p: read_key(str(p)))):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "freewheel.keys"):
            assert read(file)
        assert bool(caplog.records) == warned
        if warned:
            said = caplog.text
            assert option in said and f"chmod 600 {file}" in said and f"mode {mode:04o}" in said
            assert "sixteen" not in said


def test_of_a_key_file_that_is_refused_that_is_said_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("# none\n", "utf-8")
    file.chmod(0o644)
    for read in (keys_of, lambda path: read_key(str(path))):
        with pytest.raises(ConfigError, match="key"):
            read(file)
    assert not caplog.records
