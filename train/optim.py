# SPDX-License-Identifier: Apache-2.0
"""Muon for the hidden matrices, AdamW for the rest.

Muon: momentum, then the update's singular values are pushed to 1 by a Newton-Schulz iteration
(K. Jordan et al., 2024). Matrices of one shape are updated as one batch.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

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
        self.base_lr, self.momentum, self.decay = lr, momentum, decay
        self.lr = torch.tensor(lr, device=params[0].device)  # a tensor: graphs replay with it
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
            updates = (update * (-scale * self.lr)).split([_matrices(p).shape[0] for p in group])
            for p, u in zip(group, updates, strict=True):
                p.mul_(1 - self.lr * self.decay).add_(u.view_as(p))


def split_parameters(
    model: nn.Module, tables: tuple[str, ...], fine: tuple[str, ...]
) -> tuple[list[nn.Parameter], list[dict[str, object]]]:
    """(matrices for Muon, AdamW groups with their `base_lr`).

    `tables`: parts of the names of embedding and head; `fine`: endings of other matrices that
    AdamW takes.
    """
    muon: list[nn.Parameter] = []
    wide: list[nn.Parameter] = []
    indexer: list[nn.Parameter] = []
    small: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if ".indexer." in name:
            indexer.append(p)
        elif any(part in name for part in tables):
            wide.append(p)
        elif p.dim() < 2 or name.endswith(fine):
            small.append(p)
        else:
            muon.append(p)
    groups: list[dict[str, object]] = [
        {"params": wide, "base_lr": 4e-3, "weight_decay": 0.05},
        {"params": indexer, "base_lr": 2e-3, "weight_decay": 0.0},
        {"params": small, "base_lr": 2e-3, "weight_decay": 0.0},
    ]
    return muon, groups


class Optimisers:
    """Muon and AdamW under one schedule. Rates are tensors, so that a CUDA graph replays them."""

    def __init__(
        self, muon: list[nn.Parameter], groups: list[dict[str, Any]], peak_lr: float
    ) -> None:
        device = muon[0].device
        self.muon = Muon(muon, lr=peak_lr)
        rates = [torch.tensor(g["base_lr"], device=device) for g in groups]
        self.adam = torch.optim.AdamW(
            [{**g, "lr": rate} for g, rate in zip(groups, rates, strict=True)],
            betas=(0.9, 0.95),
            fused=True,
            capturable=device.type == "cuda",
        )

    def set_factor(self, factor: float) -> None:
        """Rates from here on, as a share of their peaks."""
        self.muon.lr.fill_(self.muon.base_lr * factor)
        for group in self.adam.param_groups:
            group["lr"].fill_(group["base_lr"] * factor)

    def step(self) -> None:
        self.muon.step()
        self.adam.step()


def _matrices(p: Tensor) -> Tensor:
    return p.view(-1, p.shape[-2], p.shape[-1])
