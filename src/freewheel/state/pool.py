# SPDX-License-Identifier: Apache-2.0
"""The paged caches: one tensor for each field of each group."""

from __future__ import annotations

import torch
from torch import Tensor

from freewheel.spec.cache import CacheField, CacheGroup
from freewheel.state.arena import Arena

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}


class CachePool:
    """Pages of every group. Page 0 of each group is scratch: padding queries write there."""

    def __init__(
        self, arena: Arena, groups: tuple[CacheGroup, ...], pages: tuple[int, ...]
    ) -> None:
        """`pages[g]`: pages of group g, scratch included."""
        self.groups = groups
        self.pages = pages
        self._layers: dict[tuple[str, int], Tensor] = {}
        self._stored: dict[str, list[Tensor]] = {group.name: [] for group in groups}
        self._fields = {field.name: field for group in groups for field in group.fields}
        for group, count in zip(groups, pages, strict=True):
            for field in group.fields:
                stored = arena.new_undefined(
                    f"cache.{group.name}.{field.name}",
                    (len(field.layers), count, group.page_rows, field.width),
                    DTYPES[field.dtype],
                )  # dtype [layers, pages, page_rows, width]
                self._stored[group.name].append(stored)
                for index, layer in enumerate(field.layers):
                    self._layers[field.name, layer] = stored[index]

    def field(self, name: str) -> CacheField:
        """How rows of that name are stored. Raises KeyError if there are none."""
        return self._fields[name]

    def stored(self, group: str) -> tuple[Tensor, ...]:
        """Of each of the group's fields: dtype [layers, pages, page_rows, width].

        Raises KeyError if there is no such group.
        """
        return tuple(self._stored[group])

    def layer(self, field: str, layer: int) -> Tensor:
        """`field` of model layer `layer`: dtype [pages, page_rows, width].

        Raises KeyError if that layer stores no such field.
        """
        return self._layers[field, layer]
