# SPDX-License-Identifier: Apache-2.0
"""Help and complaints about arguments come before PyTorch, which takes seconds to import."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freewheel.cli import driver, later
from freewheel.config import EngineConfig
from freewheel.errors import ConfigError
from tests.waiting import PATIENCE

HELP = [[], *([verb] for verb in ("generate", "chat", "serve", "inspect", "convert", "audit"))]
HELP += [["plan"], ["replay"], ["simulate"], ["bench", "serve"], ["bench", "kernels"]]
HELP += [["bench"], *(["bench", verb] for verb in ("offline", "decode", "picture"))]
WRONG = [
    ["generate", "demo", "--prompt", "a", "--speculate", "9"],
    ["generate", "demo", "--prompt", "a", "--top-p", "3"],
    ["generate", "demo", "--prompt", "a", "--nonsense"],
    ["generate", "no-such-model", "--prompt", "a"],
    ["chat", "demo", "--run-ahead", "7"],
    ["inspect", "demo", "--device", "gpu"],
    ["inspect", "no-such-model"],
    ["audit", "demo", "--rounds", "0"],
    ["audit", "demo", "--chunk", "1"],
    ["bench", "demo", "--batch", "x"],
    ["bench", "demo", "--speculate", "8"],
    ["bench", "demo", "--requests", "0"],
    ["bench", "decode", "--accept", "9"],
    ["bench", "decode", "--model", "no-such-model"],
    ["bench", "picture", "round.jpg"],
    ["convert", "demo", "somewhere", "--to", "fp9"],
    ["convert", "demo", ".", "--to", "fp8"],
    ["serve", "demo", "--max-batch", "0"],
    *([verb, "demo", "--device", "cpu", "--deterministic"] for verb in ("generate", "serve")),
    ["bench", "decode", "--model", "demo", "--device", "cpu", "--deterministic"],
    *([verb, "demo", "--disk-cache-gb", "1"] for verb in ("generate", "serve")),
]

SCRIPT = """
import io, json, sys
from freewheel.cli import main
codes, out, sys.stdout = [], sys.stdout, io.StringIO()
for line in json.loads(sys.argv[1]):
    sys.argv = ["freewheel", *line]
    try:
        main()
    except SystemExit as ended:
        codes.append([ended.code or 0, "torch" in sys.modules])
print(json.dumps(codes), file=out)
"""


def endings(lines: list[list[str]], folder: Path) -> list[list[object]]:
    """Of each command line, its exit code and whether PyTorch has been imported by then."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(lines)],
        env=os.environ | {"PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        check=True,
    )
    return json.loads(ran.stdout)


def test_help_is_given_without_pytorch(tmp_path: Path) -> None:
    lines = [["--version"], *([*line, "--help"] for line in HELP)]
    assert endings(lines, tmp_path) == [[0, False]] * len(lines)


def test_arguments_are_refused_without_pytorch(tmp_path: Path) -> None:
    found = endings(WRONG, tmp_path)
    assert [line for line, end in zip(WRONG, found, strict=True) if end != [2, False]] == []


def test_a_name_is_looked_up_in_its_module_at_its_first_use() -> None:
    module = later.Later("freewheel.errors")
    assert issubclass(module.ConfigError, module.FreewheelError)
    with pytest.raises(KeyError):
        _ = module.NoSuchName


def test_an_import_leaves_signals_and_the_collector_as_they_were() -> None:
    before = signal.getsignal(signal.SIGINT)
    with later.importing():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_an_import_would_swallow_ends_the_process(tmp_path: Path) -> None:
    """A library that turns whatever goes wrong in its import into another error."""
    slow = (
        "import time\ntry:\n    time.sleep(9999)\nexcept BaseException:\n    raise ImportError('x')"
    )
    (tmp_path / "torch.py").write_text(f"print('begun', flush=True)\n{slow}\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    process = subprocess.Popen(
        [sys.executable, "-m", "freewheel", "inspect", "demo"],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_an_interrupt_while_a_model_loads_gives_the_terminal_its_cursor_back(
    tmp_path: Path,
) -> None:
    slow = "import os, time\nos.write(1, b'begun')\ntime.sleep(9999)\n"
    (tmp_path / "torch.py").write_text(slow, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    pid, screen = pty.fork()
    if not pid:
        command = [sys.executable, "-m", "freewheel", "generate", "demo", "--prompt", "Emma"]
        os.execve(command[0], command, os.environ | {"PYTHONPATH": path, "TERM": "xterm"})
    shown = b""
    try:
        while b"begun" not in shown:
            shown += os.read(screen, 4096)
        assert b"\x1b[?25l" in shown
        os.write(screen, b"\x03")
        while more := os.read(screen, 4096):
            shown += more
    except OSError:  # what Linux says of a terminal that nobody uses any more
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert shown.endswith(b"\x1b[?25h\r\n")


START = """
import sys
from freewheel import LLM
llm = LLM("demo", max_batch=1, prefill_batch=1, threads=1)
before = set(sys.modules)
llm.capture(prompt="Emma was")
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def test_making_graphs_imports_nothing(tmp_path: Path) -> None:
    """PyTorch's Python versions of operators would: its compiler's half, and sympy."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)
    ran = subprocess.run(
        [sys.executable, "-c", START],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert ran.stdout.split() == []


def test_a_machine_without_a_driver_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libno-such-driver.so.1")
    driver._open()
    assert not driver.finds_device()
    with pytest.raises(ConfigError, match=r"^deterministic: is for CUDA devices"):
        driver.check_early(EngineConfig(model="demo", deterministic=True))
