# SPDX-License-Identifier: Apache-2.0
"""Rules about device values: the code of a round may not read one, nor build one from host data.

The guard in `freewheel.graph` sees every read that runs; these rules see those that no test runs.
Kernel bodies for the CPU alone (`ops/cpu/`) are exempt: there host and device are one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.source_rules import Finding, Rule, Source, dotted, references

ROUND_PACKAGES = frozenset({"state", "nn", "models", "decode", "ops"})
READS = frozenset({"item", "tolist", "cpu", "numpy", "nonzero"})
# Their results have a shape that depends on values, or they need a host list or a host answer.
VALUE_SHAPED = frozenset({"masked_select", "unique", "unique_consecutive", "argwhere", "bincount"})
HOST_BUILT = frozenset({"tensor", "as_tensor", "asarray", "from_numpy", "equal", "allclose"})
MASK_NAME = re.compile(r"(^|_)masks?$")


def is_round_code(source: Source) -> bool:
    """Whether the file may run inside a round."""
    return source.package in ROUND_PACKAGES and not source.path.as_posix().startswith("ops/cpu/")


def device_reads(source: Source) -> Iterator[Finding]:
    """No read of a device value in the packages of which a round is made."""
    if is_round_code(source):
        yield from _reads(source, READS | VALUE_SHAPED)


def runtime_reads(source: Source) -> Iterator[Finding]:
    """In runtime/, only the mailbox turns a device value into a host value."""
    if source.package == "runtime" and source.path.as_posix() != "runtime/mailbox.py":
        yield from _reads(source, READS)


def _reads(source: Source, banned: frozenset[str]) -> Iterator[Finding]:
    for node in source.nodes():
        if isinstance(node, ast.Attribute) and node.attr in banned:
            yield node.lineno, f".{node.attr} reads a device value"
        if isinstance(node, ast.Call) and dotted(node.func).endswith(".to"):
            for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if isinstance(value, ast.Constant) and value.value == "cpu":
                    yield node.lineno, '.to("cpu") reads a device value'


def host_built_tensors(source: Source) -> Iterator[Finding]:
    """No tensor from a Python list and no comparison that answers on the host."""
    if not is_round_code(source):
        return
    banned = {f"torch.{name}" for name in HOST_BUILT}
    for line, name in references(source):
        if name in banned:
            yield line, f"{name} needs the host"
    for node in source.nodes():
        if not (isinstance(node, ast.Call) and dotted(node.func) == "torch.where"):
            continue
        if len(node.args) + len(node.keywords) == 1:
            yield node.lineno, "torch.where with one argument has a value-dependent shape"


def boolean_masks(source: Source) -> Iterator[Finding]:
    """`x[mask]` has a value-dependent shape: use torch.where or masked_fill."""
    if not is_round_code(source):
        return
    for node in source.nodes():
        if isinstance(node, ast.Subscript):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if any(_looks_boolean(part) for part in parts):
                yield node.lineno, f"index by a boolean mask: {ast.unparse(node)}"


def _looks_boolean(part: ast.expr) -> bool:
    if isinstance(part, ast.Compare):
        return True
    if isinstance(part, ast.UnaryOp):
        return isinstance(part.op, ast.Invert | ast.Not)
    if isinstance(part, ast.BinOp) and isinstance(part.op, ast.BitAnd | ast.BitOr):
        return _looks_boolean(part.left) or _looks_boolean(part.right)
    return bool(MASK_NAME.search(dotted(part).rpartition(".")[2]))


DEVICE_RULES: dict[str, Rule] = {
    "no read of a device value": device_reads,
    "only the mailbox reads in runtime": runtime_reads,
    "no tensor built from host data": host_built_tensors,
    "no boolean-mask index": boolean_masks,
}
