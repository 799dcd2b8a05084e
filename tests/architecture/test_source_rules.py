# SPDX-License-Identifier: Apache-2.0
"""The source of the package keeps its rules, and each rule bites on a planted fault."""

from __future__ import annotations

from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from tests.architecture.device_rules import DEVICE_RULES
from tests.architecture.source_rules import GENERAL_RULES, Rule, Source
from tests.architecture.text_rules import MAX_FILE_LINES, SPDX, TEXT_RULES, file_length

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "freewheel"
RULES: dict[str, Rule] = {**GENERAL_RULES, **DEVICE_RULES, **TEXT_RULES}


@cache
def package_sources() -> list[Source]:
    return [
        Source(PurePosixPath(path.relative_to(PACKAGE).as_posix()), path.read_text("utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def broken_rules(path: str, text: str) -> set[str]:
    source = Source(PurePosixPath(path), text)
    return {name for name, rule in RULES.items() if list(rule(source))}


@pytest.mark.parametrize("name", RULES)
def test_the_package_keeps_the_rule(name: str) -> None:
    sources = package_sources()
    assert sources, f"no Python file under {PACKAGE}"
    broken = [
        f"src/freewheel/{source.path}:{line}: {message}"
        for source in sources
        for line, message in RULES[name](source)
    ]
    assert not broken, f"{name}:\n" + "\n".join(broken)


def test_every_python_file_of_the_repository_names_its_licence() -> None:
    folders = ("src", "tests", "train", "benchmarks")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    missing = [
        str(path.relative_to(ROOT))
        for path in files
        if not path.read_text("utf-8").startswith(SPDX + "\n")
    ]
    assert not missing


HEAD = f"{SPDX}\nfrom __future__ import annotations\n"
READ = "no read of a device value"
MAILBOX = "only the mailbox reads in runtime"
HOST = "no tensor built from host data"
MASK = "no boolean-mask index"
ATTRIBUTE = "no attribute access by string"
EXCEPT = "no broad except"
ENVIRONMENT = "environment only in config.py"
UNSAFE = "no unsafe code or connection"
LATE = "no import inside a function"
NAME = "no forbidden name"
SHAPE = "dtype and shape beside every tensor field"

PLANTED = [
    (READ, "state/view.py", "n = lens.item()"),
    (READ, "nn/moe.py", "n = counts.tolist()"),
    (READ, "models/base.py", "n = lens.cpu()"),
    (READ, "decode/choose.py", "n = lens.numpy()"),
    (READ, "ops/cache.py", "n = live.nonzero()"),
    (READ, "ops/cache.py", "n = torch.nonzero(live)"),
    (READ, "ops/cache.py", "n = map(Tensor.item, lens)"),
    (READ, "nn/moe.py", "n = experts.unique()"),
    (READ, "nn/moe.py", "n = torch.unique(experts)"),
    (READ, "nn/moe.py", "n = x.masked_select(live)"),
    (READ, "nn/moe.py", 'n = x.to("cpu")'),
    (READ, "nn/moe.py", 'n = x.to(device="cpu")'),
    (MAILBOX, "runtime/executor.py", "n = lens.item()"),
    (MAILBOX, "runtime/uplink.py", "n = lens.tolist()"),
    (HOST, "state/arena.py", "x = torch.tensor([1, 2])"),
    (HOST, "state/arena.py", "x = torch.as_tensor(values)"),
    (HOST, "decode/round.py", "same = torch.equal(a, b)"),
    (HOST, "decode/round.py", "from torch import tensor"),
    (HOST, "decode/round.py", "x = torch.where(live)"),
    (MASK, "decode/round.py", "x = tokens[tokens > 0]"),
    (MASK, "decode/round.py", "tokens[:, ~live] = 0"),
    (MASK, "decode/round.py", "x = tokens[live & (a > b)]"),
    (MASK, "decode/round.py", "x = tokens[live_mask]"),
    (ATTRIBUTE, "engine.py", 'x = getattr(model, "layers", None)'),
    (ATTRIBUTE, "engine.py", "x = hasattr(model, name)"),
    (ATTRIBUTE, "engine.py", 'setattr(model, "layers", 3)'),
    ("no global statement", "engine.py", "def f():\n    global x\n    x = 1"),
    (EXCEPT, "engine.py", "try:\n    f()\nexcept:\n    pass"),
    (EXCEPT, "engine.py", "try:\n    f()\nexcept Exception:\n    pass"),
    (EXCEPT, "engine.py", "try:\n    f()\nexcept (OSError, BaseException):\n    pass"),
    (EXCEPT, "engine.py", "with contextlib.suppress(Exception):\n    f()"),
    (ENVIRONMENT, "engine.py", 'x = os.environ["HOME"]'),
    (ENVIRONMENT, "engine.py", 'x = os.getenv("HOME")'),
    (ENVIRONMENT, "engine.py", "from os import environ"),
    (UNSAFE, "models/weights.py", "import pickle"),
    (UNSAFE, "models/weights.py", "from dill import loads"),
    (UNSAFE, "models/weights.py", "import urllib.request"),
    (UNSAFE, "server/app.py", "import httpx"),
    (UNSAFE, "bench/client.py", "import requests"),
    (UNSAFE, "models/weights.py", "from http import client"),
    (UNSAFE, "models/weights.py", "import socket"),
    (UNSAFE, "models/weights.py", "import requests"),
    (UNSAFE, "models/weights.py", "from torch import load"),
    (UNSAFE, "models/weights.py", "x = torch.load(path)"),
    (UNSAFE, "models/weights.py", "x = eval(text)"),
    (UNSAFE, "models/weights.py", "exec(text)"),
    (UNSAFE, "models/weights.py", "x = load(path, trust_remote_code=True)"),
    (UNSAFE, "models/weights.py", "def load(path, trust_remote_code=False): ..."),
    (UNSAFE, "models/weights.py", 'x = options["trust_remote_code"]'),
    (LATE, "engine.py", "def f():\n    import json"),
    (LATE, "ops/attention.py", "def f():\n    from freewheel.ops import cuda"),
    (NAME, "engine.py", "attention_metadata = 1"),
    (NAME, "engine.py", "class BatchInfo: ..."),
    (NAME, "engine.py", "class PageManager: ..."),
    (NAME, "host/utils.py", "x = 1"),
    (NAME, "engine.py", "def page_helper(): ..."),
    (NAME, "engine.py", "def draft_v2(): ..."),
    (NAME, "engine.py", "def f(forward_mode): ..."),
    (NAME, "engine.py", "self.is_decode = True"),
    (NAME, "engine.py", "import numpy as np_utils"),
    (NAME, "engine.py", "max_seq_lens_cpu = 1"),
    (SHAPE, "state/view.py", "@dataclass(frozen=True)\nclass V:\n    x: Tensor"),
    (SHAPE, "state/view.py", "@dataclass\nclass V:\n    x: torch.Tensor | None  # [B, W]"),
    (SHAPE, "state/view.py", "class V(NamedTuple):\n    x: Tensor  # int32"),
    (SHAPE, "state/view.py", "class V(NamedTuple):\n    x: tuple[Tensor, ...]"),
    ("file length", "engine.py", "x = 1\n" * (MAX_FILE_LINES + 1)),
    ("function length", "engine.py", "def f():\n" + "    x = 1\n" * 60),
]


@pytest.mark.parametrize(("rule", "path", "body"), PLANTED)
def test_a_planted_fault_is_reported_by_its_rule_alone(rule: str, path: str, body: str) -> None:
    assert broken_rules(path, HEAD + body) == {rule}


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("licence line first", "from __future__ import annotations\nx: int = 1\n"),
        ("postponed annotations", f"{SPDX}\ndef f() -> int: ...\n"),
    ],
)
def test_a_file_with_the_wrong_head_is_reported(rule: str, text: str) -> None:
    assert broken_rules("engine.py", text) == {rule}


def test_every_rule_has_a_planted_fault() -> None:
    planted = {rule for rule, _, _ in PLANTED}
    assert planted | {"licence line first", "postponed annotations"} == set(RULES)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("ops/cpu/attention.py", "n = lens.tolist()"),
        ("runtime/mailbox.py", "n = letter.tolist()"),
        ("host/scheduler.py", "n = letter.item()"),
        ("config.py", "import os\nx = os.environ"),
        ("ops/registry.py", "def f():\n    from freewheel.ops import cuda"),
        ("decode/round.py", "x = torch.where(live, a, b)"),
        ("decode/round.py", "x = tokens[rows[:, None], place]"),
        ("decode/round.py", 'x = q.to(torch.float32).masked_fill(~mask, float("-inf"))'),
        ("models/weights.py", "model.eval()\nprint(file.metadata())"),
        ("ops/attention.py", 'import torch\nx = hasattr(torch.ops, "freewheel")'),
        ("engine.py", "for field in fields(self):\n    x = getattr(self, field.name)"),
        ("engine.py", "import logging\nlogging.info('loaded')\nimport sys\nx = sys.version_info"),
        ("engine.py", "deepseek_v32 = information = 1"),
        ("engine.py", "def f():\n" + "    x = 1\n" * 59),
        ("state/view.py", "class V(NamedTuple):\n    x: Tensor  # int32 [B, W] scratch at 0"),
        ("state/view.py", "@dataclass\nclass V:\n    x: Callable[[Tensor], Tensor]\n    y: int"),
    ],
)
def test_what_the_rules_allow_is_not_reported(path: str, body: str) -> None:
    assert broken_rules(path, HEAD + body) == set()


def test_a_file_may_be_longer_only_as_far_as_a_decision_says() -> None:
    source = Source(PurePosixPath("ops/attention.py"), "x = 1\n" * 450)
    assert not list(file_length(source, {"src/freewheel/ops/attention.py": 450}))
    assert list(file_length(source, {"src/freewheel/ops/attention.py": 449}))
    assert list(file_length(source, {"src/freewheel/ops/cache.py": 450}))
