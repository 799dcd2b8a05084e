# SPDX-License-Identifier: Apache-2.0
"""What each part of the package may import: docs/design.md, section 4, as a table.

import-linter checks the order of the layers; this table also says which of the layers below a part
may name, and which libraries. Imports under TYPE_CHECKING obey it too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import NamedTuple

from tests.architecture.source_rules import Finding, Source

PROJECT = "freewheel"


class Allowed(NamedTuple):
    """Parts of the package and libraries outside it that a part may import."""

    parts: frozenset[str]
    libraries: frozenset[str]


def _allow(parts: str = "", libraries: str = "") -> Allowed:
    return Allowed(frozenset(parts.split()) | {"errors"}, frozenset(libraries.split()))


ALLOWED: dict[str, Allowed] = {
    "errors": Allowed(frozenset(), frozenset()),
    "spec": _allow(),
    "config": _allow("spec"),
    "host": _allow("spec"),
    "memory": _allow("spec config"),
    "chat": _allow("spec", "deepseek_recipe jinja2"),
    "structured": _allow("spec", "numpy outlines_core llguidance"),
    "transfer": _allow("spec", "nixl_cu12 nixl_cu13"),
    "graph": _allow("", "torch"),
    "ops": _allow("", "torch"),
    "state": _allow("spec ops", "torch"),
    "nn": _allow("spec ops state", "torch"),
    "models": _allow("spec nn state", "torch numpy safetensors"),
    "decode": _allow("spec ops state models.base", "torch"),
    "runtime": _allow(
        "spec config memory host chat graph ops state nn models decode transfer",
        "torch numpy safetensors",
    ),
    "engine": _allow("config spec host chat structured transfer runtime", "tokenizers"),
    "audit": _allow("config spec host chat graph runtime engine", "torch"),
    "bench": _allow("config spec engine", "httpx prometheus_client"),
    "simulate": _allow("config spec memory host"),
    "server": _allow(
        "config spec chat structured engine audit",
        "fastapi starlette uvicorn pydantic prometheus_client msgspec zmq opentelemetry",
    ),
    "cli": _allow("config spec chat engine audit bench simulate server", "typer rich"),
    "__init__": _allow("config spec engine audit"),
    "__main__": _allow("cli"),
    "worker": _allow("config engine cli"),
}
KERNEL_LIBRARIES = frozenset({"triton"})
# These stand above the engine, and may use the names that `freewheel` itself offers users.
USERS_OF_THE_PACKAGE = frozenset({"cli", "server", "__main__"})


def foreign_imports(source: Source) -> Iterator[Finding]:
    """Imports that the table does not allow to this file's part of the package."""
    if source.package not in ALLOWED:
        yield 1, f"{source.package} has no place in the layers"
        return
    for line, module in _absolute_imports(source):
        top, _, inside = module.partition(".")
        if top in sys.stdlib_module_names:
            continue
        if top == PROJECT:
            if not _part_is_allowed(source, inside):
                yield line, f"{source.package} may not import {module}"
        elif top not in _libraries(source):
            yield line, f"{source.package} may not import {top}"


def _libraries(source: Source) -> frozenset[str]:
    libraries = ALLOWED[source.package].libraries
    return libraries | KERNEL_LIBRARIES if _is_kernel(source) else libraries


def _is_kernel(source: Source) -> bool:
    return source.path.parts[:2] == ("ops", "cuda")


def _part_is_allowed(source: Source, inside: str) -> bool:
    if inside.startswith("ops.cuda"):
        return source.path.as_posix() == "ops/registry.py" or _is_kernel(source)
    if inside.partition(".")[0] not in ALLOWED:
        return source.package in USERS_OF_THE_PACKAGE
    permitted = ALLOWED[source.package].parts | {source.package}
    return any(inside == part or inside.startswith(f"{part}.") for part in permitted)


def _absolute_imports(source: Source) -> Iterator[Finding]:
    """`(line, module)` with relative imports resolved; names from a package count as its modules.

    `from freewheel import LLM` is `freewheel.LLM`: no part, but a name of the package itself.
    """
    package = [PROJECT, *source.path.parts[:-1]]
    for node in source.nodes():
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if _names_are_parts(module):
                for alias in node.names:
                    yield node.lineno, f"{module}.{alias.name}"
            else:
                yield node.lineno, module


def _names_are_parts(module: str) -> bool:
    """Whether the names imported from this module are to be judged one by one."""
    return module in {PROJECT, f"{PROJECT}.models", f"{PROJECT}.ops"}
