# SPDX-License-Identifier: Apache-2.0
"""How often weights or caches in another precision choose another token, along a demo's own text.

Usage, from the root:
    PYTHONPATH=src:. python benchmarks/bench_precision.py [--model demo] [--every 5]
        [--to fp8,mxfp4] [--caches bf16,fp8]

Lets the shipped model itself answer every Nth prompt of benchmarks/prompts.json greedily (64 tokens
at most), and feeds those very tokens to each model that `--to` converts it to, and to itself with
rows stored as `--caches` says: a position differs if the likeliest token is not the one that stands
there. Float32 on the CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from freewheel import LLM, SamplingParams
from freewheel.config import find_model
from freewheel.engine import convert
from freewheel.models import LoadedModel, load_folder, open_folder
from freewheel.spec.storage import Fp8IndexStorage, Fp8Storage, PlainStorage, RowStorage
from tests.models.paged import Paged

PROMPTS = Path(__file__).parent / "prompts.json"
CONTEXT, MOST = 1024, 64
STORAGES: dict[str, RowStorage] = {
    "bf16": PlainStorage("bfloat16"),
    "fp8": Fp8Storage(),
    "fp8-index": Fp8IndexStorage(PlainStorage("bfloat16")),
}

Text = tuple[str, list[int], list[int]]
"""A prompt's kind, its tokens, and the answer's."""


def forced(
    model: LoadedModel, prompt: list[int], answer: list[int], storage: RowStorage | None
) -> list[int]:
    """The likeliest token at each place of `answer`, given all before it."""
    page_size = model.model.spec.page_multiple * 16 // min(16, model.model.spec.page_multiple)
    row = Paged(model, length=CONTEXT, page_size=page_size, storage=storage)
    hidden = row.forward([*prompt, *answer[:-1]])[len(prompt) - 1 :]
    return row.model.logits(hidden).argmax(-1).tolist()


def differing(
    model: LoadedModel, texts: Iterable[Text], storage: RowStorage | None = None
) -> dict[str, object]:
    """Positions where another token is the likeliest, in all and by the prompt's kind."""
    wrong: Counter[str] = Counter()
    for kind, prompt, answer in texts:
        found = forced(model, prompt, answer, storage)
        wrong[kind] += sum(a != b for a, b in zip(found, answer, strict=True))
    return {"differing": wrong.total(), "by kind": dict(wrong)}


def write_texts(name: str, every: int) -> list[Text]:
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))[::every]
    exact = LLM(name, context_len=CONTEXT)
    params = SamplingParams(temperature=0, max_tokens=MOST)
    answers = exact.generate([p["prompt"] for p in prompts], params)
    return [
        (p["kind"], exact.tokenizer.encode_prompt(p["prompt"]), list(answer.token_ids))
        for p, answer in zip(prompts, answers, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--to", default="fp8,mxfp4", help="formats of weights; may be empty")
    parser.add_argument("--caches", default="bf16,fp8", help="formats of caches; may be empty")
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts = write_texts(args.model, args.every)
    positions = sum(len(answer) for _, _, answer in texts)
    report: dict[str, object] = {"prompts": len(texts), "positions": positions}
    own = load_folder(open_folder(find_model(args.model)), torch.float32, positions=CONTEXT)
    report["itself"] = differing(own, texts)
    for name in filter(None, args.caches.split(",")):
        report[f"{name} cache"] = differing(own, texts, STORAGES[name])
    with tempfile.TemporaryDirectory() as folder:
        for to in filter(None, args.to.split(",")):
            out = Path(folder) / to
            convert(args.model, out, to)
            model = load_folder(open_folder(out), torch.float32, positions=CONTEXT)
            report[f"{to} weights"] = differing(model, texts)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
