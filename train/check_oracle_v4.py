# SPDX-License-Identifier: Apache-2.0
"""Compare the second demo in this trainer's model with transformers, in float32 on the CPU.

    python check_oracle_v4.py CHECKPOINT

Exits 1 if a logit differs by more than 1e-4. Needs transformers >= 5.24.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import DeepseekV4ForCausalLM
from transformers.utils import logging

from attend import same_topk
from attend_v4 import RunnerV4
from export_v4 import load_checkpoint

LENGTHS = (1, 3, 4, 5, 63, 127, 128, 129, 200, 300, 600)


class LowestFirst(TorchFunctionMode):
    """torch.topk that prefers the lowest index: many scores are exactly 0."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        values, indices = args[0].sort(dim=-1, descending=True, stable=True)
        count = kwargs["k"] if "k" in kwargs else args[1]
        return torch.return_types.topk((values[..., :count], indices[..., :count]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    logging.set_verbosity_error()
    oracle = DeepseekV4ForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).eval()
    runner = RunnerV4(load_checkpoint(args.checkpoint))
    sparsity = same_topk(runner.c.index_topk, 1, torch.device("cpu"))
    worst = 0.0
    with torch.no_grad(), LowestFirst():
        for length in LENGTHS:
            ids = torch.randint(16, runner.c.vocab_size, (1, length))
            ours = runner.logits(runner.hidden(runner.trunk(ids, sparsity)))
            error = (ours - oracle(ids).logits).abs().max().item()
            print(f"length {length:4d}: max |logit difference| {error:.2e}")
            worst = max(worst, error)
    return int(worst > 1e-4)


if __name__ == "__main__":
    raise SystemExit(main())
