# SPDX-License-Identifier: Apache-2.0
"""What the scheduler costs the host: microseconds a round, and requests a second without a device.

    OMP_NUM_THREADS=1 PYTHONPATH=src:. python benchmarks/bench_host.py [--repeats N] [--json]

"round": `plan` and `collect` of the engine's scheduler with all rows decoding, three drafts, two
rounds ahead, prompts long done. "replay": conversations and long prompts through the simulator,
which runs the same scheduler; once as `freewheel simulate` does, once with every round planned.

Seconds are the process's own (`time.process_time`): they do not count what others took from the
machine, but a processor that is shared works more slowly all the same. Each line is the best of N.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from freewheel.config import EngineConfig
from freewheel.host import Request, Scheduler
from freewheel.simulate import (
    UNLIMITED,
    Call,
    Made,
    Replay,
    RoundCost,
    Simulation,
    Trace,
    make,
    simulation,
)
from freewheel.simulate.device import StubDevice
from freewheel.simulate.script import Script
from freewheel.spec import SamplingParams, StepResult

CONFIGS = Path(__file__).parent / "configs"
MODELS = {"V3.2": "v32_tp8shard.json", "V4": "v4flash_tp8shard.json"}
ACCEPT = (0.8, 0.6, 0.45)
ROUNDS, WARM = 400, 20


def planned(trace: Trace, model: str, rows: int, pages: int) -> Simulation:
    config = EngineConfig(
        model=str(CONFIGS / MODELS[model]),
        load_format="dummy",
        speculate=len(ACCEPT),
        max_batch=rows,
        prefill_batch=min(rows, 4),
        chunk=4096,
        cache_bytes=1 << 40,
    )
    return simulation(config, trace, ACCEPT, RoundCost(), pages)


def round_of(model: str, rows: int) -> dict[str, Any]:
    """Microseconds of a round of `rows` rows."""
    calls = [Call(0.0, 100 + n, 3000, ()) for n in range(rows)]
    plan = planned(Trace(tuple(calls)), model, rows, UNLIMITED)
    scheduler = plan.scheduler()
    device = StubDevice(calls, Script(512), ACCEPT, RoundCost(), plan.context_len)
    for number, call in enumerate(calls):
        prompt = tuple(range(call.prompt))
        params = SamplingParams(max_tokens=call.answer)
        scheduler.add(
            Request(f"{number}", prompt, params, number, plan.context_len, cache_salt=f"{number}")
        )
    took = list(seconds(scheduler, device, rows))[WARM:]
    plans, letters = (1e6 * sum(times) / len(took) for times in zip(*took, strict=True))
    found = {"round": model, "rows": rows, "us": plans + letters}
    return found | {"plan_us": plans, "collect_us": letters}


def seconds(scheduler: Scheduler, device: StubDevice, rows: int) -> Iterator[tuple[float, float]]:
    """Of ROUNDS rounds in which all rows decode: for the plan, and for a letter."""
    flights, now = deque[StepResult](), time.process_time
    found = 0
    while found < ROUNDS:
        begun = now()
        plan = scheduler.plan()
        planned_at = now()
        if plan is not None:
            flights.append(device.execute(plan)[0])
        collecting = now()
        if len(flights) > scheduler.run_ahead:
            scheduler.collect(flights.popleft(), 1.0)
        ended = now()
        if plan is not None and not plan.shape.for_prompts and len(plan.rows) == rows:
            found += 1
            yield planned_at - begun, ended - collecting


def long_prompts(count: int) -> Trace:
    """Lengths about as in Mooncake's conversations; most begin like an earlier one."""
    rng, now = random.Random(0), 0.0
    calls, known = list[Call](), list[tuple[int, ...]]([()])
    for _ in range(count):
        now += rng.expovariate(4)
        prompt = min(60_000, max(10, int(rng.lognormvariate(8.1, 1.0))))
        blocks = -(-prompt // 512)
        shared = rng.choice(known)[: blocks - 1] if rng.random() < 0.6 else ()
        own = tuple(rng.randrange(10**9) for _ in range(blocks - len(shared)))
        known.append((*shared, *own))
        calls.append(Call(now, prompt, max(1, int(rng.expovariate(1 / 250))), known[-1]))
    return Trace(tuple(calls))


TRACES: dict[str, tuple[str, Trace, int, int]] = {
    "40 conversations": ("V3.2", make(Made(conversations=40, seconds=80, seed=1)), 8, 20_000),
    "300 conversations": ("V3.2", make(Made(conversations=300, seconds=600, seed=1)), 64, 2000),
    "300 long prompts": ("V3.2", long_prompts(300), 64, 8000),
    "150 long prompts": ("V4", long_prompts(150), 64, 4000),
}


def replay_of(name: str, every_round: bool) -> dict[str, Any]:
    model, trace, rows, pages = TRACES[name]
    plan, begun = planned(trace, model, rows, pages), time.process_time()
    outcome = Replay(plan, trace, every_round).run()
    took, rounds = time.process_time() - begun, outcome.prompt_rounds + outcome.decode_rounds
    return {
        "replay": f"{name}, {model}" + (", every round planned" if every_round else ""),
        "requests_per_second": len(outcome.whole) / took,
        "us": 1e6 * took / rounds,
        "rounds": rounds,
    }


def runs(repeats: int) -> Iterator[dict[str, Any]]:
    for model in MODELS:
        for rows in (1, 8, 32, 128):
            yield min((round_of(model, rows) for _ in range(repeats)), key=lambda one: one["us"])
    for name in TRACES:
        for every in (True, False):
            found = (replay_of(name, every) for _ in range(repeats))
            yield min(found, key=lambda one: one["us"])


def line_of(run: dict[str, Any]) -> str:
    if "round" in run:
        parts = f"{run['plan_us']:.1f} to plan, {run['collect_us']:.1f} to collect"
        return f"{run['round']}, {run['rows']} rows: {run['us']:.1f} us a round, {parts}"
    rate = f"{run['requests_per_second']:.0f} requests a second"
    return f"{run['replay']}: {rate}, {run['us']:.1f} us for each of {run['rounds']} rounds"


def main() -> None:
    parser = argparse.ArgumentParser(description="What the scheduler costs the host.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    for run in runs(given.repeats):
        print(json.dumps(run) if given.json else line_of(run), flush=True)


if __name__ == "__main__":
    main()
