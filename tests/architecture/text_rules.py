# SPDX-License-Identifier: Apache-2.0
"""Rules about names, sizes and comments.

A file may be longer than `MAX_FILE_LINES` if a page of docs/decisions says so and why, on a line
of its own: ``Allowed length: `src/freewheel/ops/attention.py` 450 lines``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.architecture.source_rules import Finding, Rule, Source, dotted

SPDX = "# SPDX-License-Identifier: Apache-2.0"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

FORBIDDEN_WORDS = frozenset(
    {"metadata", "info", "infos", "manager", "managers", "util", "utils", "helper", "helpers", "v2"}
)
FORBIDDEN_PHRASES = (
    "forward_mode",
    "is_decode",
    "is_prefill",
    "is_verify",
    "seq_lens_cpu",
)
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+\d*|[A-Z]+\d*|\d+")

_DTYPE = r"(?:u?int(?:8|16|32|64)|bool|b?float(?:16|32|64)?|float8_\w+|floating)"
TENSOR_COMMENT = re.compile(rf"#\s*{_DTYPE}(?:\s*(?:\||/|or)\s*{_DTYPE})*\s*\[[^\]]*\]")


def licence_line(source: Source) -> Iterator[Finding]:
    if not source.lines or source.lines[0] != SPDX:
        yield 1, f"the first line must be: {SPDX}"


def postponed_annotations(source: Source) -> Iterator[Finding]:
    """Any file that defines something starts with the same import, so that order never matters."""
    body = source.tree.body
    defines = any(isinstance(n, ast.FunctionDef | ast.ClassDef | ast.AnnAssign) for n in body)
    imported = any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in body)
    if defines and not imported:
        yield 1, "from __future__ import annotations is missing"


def file_length(source: Source, allowed: Mapping[str, int] | None = None) -> Iterator[Finding]:
    permitted = allowed_lengths() if allowed is None else allowed
    limit = permitted.get(f"src/freewheel/{source.path.as_posix()}", MAX_FILE_LINES)
    if len(source.lines) > limit:
        yield limit + 1, f"{len(source.lines)} lines, {limit} allowed"


def allowed_lengths() -> dict[str, int]:
    """Limits above the usual one, as docs/decisions grants them."""
    line = re.compile(r"^Allowed length: `([^`]+)` (\d+) lines", re.MULTILINE)
    folder = Path(__file__).parents[2] / "docs" / "decisions"
    pages = [page.read_text(encoding="utf-8") for page in sorted(folder.glob("*.md"))]
    return {path: int(count) for page in pages for path, count in line.findall(page)}


def function_length(source: Source) -> Iterator[Finding]:
    for node in source.nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name}: {length} lines, {MAX_FUNCTION_LINES} allowed"


def forbidden_names(source: Source) -> Iterator[Finding]:
    """Names that say nothing, or that belong to a design with modes and host mirrors."""
    for part in source.path.parts:
        if _is_forbidden(part.removesuffix(".py")):
            yield 1, f"file or folder name: {part}"
    for node in source.nodes():
        for name, line in _names_bound(node):
            if _is_forbidden(name):
                yield line, f"name: {name}"


def _is_forbidden(name: str) -> bool:
    words = {word.lower() for word in _WORD.findall(name)}
    return bool(words & FORBIDDEN_WORDS) or any(phrase in name for phrase in FORBIDDEN_PHRASES)


def _names_bound(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a node defines; names that it only uses may belong to others."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, node.lineno
    elif isinstance(node, ast.arg):
        yield node.arg, node.lineno
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr, node.lineno
    elif isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            if alias.asname:
                yield alias.asname, node.lineno


def tensor_comments(source: Source) -> Iterator[Finding]:
    """A field that holds a tensor says its dtype and shape beside it: `# int32 [B, W]`."""
    for cls in source.nodes():
        if not (isinstance(cls, ast.ClassDef) and _is_record(cls)):
            continue
        for field in cls.body:
            if isinstance(field, ast.AnnAssign) and _holds_tensor(field.annotation):
                line = field.end_lineno or field.lineno
                if not TENSOR_COMMENT.search(source.lines[line - 1]):
                    yield field.lineno, f"{ast.unparse(field.target)} needs `# dtype [shape]`"


def _is_record(cls: ast.ClassDef) -> bool:
    decorators = [d.func if isinstance(d, ast.Call) else d for d in cls.decorator_list]
    names = [dotted(node).rpartition(".")[2] for node in [*decorators, *cls.bases]]
    return bool({"dataclass", "NamedTuple"} & set(names))


def _holds_tensor(annotation: ast.expr) -> bool:
    """Whether it is Tensor, Tensor | None, or a tuple or list of tensors."""
    if isinstance(annotation, ast.BinOp):
        return _holds_tensor(annotation.left) or _holds_tensor(annotation.right)
    if isinstance(annotation, ast.Subscript):
        if dotted(annotation.value).rpartition(".")[2] not in {"tuple", "list", "Optional"}:
            return False
        inner = annotation.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        return any(_holds_tensor(part) for part in parts)
    return dotted(annotation).rpartition(".")[2] == "Tensor"


TEXT_RULES: dict[str, Rule] = {
    "licence line first": licence_line,
    "postponed annotations": postponed_annotations,
    "file length": file_length,
    "function length": function_length,
    "no forbidden name": forbidden_names,
    "dtype and shape beside every tensor field": tensor_comments,
}
