# SPDX-License-Identifier: Apache-2.0
"""Train the second demo checkpoint, on the data of `prepare.py`.

    python train_v4.py --data DIR --out DIR --minutes 8 --seed 7 --device cuda --compile --graph
    python train_v4.py --data DIR --out DIR --smoke         # a minute or two on a CPU

The schedule follows the share of `--minutes` that has passed, as in `train.py`. All rows are of
one length, and what changes from phase to phase is a tensor or a second CUDA graph: nothing is
compiled twice. Compiling takes at most `--compile-seconds`; what is not ready then stays eager.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attend import LossRows, Sparsity
from attend_v4 import RunnerV4, bounded
from data import Streams, load_streams
from export_v4 import save_checkpoint
from model_v4 import DemoV4Config, DemoV4Model
from optim import Optimisers, split_parameters
from train import (
    INDEX_LOSS_ROWS,
    MTP_WEIGHTS,
    PEAK_LR,
    Size,
    draft_loss,
    held_out_rows,
    learning_rate_factor,
    next_token_loss,
    record,
    write_curve,
)

SIZE, SMOKE_SIZE = Size(24, 2048), Size(2, 288)
"""The smoke size still holds entries of 128 tokens, and more entries of 4 than are picked."""
MIX = (0.22, 0.06, 0.12, 0.16, 0.27, 0.17)
"""Shares of the rows of a batch by the streams of `data.py`; long rows from the start."""
FINE = ("gate.weight", "ape", "_fn")


@dataclass(frozen=True)
class Phase:
    until: float  # share of the time budget
    depth: int
    dropout: float
    sparse: bool


# Language first, then selection, then drafts. The indexer learns all along.
PHASES = (
    Phase(0.20, depth=1, dropout=0.05, sparse=False),
    Phase(0.35, depth=1, dropout=0.05, sparse=True),
    Phase(1.00, depth=3, dropout=0.05, sparse=True),
)


class TrainerV4:
    """Its inputs of a step lie in tensors, so that a step can be replayed from a CUDA graph."""

    def __init__(
        self, model: DemoV4Model, streams: Streams, size: Size, *, deadline: float | None
    ) -> None:
        self.model, self.streams, self.size = model, streams, size
        self.device = streams.tokens.device
        self.runner = RunnerV4(model, deadline=deadline)
        self.next_token_loss, self.draft_loss = next_token_loss, draft_loss
        if deadline is not None:
            self.next_token_loss = bounded(next_token_loss, deadline)
            self.draft_loss = bounded(draft_loss, deadline)
        self.optimisers = Optimisers(*split_parameters(model, ("embed.", "head."), FINE), PEAK_LR)
        width = size.length + len(MTP_WEIGHTS) + 1
        self.tokens = torch.zeros(size.rows, width, dtype=torch.int64, device=self.device)
        self.row_topk = torch.zeros(size.rows, dtype=torch.int64, device=self.device)
        self.balance_speed = torch.zeros((), device=self.device)
        self.graphs: dict[tuple[int, float], Callable[[], dict[str, Tensor]]] = {}

    def plain_runner(self) -> RunnerV4:
        return RunnerV4(self.model)

    def losses(self, depth: int, dropout: float) -> dict[str, Tensor]:
        rows, length = self.size.rows, self.size.length
        runner, head, tokens = self.runner, self.model.head.weight, self.tokens
        sparsity = Sparsity(self.model.c.index_topk, self.row_topk)
        at = torch.randint(length, (INDEX_LOSS_ROWS,), device=self.device)
        loss_rows = LossRows(at, [])
        streams = runner.trunk(tokens[:, :length], sparsity, loss=loss_rows, dropout=dropout)
        hidden = runner.hidden(streams).flatten(0, 1)
        targets = tokens[:, 1 : length + 1].flatten()
        out = {"main": self.next_token_loss(hidden, head, targets)}
        drafts = runner.chain(streams, tokens, depth, dropout=dropout / 2)
        trunk_logits = runner.logits(hidden).detach().view(rows, length, -1)
        places = torch.arange(length, device=self.device)
        soft_share = torch.full((), 0.5 if depth == 1 else 0.9, device=self.device)
        for j, draft in enumerate(drafts, start=1):
            out[f"draft{j}"] = self.draft_loss(
                runner.draft_hidden(draft).flatten(0, 1),
                head,
                tokens[:, j + 1 : j + 1 + length].flatten(),
                trunk_logits.roll(-j, dims=1).flatten(0, 1),
                (places < length - j).float().repeat(rows),
                soft_share,
            )
        out["index"] = torch.stack(loss_rows.losses).mean()
        return out

    def body(self, depth: int, dropout: float) -> dict[str, Tensor]:
        """A step on what lies in the input tensors."""
        self.model.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            losses = self.losses(depth, dropout)
        total = losses["main"] + losses["index"]
        for j, weight in enumerate(MTP_WEIGHTS[:depth], start=1):
            total = total + weight * losses[f"draft{j}"]
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimisers.step()
        for gate in self.model.gates():
            gate.balance(self.balance_speed)
        return {name: value.detach() for name, value in losses.items()}

    def set_inputs(self, phase: Phase, factor: float, balance_speed: float) -> None:
        """Mostly the model's own top-k; a few rows narrower or dense keep it robust."""
        rows, width = self.tokens.shape
        self.tokens.copy_(self.streams.batch(rows, width, MIX))
        topk = self.model.c.index_topk if phase.sparse else 0
        at = torch.arange(self.size.rows, device=self.device) % 16
        self.row_topk.copy_(torch.where(at < 12, topk, torch.where(at < 14, topk // 2, 0)))
        self.optimisers.set_factor(factor)
        self.balance_speed.fill_(balance_speed)

    def step(self, phase: Phase, factor: float, balance_speed: float) -> dict[str, Tensor]:
        self.model.train()
        self.set_inputs(phase, factor, balance_speed)
        key = (phase.depth, phase.dropout)
        if key in self.graphs:
            return {name: value.clone() for name, value in self.graphs[key]().items()}
        return self.body(*key)

    def capture(self, phase: Phase) -> None:
        """Keep the step of such a phase as a CUDA graph. The caller has run it before."""
        key, graph = (phase.depth, phase.dropout), torch.cuda.CUDAGraph()
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            losses = self.body(*key)

        def replay() -> dict[str, Tensor]:
            graph.replay()
            return losses

        self.graphs[key] = replay


def warm_up(trainer: TrainerV4, *, graph: bool) -> None:
    """Steps of every phase with learning rate 0: compiles, captures, fails early if it must."""
    begin = time.monotonic()
    for phase in {(p.depth, p.dropout): p for p in PHASES}.values():
        for _ in range(2):
            trainer.step(phase, 0.0, 0.0)
        if graph:
            trainer.capture(phase)
            trainer.step(phase, 0.0, 0.0)
        note = f"depth {phase.depth}: {time.monotonic() - begin:.1f} s"
        if trainer.device.type == "cuda":
            torch.cuda.synchronize()
            note += f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        print(f"warm-up, {note}", flush=True)
    torch.compiler.set_stance("eager_on_recompile")  # from here on no step waits for a compiler


def sound(losses: dict[str, list[Tensor]]) -> bool:
    return all(bool(values[-1].isfinite()) for values in losses.values())


def run(
    trainer: TrainerV4, held_out: dict[str, Tensor], seconds: float, out: Path, *, checks: int
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    curve: list[dict[str, float]] = []
    begin, step, seen, next_check = time.monotonic(), 0, 0, 0.0
    recent: dict[str, list[Tensor]] = {}
    kept, calm = _snapshot(trainer), 1.0
    while (progress := (time.monotonic() - begin) / seconds) < 1.0:
        phase = next(p for p in PHASES if progress < p.until)
        factor = calm * learning_rate_factor(progress, step)
        for name, value in trainer.step(phase, factor, 0.001 * (progress < 0.9)).items():
            recent.setdefault(name, []).append(value)
        step, seen = step + 1, seen + trainer.size.rows * trainer.size.length
        if step % 20 == 0 and trainer.device.type == "cuda":
            torch.cuda.synchronize()  # the schedule follows the clock: do not run far ahead
        if step % 100 == 0 and not sound(recent):
            calm *= 0.5
            print(f"step {step}: a loss is not finite; back to the last check, half rate")
            _restore(trainer, kept)
            recent = {}
        elif progress >= next_check and recent and sound(recent):
            next_check = progress + 1 / checks
            row = {"step": step, "progress": progress, "tokens": seen}
            curve.append(record(trainer.plain_runner(), held_out, row, recent, begin))
            recent, kept = {}, _snapshot(trainer)
            _save(trainer, curve, out)
    row = {"step": step, "progress": 1.0, "tokens": seen}
    curve.append(record(trainer.plain_runner(), held_out, row, recent, begin))
    _save(trainer, curve, out)
    print(f"{step} steps, {seen:,} tokens, {time.monotonic() - begin:.0f} s")


def _save(trainer: TrainerV4, curve: list[dict[str, float]], out: Path) -> None:
    write_curve(curve, out / "curve.csv")
    save_checkpoint(trainer.model, out / "final")


def _tensors(trainer: TrainerV4) -> list[Tensor]:
    state = trainer.optimisers.adam.state
    moments = [t for own in state.values() for t in own.values() if isinstance(t, Tensor)]
    return [*trainer.model.state_dict().values(), *trainer.optimisers.muon.moments, *moments]


def _snapshot(trainer: TrainerV4) -> list[Tensor]:
    return [t.detach().clone() for t in _tensors(trainer)]


@torch.no_grad()
def _restore(trainer: TrainerV4, kept: list[Tensor]) -> None:
    for own, saved in zip(_tensors(trainer), kept, strict=True):
        own.copy_(saved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="compiling included")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--compile-seconds", type=float, default=150.0)
    parser.add_argument("--graph", action="store_true", help="replay steps from CUDA graphs")
    args = parser.parse_args()
    begin = time.monotonic()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.suppress_errors = True
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # captures refuse the default stream
    model = DemoV4Model(DemoV4Config()).to(device)
    streams = load_streams(args.data, device, args.seed)
    size = SMOKE_SIZE if args.smoke else SIZE
    deadline = begin + args.compile_seconds if args.compile else None
    trainer = TrainerV4(model, streams, size, deadline=deadline)
    length, most = (160, 2) if args.smoke else (1024, 8)
    held_out = held_out_rows(args.data, device, length, most)
    warm_up(trainer, graph=args.graph)
    seconds = args.minutes * 60 - (time.monotonic() - begin)
    run(trainer, held_out, seconds, args.out, checks=4 if args.smoke else 12)


if __name__ == "__main__":
    main()
