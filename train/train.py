# SPDX-License-Identifier: Apache-2.0
"""Train the demo checkpoint.

    python train.py --data DIR --out DIR --minutes 7 --seed 7 --device cuda --compile
    python train.py --data DIR --out DIR --smoke            # a minute on a CPU

The schedule follows the share of `--minutes` that has passed, so a slower machine trains
fewer steps of the same schedule.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from attend import PIECES, LossRows, Runner, Sparsity, same_topk
from data import LONG_MIX, SHORT_MIX, Streams, load_streams
from evaluate import AnyRunner, held_out_bits, quick_acceptance
from export import save_checkpoint
from model import DemoConfig, DemoModel
from optim import Optimisers, split_parameters

MTP_WEIGHTS = (0.2, 0.15, 0.1)
INDEX_LOSS_ROWS = 64
PEAK_LR, FLOOR = 0.02, 0.03


@dataclass(frozen=True)
class Phase:
    until: float  # share of the time budget
    long: bool
    sparse: bool
    depth: int
    index_loss: bool
    dropout: float


# Language first, then drafts, then selection, then length.
PHASES = (
    Phase(0.10, long=False, sparse=False, depth=1, index_loss=False, dropout=0.15),
    Phase(0.40, long=False, sparse=False, depth=1, index_loss=True, dropout=0.15),
    Phase(0.62, long=False, sparse=False, depth=3, index_loss=True, dropout=0.15),
    Phase(0.76, long=False, sparse=True, depth=3, index_loss=True, dropout=0.15),
    Phase(1.00, long=True, sparse=True, depth=3, index_loss=True, dropout=0.0),
)
CONSTANT_UNTIL = 0.35  # share of the budget at the peak learning rate


@dataclass(frozen=True)
class Size:
    rows: int
    length: int


SHORT, LONG = Size(64, 1024), Size(16, 4096)
SMOKE_SHORT, SMOKE_LONG = Size(3, 96), Size(2, 192)


def learning_rate_factor(progress: float, step: int) -> float:
    warm = min(1.0, (step + 1) / 100)
    if progress < CONSTANT_UNTIL:
        return warm
    left = (1.0 - progress) / (1.0 - CONSTANT_UNTIL)
    return warm * (FLOOR + (1 - FLOOR) * 0.5 * (1 - math.cos(math.pi * left)))


def next_token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of [N, D] against int64 [N]."""
    return F.cross_entropy(F.linear(hidden, head).float(), targets)


def draft_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    trunk_logits: Tensor,
    weight: Tensor,
    soft_share: Tensor,
) -> Tensor:
    """Cross-entropy against the trunk's own distribution and the true token; weight [N]."""
    log_probs = F.linear(hidden, head).float().log_softmax(-1)
    hard = -log_probs.gather(-1, targets[..., None]).squeeze(-1)
    soft = -(trunk_logits.float().softmax(-1) * log_probs).sum(-1)
    return (hard.lerp(soft, soft_share) * weight).mean()


class Trainer:
    def __init__(self, model: DemoModel, streams: Streams, *, smoke: bool, compiled: bool) -> None:
        self.model, self.streams = model, streams
        self.device = streams.tokens.device
        self.sizes = (SMOKE_SHORT, SMOKE_LONG) if smoke else (SHORT, LONG)
        self.runner = Runner(model, fused=True, compiled=tuple(PIECES) if compiled else ())
        self.next_token_loss, self.draft_loss = next_token_loss, draft_loss
        if compiled:
            self.next_token_loss = torch.compile(next_token_loss, dynamic=False)
            self.draft_loss = torch.compile(draft_loss, dynamic=False)
        muon, groups = split_parameters(model, ("embed_tokens", "lm_head"), ("gate.weight",))
        self.optimisers = Optimisers(muon, groups, PEAK_LR)
        self.tokens_seen = 0

    def plain_runner(self) -> Runner:
        return Runner(self.model, fused=True)

    def sparsity(self, rows: int) -> Sparsity:
        """Mostly the model's own top-k; a few rows wider, narrower or dense keep it robust."""
        topk = self.model.c.index_topk
        choices = torch.tensor([topk] * 12 + [topk // 2] * 2 + [0] * 2, device=self.device)
        at = torch.arange(rows, device=self.device) % len(choices)
        return Sparsity(topk, choices[at])

    def losses(self, phase: Phase, size: Size) -> dict[str, Tensor]:
        rows, length = size.rows, size.length
        runner, mix = self.runner, LONG_MIX if phase.long else SHORT_MIX
        tokens = self.streams.batch(rows, length + phase.depth + 1, mix)
        sparsity = self.sparsity(rows) if phase.sparse else None
        rows_for_loss = None
        if phase.index_loss:
            at = torch.randint(length, (INDEX_LOSS_ROWS,), device=self.device)
            rows_for_loss = LossRows(at, [])
        head = self.model.lm_head.weight
        hidden = runner.trunk(
            tokens[:, :length], sparsity, loss=rows_for_loss, dropout=phase.dropout
        )
        flat = tokens[:, 1 : length + 1].flatten()
        out = {"main": self.next_token_loss(hidden.flatten(0, 1), head, flat)}
        drafts = runner.chain(
            hidden,
            tokens[:, : length + phase.depth],
            phase.depth,
            sparsity,
            loss=rows_for_loss,
            dropout=phase.dropout / 2,
        )
        trunk_logits = runner.logits(hidden).detach()
        at = torch.arange(length, device=self.device)
        soft_share = torch.tensor(0.5 if phase.depth == 1 else 0.9, device=self.device)
        for j, draft in enumerate(drafts, start=1):
            out[f"draft{j}"] = self.draft_loss(
                draft.flatten(0, 1),
                head,
                tokens[:, j + 1 : j + 1 + length].flatten(),
                trunk_logits.roll(-j, dims=1).flatten(0, 1),
                (at < length - j).float().repeat(rows),
                soft_share,
            )
        if rows_for_loss is not None:
            out["index"] = torch.stack(rows_for_loss.losses).mean()
        return out

    def step(self, phase: Phase, factor: float, *, balance: bool) -> dict[str, Tensor]:
        size = self.sizes[1] if phase.long else self.sizes[0]
        self.model.train()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            losses = self.losses(phase, size)
        total = losses["main"] + losses.get("index", 0.0)
        for j, weight in enumerate(MTP_WEIGHTS[: phase.depth], start=1):
            total = total + weight * losses[f"draft{j}"]
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimisers.set_factor(factor)
        self.optimisers.step()
        self.model.zero_grad(set_to_none=True)
        for gate in self.model.gates():
            gate.balance(0.001 if balance else 0.0)
        self.tokens_seen += size.rows * size.length
        return {name: value.detach() for name, value in losses.items()}


def validate(runner: AnyRunner, held_out: dict[str, Tensor]) -> dict[str, float]:
    """Nats a token and teacher-forced draft agreement on the held-out endings."""
    runner.model.eval()
    device = runner.device
    out: dict[str, float] = {}
    with (
        torch.no_grad(),
        torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"),
    ):
        for name, rows in held_out.items():
            out[f"nats_{name}"] = held_out_bits(runner, rows, None)
        rows = torch.cat([r[:8] for r in held_out.values()])
        sparsity = same_topk(runner.c.index_topk, rows.shape[0], device)
        out["nats_sparse"] = held_out_bits(runner, rows, sparsity)
        out["nats_same_dense"] = held_out_bits(runner, rows, None)
        for j, share in enumerate(quick_acceptance(runner, rows, 3, sparsity), start=1):
            out[f"agree{j}"] = share
    return out


def held_out_rows(data: Path, device: torch.device, length: int, most: int) -> dict[str, Tensor]:
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    texts = json.loads((data / "evaluation.json").read_text(encoding="utf-8"))["held_out"]
    rows: dict[str, Tensor] = {}
    for name, text in texts.items():
        ids = torch.tensor(tokenizer.encode(text[:400_000], add_special_tokens=False).ids)
        count = min(most, ids.numel() // length)
        rows[name] = ids[: count * length].view(count, length).to(device)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.suppress_errors = True
    model = DemoModel(DemoConfig()).to(device)
    streams = load_streams(args.data, device, args.seed)
    trainer = Trainer(model, streams, smoke=args.smoke, compiled=args.compile)
    held_out = held_out_rows(args.data, device, 96 if args.smoke else 1024, 2 if args.smoke else 24)
    run(trainer, held_out, args.minutes * 60, args.out, checks=6 if args.smoke else 14)


def warm_up(trainer: Trainer) -> None:
    """One step of every phase with learning rate 0: compiles, and fails early if it must."""
    for phase in PHASES:
        begin = time.monotonic()
        trainer.step(phase, 0.0, balance=False)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"warm-up {time.monotonic() - begin:.1f} s, peak {peak:.1f} GiB", flush=True)
    trainer.tokens_seen = 0


def run(
    trainer: Trainer, held_out: dict[str, Tensor], seconds: float, out: Path, *, checks: int
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    curve: list[dict[str, float]] = []
    begin = time.monotonic()
    warm_up(trainer)
    seconds -= time.monotonic() - begin
    begin = phase_begin = time.monotonic()
    step, phase_step, next_check, saved = 0, 0, 0.0, False
    recent: dict[str, list[Tensor]] = {}
    phase = PHASES[0]
    while (progress := (time.monotonic() - begin) / seconds) < 1.0:
        current = next(p for p in PHASES if progress < p.until)
        if current is not phase:
            took = (time.monotonic() - phase_begin) / max(step - phase_step, 1)
            print(f"{took * 1000:.1f} ms a step; now {current}", flush=True)
            recent, phase, phase_step, phase_begin = {}, current, step, time.monotonic()
        factor = learning_rate_factor(progress, step)
        for name, value in trainer.step(phase, factor, balance=progress < 0.9).items():
            recent.setdefault(name, []).append(value)
        step += 1
        if step % 20 == 0 and trainer.device.type == "cuda":
            torch.cuda.synchronize()  # the schedule follows the clock: do not run far ahead
        if progress >= next_check:
            next_check += 1 / checks
            row = {"step": step, "progress": progress, "tokens": trainer.tokens_seen}
            curve.append(record(trainer.plain_runner(), held_out, row, recent, begin))
            recent = {}
            write_curve(curve, out / "curve.csv")
        if progress > 0.85 and not saved:
            saved = True  # should the machine go away, this much is left
            save_checkpoint(trainer.model, out / "final")
    row = {"step": step, "progress": 1.0, "tokens": trainer.tokens_seen}
    curve.append(record(trainer.plain_runner(), held_out, row, recent, begin))
    write_curve(curve, out / "curve.csv")
    save_checkpoint(trainer.model, out / "final")
    print(f"{step} steps, {trainer.tokens_seen:,} tokens, {time.monotonic() - begin:.0f} s")


def record(
    runner: AnyRunner,
    held_out: dict[str, Tensor],
    row: dict[str, float],
    recent: dict[str, list[Tensor]],
    begin: float,
) -> dict[str, float]:
    """A line of the curve: `row` with recent losses and measures on the held-out rows."""
    for name, values in recent.items():
        row[f"loss_{name}"] = torch.stack(values[-50:]).mean().item()
    row.update(validate(runner, held_out))
    row["seconds"] = time.monotonic() - begin
    shown = {k: round(v, 3) for k, v in row.items()}
    print(json.dumps(shown), flush=True)
    return row


def write_curve(curve: list[dict[str, float]], path: Path) -> None:
    fields = list(dict.fromkeys(key for row in curve for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        for row in curve:
            writer.writerow({k: round(v, 5) for k, v in row.items()})


if __name__ == "__main__":
    main()
