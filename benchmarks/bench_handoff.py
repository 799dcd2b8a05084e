# SPDX-License-Identifier: Apache-2.0
"""Does a prompt computed on one card get its answer on another, and what does its way take?

    python benchmarks/bench_handoff.py [--model demo] [--dtype float32] [--wire tcp|nixl]
        [--config FILE --layers 6] [--lengths 200,330] [--devices 0,1]

Two engines of one host in processes of their own, a card each (`--device cpu`: neither): one of
role prefill, one of role decode. First the card that decodes answers all prompts as an engine
without a role. Then each prompt changes engines alone, and is timed; then all at once. A line for
each prompt: whether its tokens were those of one engine, the megabytes that changed engines, the
milliseconds from the asking until they were in the decode engine's host memory, from there to the
first token, and what the whole prompt took that engine without help.

`--config` and `--layers`: real dimensions with random weights, in place of a model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from freewheel import LLM, SamplingParams
from freewheel.config import find_model
from freewheel.engine import TokenEngine
from freewheel.spec import Handoff

PROMPT_ENGINE, ANSWER_ENGINE = "prefill", "decode"


class Child:
    """One of the two processes: a line of JSON in, a line of JSON out."""

    def __init__(self, role: str, device: str, arguments: list[str]) -> None:
        self.role = role
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": device}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--own", role, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, **message: Any) -> dict[str, Any]:
        self.tell(**message)
        return self.hear()

    def tell(self, **message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine of role {self.role} ended: {self._process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


def main() -> None:
    options = _options()
    if options.own:
        _serve(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = sys.argv[1:]
        if options.config:
            arguments += ["--model", _shortened(Path(options.config), options.layers, folder)]
        first, second = options.devices.split(",")
        prompts, answers = (
            Child(PROMPT_ENGINE, first, arguments),
            Child(ANSWER_ENGINE, second, arguments),
        )
        _compare(options, prompts, answers)
        prompts.end()
        answers.end()


def _compare(options: argparse.Namespace, prompts: Child, answers: Child) -> None:
    port, alone = prompts.hear()["port"], answers.hear()
    lengths = [int(one) for one in options.lengths.split(",")]
    for at, length in enumerate(lengths):
        room = f"alone-{at}"
        prompts.ask(room=room, at=at, length=length)
        found = answers.ask(room=room, at=at, length=length, port=port)
        found |= {"same": found.pop("tokens") == alone["tokens"][at]}
        print(json.dumps(found | {"whole_ms": alone["ms"][at]}), flush=True)
    together = {f"all-{at}": (at, length) for at, length in enumerate(lengths)}
    for room, (at, length) in together.items():
        answers.tell(room=room, at=at, length=length, port=port, later=True)
    for room, (at, length) in together.items():
        prompts.ask(room=room, at=at, length=length, later=True)
    prompts.ask(finish=True)
    found = answers.ask(finish=True)
    same = [found["tokens"][room] == alone["tokens"][at] for room, (at, _) in together.items()]
    print(json.dumps({"together": len(same), "same": sum(same)} | found["load"]), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hand prompts over from one card to another.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--devices", default="0,1", help="the cards, of prompts and of answers")
    parser.add_argument("--wire", default="tcp")
    parser.add_argument("--config", default="")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--lengths", default="60,200,257,330,511,640")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--host-cache-gb", type=float, default=0.5)
    parser.add_argument("--cache-gb", type=int, default=1)
    parser.add_argument("--graph", default="auto")
    parser.add_argument("--own", default="", help="a role: be that engine")
    return parser.parse_args()


def _shortened(config: Path, layers: int, folder: str) -> str:
    """A folder with the same configuration of fewer layers, and the demo's tokenizer."""
    words = json.loads(config.read_text())
    for name in ("compress_ratios", "indexer_types", "layer_types", "mlp_layer_types"):
        if name in words:
            words[name] = words[name][:layers]
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(words | {"num_hidden_layers": layers}))
    shutil.copy(find_model("demo") / "tokenizer.json", folder)
    return folder


def _prompt(at: int, length: int) -> list[int]:
    return [(7 * n * length + n * n + length + at) % 1000 for n in range(length)]


def _params(options: argparse.Namespace, at: int) -> SamplingParams:
    return SamplingParams(temperature=0.8 * (at % 2), seed=at, max_tokens=options.tokens)


def _open(options: argparse.Namespace, **more: Any) -> LLM:
    lengths = [int(one) for one in options.lengths.split(",")]
    llm = LLM(
        options.model,
        dtype=options.dtype,
        device=options.device,
        graph=options.graph,
        chunk=options.chunk,
        context_len=max(lengths) + options.tokens + 64,
        max_batch=4,
        prefill_batch=1,
        cache_bytes=options.cache_gb << 30,
        load_format="dummy" if options.config else "safetensors",
        **more,
    )
    llm.capture()
    return llm


def _serve(options: argparse.Namespace) -> None:
    """Be one of the engines, until nothing more is asked."""
    if options.own == ANSWER_ENGINE:
        _say(_answers_alone(options))
    role: dict[str, Any] = {
        "role": options.own,
        "kv_port": 0,
        "kv_wire": options.wire,
        "host_cache_gb": options.host_cache_gb,
    }
    if options.own == ANSWER_ENGINE:
        role |= {"kv_peers": ("127.0.0.1",)}
        del role["kv_port"]
    engine = TokenEngine(_open(options, **role))
    if options.own == PROMPT_ENGINE:
        _say({"port": engine.kv_port})
    asked: dict[str, list[int]] = {}
    for line in sys.stdin:
        _hear(options, engine, asked, json.loads(line))


def _hear(
    options: argparse.Namespace,
    engine: TokenEngine,
    asked: dict[str, list[int]],
    message: dict[str, Any],
) -> None:
    if message.get("finish"):
        while any(one[-1:] != [-1] for one in asked.values()):
            _step(engine, asked)
        _say({"tokens": {room: ids[:-1] for room, ids in asked.items()}, "load": _counts(engine)})
        return
    room, at = message["room"], message["at"]
    source = ("127.0.0.1", message["port"]) if "port" in message else None
    handoff = Handoff(room, source)
    prompt, begun = _prompt(at, message["length"]), time.perf_counter()
    before = engine.load()
    engine.submit(room, prompt, _params(options, at), handoff=handoff)
    asked[room] = []
    if message.get("later"):
        if source is None:
            _say({})
        return
    if source is None:
        offered = _handoffs(engine, "offered")
        while _handoffs(engine, "offered") == offered:
            _step(engine, asked)
        _say({})
        return
    here, first = begun, 0.0
    fetched = before.handoffs.fetched if before.handoffs is not None else 0
    while asked[room][-1:] != [-1]:
        _step(engine, asked)
        if here == begun and _handoffs(engine, "fetched") > fetched:
            here = time.perf_counter()
        if not first and asked[room]:
            first = time.perf_counter()
    blocks = _handoffs(engine, "blocks") - (before.handoffs.blocks if before.handoffs else 0)
    size = engine._llm.executor.mover.slot_bytes  # pyright: ignore[reportPrivateUsage]
    _say(
        {
            "prompt": len(prompt),
            "MB": round(blocks * size / 1e6, 2),
            "fetch_ms": round(1e3 * (here - begun), 2),
            "first_ms": round(1e3 * (first - here), 2),
            "tokens": asked.pop(room)[:-1],
        }
    )


def _step(engine: TokenEngine, asked: dict[str, list[int]]) -> None:
    """A round; what it brought. An answer that has ended ends with -1."""
    for step in engine.step():
        asked[step.id] += [*step.tokens, *([-1] if step.finish is not None else [])]


def _handoffs(engine: TokenEngine, name: str) -> int:
    load = engine.load().handoffs
    assert load is not None
    return int(vars(load)[name])


def _counts(engine: TokenEngine) -> dict[str, Any]:
    load = engine.load()
    assert load.handoffs is not None and load.tiers is not None
    own = {name: vars(load.handoffs)[name] for name in ("fetched", "failed", "blocks", "wire")}
    return own | {"damaged": load.tiers.damaged}


def _answers_alone(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens of every prompt by an engine without a role, and the time to the first of them."""
    llm = _open(options, prefix_cache=False)
    lengths = [int(one) for one in options.lengths.split(",")]
    llm.generate([_prompt(99, max(lengths))], _params(options, 0))  # warm
    tokens: list[list[int]] = []
    spent: list[float] = []
    for at, length in enumerate(lengths):
        begun, ids, first = time.perf_counter(), [], 0.0
        for chunk in llm.stream(_prompt(at, length), _params(options, at)):
            first = first or time.perf_counter()
            ids += chunk.token_ids
        tokens.append(ids)
        spent.append(round(1e3 * (first - begun), 2))
    return {"tokens": tokens, "ms": spent}


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
