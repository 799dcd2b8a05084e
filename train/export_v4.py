# SPDX-License-Identifier: Apache-2.0
"""Write the second demo's folder in DeepSeek's layout, and read one back.

python export_v4.py --untrained --tokenizer FILE --out DIR
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from export import generation_config, write_manifest
from model_v4 import DemoV4Config, DemoV4Model

WIDE = ("attn_sink", "ape", "gate.bias", "_fn", "_base", "_scale")
"""Tensors that DeepSeek stores in float32."""

_STACKED = (".ffn.experts.w1", ".ffn.experts.w2", ".ffn.experts.w3")


def hf_config(c: DemoV4Config) -> dict[str, object]:
    """The `config.json` of a DeepSeek-V4 checkpoint, readable by transformers too."""
    fixed: dict[str, object] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "num_key_value_heads": 1,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": c.yarn_factor,
            "original_max_position_embeddings": c.yarn_original,
            "type": "yarn",
        },
        "scoring_func": "sqrtsoftplus",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    own = {k: v for k, v in c.as_dict().items() if not k.startswith("yarn_")}
    merged = {**fixed, **own, "compress_ratios": list(c.compress_ratios)}
    head = {k: merged.pop(k) for k in ("architectures", "model_type")}
    return {**head, **dict(sorted(merged.items()))}


def hf_tensors(model: DemoV4Model) -> dict[str, Tensor]:
    """Checkpoint tensors by DeepSeek's names: bf16, but float32 where DeepSeek has it."""
    out: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        value = tensor.detach().cpu()
        if name.endswith(_STACKED):
            prefix, kind = name.rsplit(".", 1)
            for e, expert in enumerate(value):
                out[f"{prefix}.{e}.{kind}.weight"] = expert.bfloat16().contiguous()
        elif name.endswith("tid2eid"):
            out[name] = value.contiguous()
        else:
            wide = name.endswith(WIDE)
            out[name] = (value.float() if wide else value.bfloat16()).contiguous()
    return dict(sorted(out.items()))


def save_checkpoint(model: DemoV4Model, folder: Path) -> None:
    """Weights and configs; the tokenizer and the card are written by others."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hf_tensors(model), str(folder / "model.safetensors"), metadata={"format": "pt"})
    for name, value in (
        ("config.json", hf_config(model.c)),
        ("generation_config.json", generation_config()),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def load_checkpoint(folder: Path) -> DemoV4Model:
    """The model in float32 with exactly the values of the file."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    scaling = fields["rope_scaling"]
    own = {k: v for k, v in fields.items() if k in DemoV4Config().as_dict()}
    own |= {
        "compress_ratios": tuple(fields["compress_ratios"]),
        "yarn_factor": scaling["factor"],
        "yarn_original": scaling["original_max_position_embeddings"],
    }
    model = DemoV4Model(DemoV4Config(**own))
    tensors = load_file(str(folder / "model.safetensors"))
    state: dict[str, Tensor] = {}
    for name, want in model.state_dict().items():
        if name.endswith(_STACKED):
            prefix, kind = name.rsplit(".", 1)
            experts = [tensors.pop(f"{prefix}.{e}.{kind}.weight") for e in range(want.shape[0])]
            state[name] = torch.stack(experts).float()
        else:
            stored = tensors.pop(name)
            state[name] = stored.float() if stored.is_floating_point() else stored
    if tensors:
        raise ValueError(f"tensors without a place in the model: {sorted(tensors)}")
    model.load_state_dict(state)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--untrained", action="store_true", required=True)
    parser.add_argument("--tokenizer", type=Path, help="a folder with the tokenizer's files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    save_checkpoint(DemoV4Model(DemoV4Config()), args.out)
    if args.tokenizer is not None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(args.tokenizer / name, args.out / name)
    write_manifest(args.out)


if __name__ == "__main__":
    main()
