# SPDX-License-Identifier: Apache-2.0
"""The same model in the transformers library, with every weight at a value that matters."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
)

from tests.fixtures.closed_form import Config

CLASSES: dict[str, tuple[Callable[..., Any], Callable[..., PreTrainedModel]]] = {
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "deepseek_v4": (DeepseekV4Config, DeepseekV4ForCausalLM),
    "glm_moe_dsa": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
}


class LowestPositionTies(TorchFunctionMode):
    """torch.topk that prefers the lowest index among equals, as our contract says.

    Scores of an indexer are often exactly 0 (relu), and torch promises no order among equals.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        values, indices = args[0].sort(dim=-1, descending=True, stable=True)
        count = kwargs["k"] if "k" in kwargs else args[1]
        return torch.return_types.topk((values[..., :count], indices[..., :count]))


class Oracle:
    """A transformers model of `config`, seeded, in float32."""

    def __init__(self, config: Config, seed: int) -> None:
        make_config, make_model = CLASSES[config["model_type"]]
        own = deepcopy(config)  # transformers writes into the settings that it is given
        self.model = make_model(make_config(**own)).eval()
        state = self.model.state_dict()
        for name, tensor in state.items():
            if name.endswith("tid2eid"):
                tensor.copy_(_experts(name, tensor.shape, config["n_routed_experts"], seed))
            else:
                tensor.copy_(_value(name, tensor.shape, seed))

    def save(self, folder: Path) -> Path:
        """As `save_pretrained` writes it."""
        self.model.save_pretrained(folder)
        return folder

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """float32 [len(tokens), V]."""
        with LowestPositionTies():
            return self.model(torch.tensor([list(tokens)])).logits[0]

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow, each from a forward over everything before it."""
        known = list(tokens)
        for _ in range(count):
            known.append(int(self.logits(known)[-1].argmax()))
        return known[len(tokens) :]


def _experts(name: str, shape: torch.Size, experts: int, seed: int) -> Tensor:
    """int64 [V, top_k]: different experts for each token."""
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
    return torch.rand((shape[0], experts), generator=generator).argsort(-1)[:, : shape[1]]


def _value(name: str, shape: torch.Size, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return values * 0.3 + (0.0 if "bias" in name else 1.0)
    return values * 1.5 / shape[-1] ** 0.5
