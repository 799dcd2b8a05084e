# SPDX-License-Identifier: Apache-2.0
"""How long `freewheel generate demo` takes from its start to its first token, cold and warm.

    python benchmarks/bench_start.py [--device cuda] [--warm 2] [--json]

Cold: the folder of compiled kernels is empty. Warm: it is what the cold run left. Each run is a
fresh process, timed from outside until the first character of the answer; the last one is taken
apart from inside. `torch bytecode` says whether Python finds PyTorch compiled, as pip leaves it; an
image that was stripped of it compiles a thousand modules in every start. With `--bytecode` the runs
keep bytecode in a folder of their own, so that a warm one finds what an ordinary machine has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

COMMAND = [
    *(sys.executable, "-m", "freewheel", "generate", "demo", "--prompt", "Emma was"),
    *("--temperature", "0", "--max-tokens", "8"),
]

PARTS = """
import json, sys, time
marks = [time.perf_counter()]
def mark(): marks.append(time.perf_counter())
import torch; mark()
from freewheel import LLM, SamplingParams; LLM; mark()
llm = LLM("demo", max_batch=1, prefill_batch=1, device=sys.argv[1]); mark()
llm.capture(prompt="Emma was"); mark()
next(llm.stream("Emma was", SamplingParams(temperature=0, max_tokens=8))); mark()
names = ["import torch", "import freewheel", "load", "capture", "first token"]
parts = {name: round(b - a, 3) for name, a, b in zip(names, marks, marks[1:])}
from pathlib import Path
bytecode = Path(torch.__cached__ or "-").exists()
print(json.dumps(parts | {"graphs": len(llm.shapes("Emma was")), "torch bytecode": bytecode}))
"""


def first_token(device: str, environment: dict[str, str]) -> float:
    """Seconds from the process's start to the first character on its standard output."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*COMMAND, "--device", device],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    said = process.stdout.read(1)
    seconds = time.perf_counter() - begin
    process.stdout.read()
    if process.wait() or not said:
        raise SystemExit(f"{' '.join(COMMAND)} failed; run it to see why")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Start to first token, cold and warm.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--bytecode", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"FREEWHEEL_KERNEL_CACHE": f"{folder}/kernels"}
        if options.bytecode:
            environment |= {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode"}
            environment |= {"PYTHONDONTWRITEBYTECODE": ""}
        found: dict[str, Any] = {
            "cold_seconds": first_token(options.device, environment),
            "warm_seconds": [first_token(options.device, environment) for _ in range(options.warm)],
        }
        ran = subprocess.run(
            [sys.executable, "-c", PARTS, options.device],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
    found["parts"] = json.loads(ran.stdout)
    if options.json:
        print(json.dumps(found))
        return
    print(f"cold   {found['cold_seconds']:6.2f} s")
    for seconds in found["warm_seconds"]:
        print(f"warm   {seconds:6.2f} s")
    for name, value in found["parts"].items():
        print(f"{name:18}{value}")


if __name__ == "__main__":
    main()
