# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint folder in Hugging Face layout, and read one back.

python export.py --untrained --tokenizer DIR --out DIR
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import DemoConfig, DemoModel

FP32_SUFFIX = "e_score_correction_bias"
_STACKED = (".mlp.experts.gate_proj", ".mlp.experts.up_proj", ".mlp.experts.down_proj")


def hf_config(c: DemoConfig) -> dict[str, object]:
    """The `config.json` of a DeepSeek-V3.2 checkpoint."""
    fixed: dict[str, object] = {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "hidden_act": "silu",
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": c.num_attention_heads,
        "rope_scaling": None,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    merged = {**fixed, **c.as_dict()}
    head = {k: merged.pop(k) for k in ("architectures", "model_type")}
    return {**head, **dict(sorted(merged.items()))}


def generation_config() -> dict[str, object]:
    return {
        "bos_token_id": 0,
        "do_sample": True,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "temperature": 0.6,
        "top_p": 0.95,
    }


def hf_tensors(model: DemoModel) -> dict[str, Tensor]:
    """Checkpoint tensors by DeepSeek's names: bf16, the routing bias float32."""
    out: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        value = tensor.detach().cpu()
        if name.endswith(_STACKED):
            prefix, kind = name.rsplit(".", 1)
            for e, expert in enumerate(value):
                out[f"{prefix}.{e}.{kind}.weight"] = expert.bfloat16().contiguous()
        elif name.endswith(FP32_SUFFIX):
            out[name] = value.float()
        else:
            out[name] = value.bfloat16().contiguous()
    return dict(sorted(out.items()))


def save_checkpoint(model: DemoModel, folder: Path) -> None:
    """Weights and configs; the tokenizer and the card are written by others."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hf_tensors(model), str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_json(folder / "config.json", hf_config(model.c))
    _write_json(folder / "generation_config.json", generation_config())


def load_checkpoint(folder: Path) -> DemoModel:
    """The model in float32 with exactly the values of the file."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    known = DemoConfig().as_dict()
    model = DemoModel(DemoConfig(**{k: v for k, v in fields.items() if k in known}))
    tensors = load_file(str(folder / "model.safetensors"))
    state: dict[str, Tensor] = {}
    for name, want in model.state_dict().items():
        if name.endswith(_STACKED):
            prefix, kind = name.rsplit(".", 1)
            experts = [tensors.pop(f"{prefix}.{e}.{kind}.weight") for e in range(want.shape[0])]
            state[name] = torch.stack(experts).float()
        else:
            state[name] = tensors.pop(name).float()
    if tensors:
        raise ValueError(f"tensors without a place in the model: {sorted(tensors)}")
    model.load_state_dict(state)
    return model.eval()


def write_manifest(folder: Path) -> None:
    """SHA256SUMS over every other file, in the format of `sha256sum`."""
    names = sorted(p.name for p in folder.iterdir() if p.is_file() and p.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--untrained", action="store_true", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    save_checkpoint(DemoModel(DemoConfig()), args.out)
    write_manifest(args.out)


if __name__ == "__main__":
    main()
