# SPDX-License-Identifier: Apache-2.0
"""Walk the tensors of what a captured function returns, or of what a caller registers as static."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor

from freewheel.errors import CaptureError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


def leaves(tree: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of `tree` with its path (`name.field[0]`), in a fixed order.

    A tree is a tensor, None, a plain value, an `nn.Module` (its parameters and buffers), or a list,
    tuple, mapping or dataclass of trees.

    Raises:
        CaptureError: naming the path of anything else; it might hide a tensor.
    """
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, _PLAIN):
        return
    else:
        for suffix, child in _children(tree, name):
            yield from leaves(child, name + suffix)


def _children(tree: object, name: str) -> Iterable[tuple[str, object]]:
    if isinstance(tree, (list, tuple)):
        items = cast(Iterable[object], tree)
        return ((f"[{i}]", item) for i, item in enumerate(items))
    if isinstance(tree, Mapping):
        return ((f"[{key!r}]", item) for key, item in cast(Mapping[object, object], tree).items())
    if isinstance(tree, torch.nn.Module):
        owned = (*tree.named_parameters(), *tree.named_buffers())
        return ((f".{key}", tensor) for key, tensor in owned)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        keys = (f.name for f in dataclasses.fields(tree))
        return ((f".{key}", attrgetter(key)(tree)) for key in keys)
    raise CaptureError(
        f"{name} is a {type(tree).__name__}; use tensors, None, numbers, and lists, tuples, dicts "
        "or dataclasses of these"
    )


def repeated_dims(tensor: Tensor) -> list[int]:
    """Dimensions of which all elements share memory, as in `x.expand(4, 3)`.

    PyTorch refuses to write a tensor that has one; a write to its first element serves.
    """
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [dim for dim, (n, step) in enumerate(pairs) if n > 1 and step == 0]
