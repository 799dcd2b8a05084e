# SPDX-License-Identifier: Apache-2.0
"""Accepted drafts and recall of a shipped model, on prompts it was not trained on.

    python benchmarks/bench_acceptance.py [--model demo] [--depths 1,3,5,7] [--json]

Prints, for each kind of prompt, tokens a round at temperature 0 and at 0.8, and how often each
draft position was accepted; then recall accuracy with the model's own index_topk and with dense
attention (index_topk raised to the context). Prompts: benchmarks/prompts.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from freewheel import LLM, Output, SamplingParams
from freewheel.config import find_model

PROMPTS = Path(__file__).parent / "prompts.json"


def load_prompts(most: int) -> dict[str, list[dict[str, str]]]:
    """By kind, at most `most` of each."""
    kinds: dict[str, list[dict[str, str]]] = defaultdict(list)
    for prompt in json.loads(PROMPTS.read_text(encoding="utf-8")):
        if len(kinds[prompt["kind"]]) < most:
            kinds[prompt["kind"]].append(prompt)
    return dict(kinds)


def tokens_per_round(outputs: Iterable[Output]) -> float:
    """Over all outputs together: tokens decided for each round that decided any."""
    outputs = list(outputs)
    tokens = sum(output.metrics.completion_tokens for output in outputs)
    return tokens / sum(output.metrics.rounds for output in outputs)


def measure(model: str, depth: int, temperature: float, kinds: dict[str, Any]) -> dict[str, Any]:
    """Tokens a round and accepted share, by kind, `depth` drafts."""
    llm = LLM(model, speculate=depth, context_len=4096)
    result: dict[str, Any] = {}
    for kind, prompts in kinds.items():
        params = SamplingParams(temperature=temperature, seed=7, max_tokens=64)
        outputs = llm.generate([p["prompt"] for p in prompts], params)
        drafted = sum(output.metrics.drafted for output in outputs)
        accepted = sum(output.metrics.accepted for output in outputs)
        result[kind] = {
            "prompts": len(prompts),
            "tokens": sum(output.metrics.completion_tokens for output in outputs),
            "tokens_per_round": round(tokens_per_round(outputs), 3),
            "accepted_share": round(accepted / max(drafted, 1), 3),
        }
    return result


def recall(model: str, topk: int | None, prompts: list[dict[str, str]]) -> float:
    """Share of recall prompts answered right, with `index_topk` replaced by `topk`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        shutil.copytree(find_model(model), folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if topk is not None:
            config["index_topk"] = topk
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        llm = LLM(str(folder), speculate=3, context_len=4096)
        params = SamplingParams(temperature=0, max_tokens=24)
        outputs = llm.generate([p["prompt"] for p in prompts], params)
    right = sum(
        output.text.strip().startswith(prompt["answer"].strip())
        for output, prompt in zip(outputs, prompts, strict=True)
    )
    return right / len(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--depths", default="1,3,5,7")
    parser.add_argument("--most", type=int, default=64, help="prompts of each kind")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    kinds = load_prompts(args.most)
    report: dict[str, Any] = {"speed": {}, "recall": {}}
    for depth in (int(d) for d in args.depths.split(",")):
        for temperature in (0.0, 0.8):
            report["speed"][f"{depth}@{temperature}"] = measure(
                args.model, depth, temperature, kinds
            )
    if "recall" in kinds:
        for topk in (None, 16, 32, 4096):
            name = "own" if topk is None else str(topk)
            report["recall"][name] = round(recall(args.model, topk, kinds["recall"]), 4)
    if args.json:
        print(json.dumps(report))
        return
    print(f"{'drafts@T':10}" + "".join(f"{kind:>22}" for kind in kinds))
    for name, row in report["speed"].items():
        cells = (f"{v['tokens_per_round']:.2f} ({v['accepted_share']:.0%})" for v in row.values())
        print(f"{name:10}" + "".join(f"{cell:>22}" for cell in cells))
    print("recall by index_topk:", ", ".join(f"{k}: {v:.1%}" for k, v in report["recall"].items()))


if __name__ == "__main__":
    main()
