# SPDX-License-Identifier: Apache-2.0
"""Run the kernels' tests under compute-sanitizer: not part of the suite, it takes minutes.

    python tests/gpu/sanitize.py [--tools memcheck,racecheck] [--files A,B] [--tests EXPR]
        [--logs DIR]

memcheck finds accesses outside of what was allocated, racecheck two threads of a block that use
shared memory without a barrier between them. Sizes are small: a fault shows there as well. Prints
one line a tool, and exits 1 if one of them found a fault or a test failed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = "tests/ops/test_cuda_kernels.py"
FAULT = 99
"""Exit code of the sanitizer if it found one."""


def command(tool: str, files: list[str], tests: str) -> list[str]:
    """One tool over the tests of `files` that the expression picks."""
    return [
        *("compute-sanitizer", "--tool", tool, "--error-exitcode", str(FAULT)),
        *("--print-limit", "50", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *(*files, "-k", tests),
    ]


def verdict(tool: str, text: str, code: int) -> str:
    """What the tool's last line says, and what the tests say."""
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", text)
    tests = re.findall(r"^\d+ (?:passed|failed).*", text, re.MULTILINE)
    return f"{tool}: {'; '.join([*summary[-1:], *tests[-1:]]) or 'no summary'}; exit {code}"


def main() -> int:
    parser = argparse.ArgumentParser(description="The kernels' tests under compute-sanitizer.")
    parser.add_argument("--tools", default="memcheck,racecheck")
    parser.add_argument("--files", default=KERNELS)
    parser.add_argument("--tests", default="agrees_with_its_specification and (1- or 2-)")
    parser.add_argument("--logs", type=Path, default=None)
    options = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
        return 2
    worst = 0
    for tool in options.tools.split(","):
        ran = subprocess.run(
            command(tool, options.files.split(","), options.tests),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        text = ran.stdout + ran.stderr
        print(verdict(tool, text, ran.returncode), flush=True)
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / f"{tool}.txt").write_text(text, encoding="utf-8")
        worst = max(worst, int(ran.returncode != 0))
    return worst


if __name__ == "__main__":
    sys.exit(main())
