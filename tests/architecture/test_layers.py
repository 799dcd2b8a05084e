# SPDX-License-Identifier: Apache-2.0
"""The layers hold, and each contract and each row of the table bites on a planted import."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath

import pytest

from tests.architecture.layer_rules import ALLOWED, foreign_imports
from tests.architecture.source_rules import Source
from tests.architecture.test_source_rules import package_sources

ROOT = Path(__file__).parents[2]
LINT = "import sys; from importlinter.cli import lint_imports_command as c; sys.exit(c())"


def run_contracts(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter on `folder/src` with `folder/pyproject.toml`."""
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache", "--no-logo", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


def contracts() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    return [contract["id"] for contract in settings["tool"]["importlinter"]["contracts"]]


def test_the_package_keeps_its_import_contracts() -> None:
    result = run_contracts(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


PLANTED_IMPORTS = {
    "pages-between-engines": ("engine", "nixl_cu12"),
    "layers": ("state", "freewheel.runtime"),
    "host-without-tensors": ("host", "torch"),
    "ops-and-graph-alone": ("graph", "freewheel.spec"),
    "tensor-layers": ("nn", "freewheel.config"),
    "models-through-nn": ("models", "freewheel.ops"),
    "families": ("models/glm5", "freewheel.models.deepseek_v32"),
    "decode-any-model": ("decode", "freewheel.nn"),
    "engine-through-runtime": ("engine", "freewheel.state"),
    "surfaces-through-engine": ("cli", "freewheel.runtime"),
    "kernels-behind-registry": ("nn", "freewheel.ops.cuda"),
    "http": ("engine", "zmq"),
    "traces": ("server", "opentelemetry"),
    "http-clients": ("engine", "httpx"),
    "terminal": ("host", "rich"),
    "grammars": ("engine", "outlines_core"),
    "followed-grammars": ("engine", "llguidance"),
    "rendering": ("server", "jinja2"),
}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The package's source and settings in a folder of its own, to plant faults in."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("checkpoints", "__pycache__")
    )
    return tmp_path


@pytest.mark.parametrize("contract", contracts())
def test_a_planted_import_breaks_its_contract(contract: str, copied: Path) -> None:
    part, module = PLANTED_IMPORTS[contract]
    base = copied / "src" / "freewheel" / part
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    file.write_text(f"{file.read_text('utf-8')}\nimport {module}\n", "utf-8")
    result = run_contracts(copied, "--contract", contract)
    assert result.returncode == 1
    assert "0 kept, 1 broken" in result.stdout, result.stdout + result.stderr


def test_each_part_imports_only_what_the_design_allows() -> None:
    foreign = [
        f"src/freewheel/{source.path}:{line}: {message}"
        for source in package_sources()
        for line, message in foreign_imports(source)
    ]
    assert not foreign, "\n".join(foreign)


def findings(path: str, text: str) -> list[tuple[int, str]]:
    return list(foreign_imports(Source(PurePosixPath(path), text)))


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("spec/model.py", "import torch"),
        ("host/pages.py", "import numpy as np"),
        ("host/pages.py", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("ops/attention.py", "from freewheel.spec import ModelSpec"),
        ("ops/attention.py", "from ..spec import ModelSpec"),
        ("ops/attention.py", "import triton"),
        ("graph/tape.py", "from freewheel.state.view import StepView"),
        ("nn/moe.py", "from freewheel.ops.cuda import moe"),
        ("ops/attention.py", "from freewheel.ops import cuda"),
        ("ops/attention.py", "from . import cuda"),
        ("models/base.py", "from freewheel.ops import attention"),
        ("decode/chain.py", "from freewheel.models.glm5 import Glm5"),
        ("decode/chain.py", "from freewheel.models import glm5"),
        ("state/view.py", "from freewheel import LLM"),
        ("engine.py", "import rich"),
        ("engine.py", "import freewheel"),
        ("cli.py", "from freewheel.runtime.executor import Executor"),
        ("cli.py", "from freewheel import runtime"),
        ("kernels/attention.py", "import torch"),
    ],
)
def test_a_planted_import_is_reported(path: str, statement: str) -> None:
    assert findings(path, statement)


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("spec/model.py", "from dataclasses import dataclass\nfrom freewheel.errors import E"),
        ("spec/model.py", "from freewheel import errors\nfrom .shape import StepShape"),
        ("ops/registry.py", "from freewheel.ops import cuda"),
        ("ops/cuda/attention.py", "import triton.language as tl\nfrom . import common"),
        ("decode/chain.py", "from freewheel.models.base import Model"),
        ("decode/chain.py", "from freewheel.models import base"),
        ("decode/chain.py", "from freewheel.ops import open_step"),
        ("cli.py", "import typer\nfrom freewheel.engine import LLM"),
        ("cli/app.py", "from freewheel import LLM, __version__"),
    ],
)
def test_an_allowed_import_is_not_reported(path: str, statement: str) -> None:
    assert not findings(path, statement)


def test_no_part_may_import_a_part_that_may_import_it() -> None:
    for part, allowed in ALLOWED.items():
        for below in allowed.parts:
            names = ALLOWED[below.partition(".")[0]].parts
            assert part not in names, f"{part} and {below} may import one another"
