# SPDX-License-Identifier: Apache-2.0
"""Muon for the hidden matrices, AdamW for the rest.

Muon: momentum, then the update's singular values are pushed to 1 by a Newton-Schulz iteration
(K. Jordan et al., 2024). Matrices of one shape are updated as one batch.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Approximate nearest semi-orthogonal matrices of [n, rows, cols]."""
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return (x.mT if tall else x).to(update.dtype)


class Muon:
    def __init__(
        self, params: list[nn.Parameter], *, lr: float, momentum: float = 0.95, decay: float = 0.05
    ) -> None:
        self.lr, self.base_lr, self.momentum, self.decay = lr, lr, momentum, decay
        groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for p in params:
            groups[(p.shape[-2], p.shape[-1])].append(p)
        self.groups = list(groups.values())
        self.moments = [
            torch.cat([torch.zeros_like(_matrices(p)) for p in group]) for group in self.groups
        ]

    @torch.no_grad()
    def step(self) -> None:
        for group, moment in zip(self.groups, self.moments, strict=True):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
            grad = torch.cat([_matrices(g) for g in grads])
            moment.lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp(moment, self.momentum))
            scale = max(1.0, moment.shape[-2] / moment.shape[-1]) ** 0.5
            updates = update.split([_matrices(p).shape[0] for p in group])
            for p, u in zip(group, updates, strict=True):
                p.mul_(1 - self.lr * self.decay).add_(u.view_as(p), alpha=-self.lr * scale)


def _matrices(p: Tensor) -> Tensor:
    return p.view(-1, p.shape[-2], p.shape[-1])


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[dict[str, object]]]:
    """(matrices for Muon, AdamW groups with their `base_lr`)."""
    muon: list[nn.Parameter] = []
    tables: list[nn.Parameter] = []
    indexer: list[nn.Parameter] = []
    small: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if ".indexer." in name:
            indexer.append(p)
        elif "embed_tokens" in name or "lm_head" in name:
            tables.append(p)
        elif p.dim() < 2 or name.endswith("gate.weight"):
            small.append(p)
        else:
            muon.append(p)
    groups: list[dict[str, object]] = [
        {"params": tables, "base_lr": 4e-3, "weight_decay": 0.05},
        {"params": indexer, "base_lr": 2e-3, "weight_decay": 0.0},
        {"params": small, "base_lr": 2e-3, "weight_decay": 0.0},
    ]
    return muon, groups
