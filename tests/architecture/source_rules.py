# SPDX-License-Identifier: Apache-2.0
"""Rules about source text that linters do not know: each reads one file and reports its faults.

A rule takes a `Source` and yields `(line, message)`; a table maps its name to it. `device_rules`
holds the rules about device values, `text_rules` those about names, sizes and comments, this file
the rest.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

Finding = tuple[int, str]


@dataclass(frozen=True)
class Source:
    """One Python file: its path below `src/freewheel` and its text."""

    path: PurePosixPath
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def package(self) -> str:
        """The first folder, or the file's own name for a module at the top."""
        return self.path.parts[0].removesuffix(".py")

    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(self.tree)


Rule = Callable[[Source], Iterator[Finding]]


def dotted(node: ast.expr) -> str:
    """`torch.ops.x` for an attribute chain on a name, else ''."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def imports(source: Source) -> Iterator[Finding]:
    """`(line, module)` of every absolute import; `from a import b` names both a and a.b."""
    for node in source.nodes():
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def references(source: Source) -> Iterator[Finding]:
    """`(line, dotted name)` of every import and of every attribute chain on a name."""
    yield from imports(source)
    for node in source.nodes():
        if isinstance(node, ast.Attribute):
            yield node.lineno, dotted(node)


def roots(source: Source) -> set[str]:
    """Names that `import X` or `import X as Y` bind to a module from outside the project."""
    return {
        alias.asname or alias.name.partition(".")[0]
        for node in source.nodes()
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.partition(".")[0] != "freewheel"
    }


def string_attributes(source: Source) -> Iterator[Finding]:
    """No protocol by attribute name on our own types; a third-party module may be probed."""
    outside = roots(source)
    for node in source.nodes():
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
            continue
        if node.func.id not in {"getattr", "hasattr", "setattr", "delattr"}:
            continue
        if dotted(node.args[0]).partition(".")[0] in outside:
            continue
        constant = len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
        if constant or node.func.id == "hasattr":
            yield node.lineno, f"{node.func.id} on one of our own types: use a typed attribute"


def global_statements(source: Source) -> Iterator[Finding]:
    for node in source.nodes():
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}: pass the value instead"


def broad_except(source: Source) -> Iterator[Finding]:
    """`except:` and `except Exception` swallow faults that have a name; so does suppress()."""
    for node in source.nodes():
        kinds: list[ast.expr] = []
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield node.lineno, "bare except: name the exception"
                continue
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("suppress"):
            kinds = node.args
        for kind in kinds:
            if dotted(kind).rpartition(".")[2] in {"Exception", "BaseException"}:
                yield kind.lineno, f"{dotted(kind)} is too broad: name the exception"


def environment_reads(source: Source) -> Iterator[Finding]:
    """The environment is read in config.py and nowhere else."""
    if source.path.as_posix() == "config.py":
        return
    banned = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
    for line, name in references(source):
        if name in banned:
            yield line, f"{name} outside config.py"


FORBIDDEN_MODULES = frozenset(
    # run code from a file
    {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    | {"jsonpickle", "torch.hub", "torch.serialization"}
    # open a connection
    | {"socket", "ssl", "urllib", "urllib3", "requests", "httpx", "aiohttp", "ftplib"}
    | {"http.client", "xmlrpc", "huggingface_hub"}
)
# `freewheel bench serve` sends requests to the address that its user gives. The admin socket is
# listened to, in the file system. Engines of a pair reach one another where they are told to.
# Nothing else may connect or listen by itself.
CONNECTING = frozenset(
    {("bench/client.py", "httpx"), ("bench/load.py", "httpx"), ("bench/scrape.py", "httpx")}
    | {("server/admin.py", "socket")}
    | {("transfer/line.py", "socket"), ("transfer/post.py", "socket")}
)
FORBIDDEN_CALLS = frozenset({"eval", "exec", "__import__"})
FORBIDDEN_ATTRIBUTES = frozenset({"torch.load", "torch.save"})
FORBIDDEN_ARGUMENTS = frozenset({"trust_remote_code", "allow_pickle"})


def _is_forbidden_module(name: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[: i + 1]) in FORBIDDEN_MODULES for i in range(len(parts)))


def unsafe_code(source: Source) -> Iterator[Finding]:
    """Nothing that runs code from a file, and nothing that opens a connection."""
    for line, name in imports(source):
        if _is_forbidden_module(name) and (str(source.path), name) not in CONNECTING:
            yield line, f"import of {name}"
    for line, name in references(source):
        if name in FORBIDDEN_ATTRIBUTES:
            yield line, name
    for node in source.nodes():
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_CALLS:
            yield node.lineno, f"{node.id}()"
        elif isinstance(node, ast.keyword | ast.arg) and node.arg in FORBIDDEN_ARGUMENTS:
            yield node.lineno, f"{node.arg} as an argument"
        elif isinstance(node, ast.Constant) and node.value in FORBIDDEN_ARGUMENTS:
            yield node.lineno, f"{node.value} as a key"


def late_imports(source: Source) -> Iterator[Finding]:
    """Imports inside functions hide the layers; only the registry may load ops.cuda late."""
    if source.path.as_posix() == "ops/registry.py":
        return
    for function in source.nodes():
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    yield node.lineno, f"import inside {function.name}()"


GENERAL_RULES: dict[str, Rule] = {
    "no attribute access by string": string_attributes,
    "no global statement": global_statements,
    "no broad except": broad_except,
    "environment only in config.py": environment_reads,
    "no unsafe code or connection": unsafe_code,
    "no import inside a function": late_imports,
}
