# SPDX-License-Identifier: Apache-2.0
"""Train the second demo checkpoint, on the data of `prepare.py`.

    python train_v4.py --data DIR --out DIR --minutes 8 --seed 7 --device cuda --compile
    python train_v4.py --data DIR --out DIR --smoke         # a minute or two on a CPU

The schedule follows the share of `--minutes` that has passed, as in `train.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from attend import LossRows, Sparsity, same_topk
from attend_v4 import RunnerV4
from data import LONG_MIX, SHORT_MIX, Streams, load_streams
from export_v4 import save_checkpoint
from model_v4 import DemoV4Config, DemoV4Model
from optim import Muon
from train import (
    FLOOR,
    INDEX_LOSS_ROWS,
    MTP_WEIGHTS,
    PEAK_LR,
    SMOKE_SHORT,
    Size,
    draft_loss,
    held_out_rows,
    next_token_loss,
    write_curve,
)

CONSTANT_UNTIL = 0.35
SHORT, LONG = Size(48, 1024), Size(12, 4096)
SMOKE_LONG = Size(2, 288)
"""Long enough for an entry of 128 tokens, and for more entries of 4 than are picked."""


@dataclass(frozen=True)
class Phase:
    until: float  # share of the time budget
    long: bool
    sparse: bool
    depth: int
    dropout: float


# Language first, then drafts, then selection, then length. The indexer learns all along.
PHASES = (
    Phase(0.35, long=False, sparse=False, depth=1, dropout=0.10),
    Phase(0.58, long=False, sparse=False, depth=3, dropout=0.10),
    Phase(0.76, long=False, sparse=True, depth=3, dropout=0.10),
    Phase(1.00, long=True, sparse=True, depth=3, dropout=0.0),
)


def split_parameters(
    model: DemoV4Model,
) -> tuple[list[nn.Parameter], list[dict[str, object]]]:
    """(matrices for Muon, AdamW groups with their `base_lr`)."""
    muon: list[nn.Parameter] = []
    tables: list[nn.Parameter] = []
    indexer: list[nn.Parameter] = []
    small: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if ".indexer." in name:
            indexer.append(p)
        elif name.startswith(("embed.", "head.")):
            tables.append(p)
        elif p.dim() < 2 or name.endswith(("gate.weight", "ape", "_fn")):
            small.append(p)
        else:
            muon.append(p)
    groups: list[dict[str, object]] = [
        {"params": tables, "base_lr": 4e-3, "weight_decay": 0.05},
        {"params": indexer, "base_lr": 2e-3, "weight_decay": 0.0},
        {"params": small, "base_lr": 2e-3, "weight_decay": 0.0},
    ]
    return muon, groups


def learning_rate_factor(progress: float, step: int) -> float:
    warm = min(1.0, (step + 1) / 100)
    if progress < CONSTANT_UNTIL:
        return warm
    left = (1.0 - progress) / (1.0 - CONSTANT_UNTIL)
    return warm * (FLOOR + (1 - FLOOR) * 0.5 * (1 - math.cos(math.pi * left)))


class TrainerV4:
    def __init__(
        self, model: DemoV4Model, streams: Streams, *, smoke: bool, compiled: bool
    ) -> None:
        self.model, self.streams = model, streams
        self.device = streams.tokens.device
        self.sizes = (SMOKE_SHORT, SMOKE_LONG) if smoke else (SHORT, LONG)
        self.runner = RunnerV4(model, compiled=compiled)
        muon, groups = split_parameters(model)
        self.muon = Muon(muon, lr=PEAK_LR)
        self.adam = torch.optim.AdamW(
            [{**g, "lr": g["base_lr"]} for g in groups],
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        self.tokens_seen = 0

    def sparsity(self, rows: int) -> Sparsity:
        """Mostly the model's own top-k; a few rows narrower or dense keep it robust."""
        topk = self.model.c.index_topk
        choices = torch.tensor([topk] * 12 + [topk // 2] * 2 + [0] * 2, device=self.device)
        at = torch.arange(rows, device=self.device) % len(choices)
        return Sparsity(topk, choices[at])

    def losses(self, phase: Phase, size: Size) -> dict[str, Tensor]:
        rows, length = size.rows, size.length
        runner, head = self.runner, self.model.head.weight
        mix = LONG_MIX if phase.long else SHORT_MIX
        tokens = self.streams.batch(rows, length + phase.depth + 1, mix)
        sparsity = self.sparsity(rows) if phase.sparse else None
        at = torch.randint(length, (INDEX_LOSS_ROWS,), device=self.device)
        loss_rows = LossRows(at, [])
        streams = runner.trunk(tokens[:, :length], sparsity, loss=loss_rows, dropout=phase.dropout)
        hidden = runner.hidden(streams)
        targets = tokens[:, 1 : length + 1].flatten()
        out = {"main": next_token_loss(hidden.flatten(0, 1), head, targets)}
        drafts = runner.chain(
            streams, tokens[:, : length + phase.depth], phase.depth, dropout=phase.dropout / 2
        )
        trunk_logits = runner.logits(hidden).detach()
        places = torch.arange(length, device=self.device)
        soft_share = torch.tensor(0.5 if phase.depth == 1 else 0.9, device=self.device)
        for j, draft in enumerate(drafts, start=1):
            out[f"draft{j}"] = draft_loss(
                runner.draft_hidden(draft).flatten(0, 1),
                head,
                tokens[:, j + 1 : j + 1 + length].flatten(),
                trunk_logits.roll(-j, dims=1).flatten(0, 1),
                (places < length - j).float().repeat(rows),
                soft_share,
            )
        out["index"] = torch.stack(loss_rows.losses).mean()
        return out

    def step(self, phase: Phase, factor: float, *, balance: bool) -> dict[str, Tensor]:
        size = self.sizes[1] if phase.long else self.sizes[0]
        self.model.train()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            losses = self.losses(phase, size)
        total = losses["main"] + losses["index"]
        for j, weight in enumerate(MTP_WEIGHTS[: phase.depth], start=1):
            total = total + weight * losses[f"draft{j}"]
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.lr = self.muon.base_lr * factor
        for group in self.adam.param_groups:
            group["lr"] = group["base_lr"] * factor
        self.muon.step()
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        for gate in self.model.gates():
            gate.balance(0.001 if balance else 0.0)
        self.tokens_seen += size.rows * size.length
        return {name: value.detach() for name, value in losses.items()}


@torch.no_grad()
def validate(trainer: TrainerV4, held_out: dict[str, Tensor]) -> dict[str, float]:
    """Nats a token with picked entries, and teacher-forced agreement of drafts."""
    model, device = trainer.model.eval(), trainer.device
    runner, out = RunnerV4(model), dict[str, float]()
    agreed, counted = [0.0] * 3, 0
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for name, rows in held_out.items():
            total = 0.0
            for piece in rows.split(4):
                sparsity = same_topk(model.c.index_topk, piece.shape[0], device)
                tokens = piece[:, :-3]
                streams = runner.trunk(tokens, sparsity)
                hidden = runner.hidden(streams)
                targets = piece[:, 1:-2].flatten()
                loss = next_token_loss(hidden.flatten(0, 1), model.head.weight, targets)
                total += loss.item() * piece.shape[0]
                best = runner.logits(hidden).argmax(-1)  # [B, T]
                for j, draft in enumerate(runner.chain(streams, piece, 3), start=1):
                    guess = runner.logits(runner.draft_hidden(draft)).argmax(-1)
                    same = guess[:, :-j] == best[:, j:]
                    agreed[j - 1] += same.float().mean().item() * piece.shape[0]
                counted += piece.shape[0]
            out[f"nats_{name}"] = total / rows.shape[0]
    return out | {f"agree{j + 1}": a / max(counted, 1) for j, a in enumerate(agreed)}


def run(
    trainer: TrainerV4, held_out: dict[str, Tensor], seconds: float, out: Path, *, checks: int
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    curve: list[dict[str, float]] = []
    begin = time.monotonic()
    for phase in PHASES:  # with learning rate 0: compiles, and fails early if it must
        trainer.step(phase, 0.0, balance=False)
        if trainer.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"warm-up {time.monotonic() - begin:.1f} s, peak {peak:.1f} GiB", flush=True)
    trainer.tokens_seen = 0
    seconds -= time.monotonic() - begin
    begin, step, next_check = time.monotonic(), 0, 0.0
    recent: dict[str, list[Tensor]] = {}
    while (progress := (time.monotonic() - begin) / seconds) < 1.0:
        phase = next(p for p in PHASES if progress < p.until)
        factor = learning_rate_factor(progress, step)
        for name, value in trainer.step(phase, factor, balance=progress < 0.9).items():
            recent.setdefault(name, []).append(value)
        step += 1
        if step % 20 == 0 and trainer.device.type == "cuda":
            torch.cuda.synchronize()  # the schedule follows the clock: do not run far ahead
        if progress >= next_check:
            next_check += 1 / checks
            curve.append(record(trainer, held_out, recent, step, progress, begin))
            recent = {}
            write_curve(curve, out / "curve.csv")
            save_checkpoint(trainer.model, out / "final")
    curve.append(record(trainer, held_out, recent, step, 1.0, begin))
    write_curve(curve, out / "curve.csv")
    save_checkpoint(trainer.model, out / "final")
    print(f"{step} steps, {trainer.tokens_seen:,} tokens, {time.monotonic() - begin:.0f} s")


def record(
    trainer: TrainerV4,
    held_out: dict[str, Tensor],
    recent: dict[str, list[Tensor]],
    step: int,
    progress: float,
    begin: float,
) -> dict[str, float]:
    row: dict[str, float] = {"step": step, "progress": progress, "tokens": trainer.tokens_seen}
    for name, values in recent.items():
        row[f"loss_{name}"] = torch.stack(values[-50:]).mean().item()
    row |= validate(trainer, held_out)
    row["seconds"] = time.monotonic() - begin
    print(json.dumps({k: round(v, 3) for k, v in row.items()}), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
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
    model = DemoV4Model(DemoV4Config()).to(device)
    streams = load_streams(args.data, device, args.seed)
    trainer = TrainerV4(model, streams, smoke=args.smoke, compiled=args.compile)
    length, most = (160, 2) if args.smoke else (1024, 16)
    held_out = held_out_rows(args.data, device, length, most)
    run(trainer, held_out, args.minutes * 60, args.out, checks=4 if args.smoke else 14)


if __name__ == "__main__":
    main()
