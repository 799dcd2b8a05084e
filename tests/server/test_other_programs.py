# SPDX-License-Identifier: Apache-2.0
"""An evaluation harness and a load generator of others complete. Run by hand where they are
installed: `pip install 'lm-eval[api]' guidellm`, then `make exhaustive`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from freewheel.config import find_model
from tests.server.running import Running

pytestmark = [pytest.mark.exhaustive]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

LIKELIHOODS = """\
task: likelihoods
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{start}}"
doc_to_choice: ends
doc_to_target: right
metric_list: [{metric: acc}]
"""


def run(program: str, *arguments: str, folder: Path) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run(
        [path, *arguments],
        cwd=folder,
        env={**os.environ, **OFFLINE},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_evaluation_by_likelihood_prefers_english(server: Running, tmp_path: Path) -> None:
    rows = [
        {"start": "Emma was", "ends": [" handsome", " xqzt"], "right": 0},
        {"start": "It was a", "ends": [" qqqzz", " very"], "right": 1},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.yaml").write_text(LIKELIHOODS.replace("ROWS", str(data)))
    arguments = (
        f"model=demo,base_url={server.url}/v1/completions,tokenizer={find_model('demo')},"
        "tokenizer_backend=huggingface,num_concurrent=2"
    )
    said = run(
        *("lm-eval", "run", "--model", "local-completions", "--model_args", arguments),
        *("--include_path", str(tmp_path), "--tasks", "likelihoods", "--output_path", "out"),
        folder=tmp_path,
    )
    (results,) = (tmp_path / "out").rglob("results*.json")
    assert json.loads(results.read_text())["results"]["likelihoods"]["acc,none"] == 1.0, said


def test_a_load_generator_completes_every_request(server: Running, tmp_path: Path) -> None:
    run(
        *("guidellm", "run", "--backend", f"kind=openai_http,target={server.url},model=demo"),
        *("--tokenizer", f"kind=hf_auto,model={find_model('demo')}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--profile", "kind=constant,rate=2", "--constraint", "kind=max_requests,count=6"),
        folder=tmp_path,
    )
    (found,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    assert len(found["requests"]["successful"]) == 6 and not found["requests"]["errored"]
