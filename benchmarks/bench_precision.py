# SPDX-License-Identifier: Apache-2.0
"""How often weights in another precision choose another token, along the demo's own greedy text.

Usage, from the root:
    PYTHONPATH=src:. python benchmarks/bench_precision.py [--every 5] [--to fp8,mxfp4]

Converts the shipped demo, lets the demo itself answer every Nth prompt of benchmarks/prompts.json
greedily (64 tokens at most), and feeds each converted model those very tokens: a position differs
if the converted model's likeliest token is not the one that stands there. Float32 on the CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import torch

from freewheel import LLM, SamplingParams
from freewheel.engine import convert
from freewheel.models import LoadedModel, load_folder, open_folder
from tests.models.paged import Paged

PROMPTS = Path(__file__).parent / "prompts.json"
CONTEXT, MOST = 1024, 64


def forced(model: LoadedModel, prompt: list[int], answer: list[int]) -> list[int]:
    """The likeliest token at each place of `answer`, given all before it."""
    row = Paged(model, length=CONTEXT, page_size=16)
    hidden = row.forward([*prompt, *answer[:-1]])[len(prompt) - 1 :]
    return row.model.logits(hidden).argmax(-1).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--to", default="fp8,mxfp4")
    args = parser.parse_args()
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))[:: args.every]
    exact = LLM("demo", context_len=CONTEXT)
    params = SamplingParams(temperature=0, max_tokens=MOST)
    torch.set_num_threads(1)
    answers = [list(o.token_ids) for o in exact.generate([p["prompt"] for p in prompts], params)]
    report: dict[str, object] = {"prompts": len(prompts), "positions": sum(map(len, answers))}
    with tempfile.TemporaryDirectory() as folder:
        for to in args.to.split(","):
            out = Path(folder) / to
            convert("demo", out, to)
            model = load_folder(open_folder(out), torch.float32, positions=CONTEXT)
            wrong: Counter[str] = Counter()
            for prompt, answer in zip(prompts, answers, strict=True):
                given = exact.tokenizer.encode_prompt(prompt["prompt"])
                found = forced(model, given, answer)
                wrong[prompt["kind"]] += sum(a != b for a, b in zip(found, answer, strict=True))
            report[to] = {"differing": wrong.total(), "by kind": dict(wrong)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
