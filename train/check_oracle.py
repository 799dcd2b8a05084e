# SPDX-License-Identifier: Apache-2.0
"""Compare a checkpoint in this trainer's model with transformers, in float32 on the CPU.

    python check_oracle.py CHECKPOINT

Exits 1 if a logit differs by more than 1e-4. Needs transformers >= 5.24.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import DeepseekV32ForCausalLM
from transformers.utils import logging

from attend import Runner, same_topk
from export import load_checkpoint

LENGTHS = (1, 5, 63, 64, 65, 200, 600)
TEXT = Path(__file__).with_name("README.md")


@torch.no_grad()
def compare(oracle: DeepseekV32ForCausalLM, runner: Runner, ids: torch.Tensor) -> float:
    """Largest absolute logit difference over one row of tokens."""
    sparsity = same_topk(runner.model.c.index_topk, 1, ids.device)
    ours = runner.logits(runner.trunk(ids, sparsity))
    return (ours - oracle(ids).logits).abs().max().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    text_ids = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids
    logging.set_verbosity_error()  # it reports the MTP layer, which it does not have
    oracle = DeepseekV32ForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).eval()
    runner = Runner(load_checkpoint(args.checkpoint))
    worst = 0.0
    for length in LENGTHS:
        for ids in (text_ids[:length], torch.randint(16, 1024, (length,)).tolist()):
            error = compare(oracle, runner, torch.tensor([ids]))
            print(f"length {length:4d}: max |logit difference| {error:.2e}")
            worst = max(worst, error)
    return int(worst > 1e-4)


if __name__ == "__main__":
    raise SystemExit(main())
