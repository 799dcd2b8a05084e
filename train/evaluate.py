# SPDX-License-Identifier: Apache-2.0
"""Measure a checkpoint in float32: bits per byte, draft acceptance, recall, samples.

    python evaluate.py CHECKPOINT --data DIR --out figures.json [--device cuda] [--most 64]

Acceptance at temperature 0 is simulated exactly: a draft is accepted only while all drafts
before it equal the target's tokens, and then the drafter has read just those tokens, so the
drafts from every start of a finished greedy text come from one pass of `Runner.chain`.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import export
import export_v4
from attend import Runner, Sparsity, same_topk
from attend_v4 import RunnerV4

AnyRunner = Runner | RunnerV4

DEPTH = 3
NEW_TOKENS = 64
PAD = 2
EOS = 1
SAMPLES = (
    "Emma was",
    "Once upon a time",
    "The captain looked at the sea, and",
    "In the beginning",
    "<｜User｜>Hello<｜Assistant｜></think>",
    "<｜User｜>Who are you?<｜Assistant｜></think>",
    "<｜User｜>What is 12 + 7?<｜Assistant｜></think>",
    "<｜User｜>What is the capital of France?<｜Assistant｜></think>",
    "<｜User｜>Tell me a story.<｜Assistant｜></think>",
)


def open_runner(folder: Path, device: torch.device) -> AnyRunner:
    """Runs either demo in float32, by the `model_type` of its config."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if fields["model_type"] == "deepseek_v4":
        return RunnerV4(export_v4.load_checkpoint(folder).to(device))
    return Runner(export.load_checkpoint(folder).to(device))


def held_out_bits(runner: AnyRunner, rows: Tensor, sparsity: Sparsity | None) -> float:
    """Mean nats a token of int64 [B, T] rows."""
    hidden = runner.hidden(runner.trunk(rows, sparsity))
    logits = runner.logits(hidden[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def quick_acceptance(
    runner: AnyRunner, rows: Tensor, depth: int, sparsity: Sparsity | None
) -> list[float]:
    """Share of starts whose drafts 1..j all equal the target's argmax (teacher-forced)."""
    length = rows.shape[1] - depth
    state = runner.trunk(rows, sparsity)
    target = runner.logits(runner.hidden(state)).argmax(-1)
    drafts = runner.chain(state[:, :length], rows, depth, sparsity)
    matched = torch.ones(rows.shape[0], length, dtype=torch.bool, device=rows.device)
    shares: list[float] = []
    for j, draft in enumerate(drafts, start=1):
        guess = runner.logits(runner.draft_hidden(draft)).argmax(-1)
        same = guess == target[:, j : j + length]
        matched = matched & same
        shares.append(matched.float().mean().item())
    return shares


@dataclass
class Greedy:
    """Greedy continuations: tokens int64 [B, longest], lengths before and after."""

    tokens: Tensor
    prompt_lens: Tensor
    total_lens: Tensor


@torch.no_grad()
def generate(runner: AnyRunner, prompts: list[list[int]], new: int, topk: int) -> Greedy:
    """Greedy decoding of right-padded rows without a cache; a row ends at EOS or `new`."""
    device = runner.device
    prompt_lens = torch.tensor([len(p) for p in prompts], device=device)
    tokens = torch.full((len(prompts), int(prompt_lens.max()) + new + 1), PAD, device=device)
    for i, p in enumerate(prompts):
        tokens[i, : len(p)] = torch.tensor(p, device=device)
    lens, done = prompt_lens.clone(), torch.zeros_like(prompt_lens, dtype=torch.bool)
    rows = torch.arange(len(prompts), device=device)
    sparsity = same_topk(topk, len(prompts), device)
    for _ in range(new):
        hidden = runner.hidden(runner.trunk(tokens[:, : int(lens.max())], sparsity))
        chosen = runner.logits(hidden[rows, lens - 1]).argmax(-1)
        tokens[rows, lens] = torch.where(done, tokens[rows, lens], chosen)
        lens = torch.where(done, lens, lens + 1)
        done = done | (chosen == EOS)
        if bool(done.all()):
            break
    return Greedy(tokens, prompt_lens, lens)


@torch.no_grad()
def acceptance(runner: AnyRunner, greedy: Greedy, topk: int) -> dict[str, object]:
    """Tokens a round at depth 3 and the share of rounds whose drafts 1..j were accepted."""
    device = greedy.tokens.device
    longest = int(greedy.total_lens.max())
    tokens = F.pad(greedy.tokens[:, :longest], (0, DEPTH), value=PAD)
    sparsity = same_topk(topk, tokens.shape[0], device)
    drafts = runner.chain(runner.trunk(tokens[:, :longest], sparsity), tokens, DEPTH, sparsity)
    guesses = torch.stack(
        [runner.logits(runner.draft_hidden(d)).argmax(-1) for d in drafts], -1
    ).cpu()  # [B, T, 3]
    tokens, prompt_lens, total_lens = tokens.cpu(), greedy.prompt_lens, greedy.total_lens
    produced, rounds, reached = 0, 0, [0] * DEPTH
    per_prompt: list[float] = []
    for b in range(tokens.shape[0]):
        at, end = int(prompt_lens[b]) + 1, int(total_lens[b])
        mine = 0
        while at < end:
            wanted = tokens[b, at : min(at + DEPTH, end)]
            same = (guesses[b, at - 2, : len(wanted)] == wanted).long().cumprod(0)
            taken = int(same.sum())
            for j in range(taken):
                reached[j] += 1
            produced += min(taken + 1, end - at)
            at += taken + 1
            mine += 1
        if mine:
            per_prompt.append((end - int(prompt_lens[b]) - 1) / mine)
        rounds += mine
    return {
        "prompts": tokens.shape[0],
        "rounds": rounds,
        "tokens_per_round": round(produced / max(rounds, 1), 3),
        "median_of_prompts": round(sorted(per_prompt)[len(per_prompt) // 2], 3),
        "accepted_at": [round(r / max(rounds, 1), 3) for r in reached],
    }


@torch.no_grad()
def recall_accuracy(
    runner: AnyRunner, tokenizer: Tokenizer, samples: list[dict[str, str]], topk: int
) -> float:
    """Share of samples whose whole answer is the greedy continuation."""
    device = runner.device
    right = 0
    encoded = [
        (_ids(tokenizer, s["prompt"]), tokenizer.encode(s["answer"], add_special_tokens=False).ids)
        for s in samples
    ]
    for begin in range(0, len(encoded), 8):
        batch = encoded[begin : begin + 8]
        width = max(len(p) + len(a) for p, a in batch)
        rows = torch.full((len(batch), width), PAD, device=device)
        for i, (p, a) in enumerate(batch):
            rows[i, : len(p) + len(a)] = torch.tensor(p + a, device=device)
        hidden = runner.hidden(runner.trunk(rows, same_topk(topk, len(batch), device)))
        best = runner.logits(hidden).argmax(-1).cpu()
        for i, (p, a) in enumerate(batch):
            right += best[i, len(p) - 1 : len(p) + len(a) - 1].tolist() == a
    return round(right / len(encoded), 4)


def _ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    return tokenizer.encode(prompt).ids


def measure(folder: Path, data: Path, device: torch.device, most: int) -> dict[str, object]:
    runner = open_runner(folder, device)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    sets = json.loads((data / "evaluation.json").read_text(encoding="utf-8"))
    topk = runner.c.index_topk
    figures: dict[str, object] = {}
    figures["bits_per_byte"] = bits_per_byte(runner, tokenizer, sets["held_out"], topk, most)
    drafts: dict[str, object] = {}
    for kind in ("prose", "copy", "json", "recall", "chat"):
        prompts = [p["prompt"] for p in sets["prompts"] if p["kind"] == kind][:most]
        greedy = generate(runner, [_ids(tokenizer, p) for p in prompts], NEW_TOKENS, topk)
        answers = [p.get("answer", "") for p in sets["prompts"] if p["kind"] == kind][:most]
        drafts[kind] = {**acceptance(runner, greedy, topk), **_right(tokenizer, greedy, answers)}
        print(kind, json.dumps(drafts[kind]), flush=True)
    figures["acceptance_depth_3"] = drafts
    recall: dict[str, dict[str, float]] = {}
    for length, samples in sets["recall"].items():
        recall[length] = {"samples": len(samples[:most])}
        for k in (*sorted({16, 32, topk}), 0):
            share = recall_accuracy(runner, tokenizer, samples[:most], k)
            recall[length][str(k or "all")] = share
        print("recall", length, json.dumps(recall[length]), flush=True)
    figures["recall_accuracy_by_topk"] = recall
    figures["samples"] = samples_of(runner, tokenizer, topk)
    return figures


def _right(tokenizer: Tokenizer, greedy: Greedy, answers: list[str]) -> dict[str, float]:
    """Share of rows that begin with the known answer (as far as 64 tokens reach)."""
    if not any(answers):
        return {}
    good = 0
    for i, answer in enumerate(answers):
        begin, end = int(greedy.prompt_lens[i]), int(greedy.total_lens[i])
        text = tokenizer.decode(greedy.tokens[i, begin:end].tolist()).strip()
        cut = end - begin >= NEW_TOKENS
        good += answer.strip().startswith(text) if cut else text == answer.strip()
    return {"answers_right": round(good / len(answers), 3)}


@torch.no_grad()
def bits_per_byte(
    runner: AnyRunner, tokenizer: Tokenizer, texts: dict[str, str], topk: int, most: int
) -> dict[str, dict[str, float]]:
    """By source, dense and sparse, rows of 1024 tokens."""
    device = runner.device
    out: dict[str, dict[str, float]] = {}
    for name, text in texts.items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        count = min(most, len(ids) // 1024)
        rows = torch.tensor(ids[: count * 1024], device=device).view(count, 1024)
        size = len(tokenizer.decode(rows.flatten().tolist()).encode())
        scale = rows.numel() / size / math.log(2)
        out[name] = {}
        for label, k in (("dense", 0), (f"topk{topk}", topk)):
            nats = sum(
                held_out_bits(runner, part, same_topk(k, len(part), device)) * len(part)
                for part in rows.split(8)
            )
            out[name][label] = round(nats / count * scale, 4)
        print(name, out[name], flush=True)
    return out


def samples_of(runner: AnyRunner, tokenizer: Tokenizer, topk: int) -> dict[str, str]:
    greedy = generate(runner, [_ids(tokenizer, p) for p in SAMPLES], 96, topk)
    out: dict[str, str] = {}
    for i, prompt in enumerate(SAMPLES):
        begin, end = int(greedy.prompt_lens[i]), int(greedy.total_lens[i])
        out[prompt] = tokenizer.decode(greedy.tokens[i, begin:end].tolist())
        print(repr(prompt), "->", repr(out[prompt]), flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--most", type=int, default=72)
    args = parser.parse_args()
    figures = measure(args.checkpoint, args.data, torch.device(args.device), args.most)
    args.out.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
