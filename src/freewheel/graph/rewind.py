# SPDX-License-Identifier: Apache-2.0
"""Run a function, then undo what it wrote: capturing on a GPU executes nothing, nor may it here."""

from __future__ import annotations

from typing import Any

import torch

from freewheel.graph.dispatch import (
    Args,
    DispatchMode,
    OpOverload,
    StorageSet,
    storage_key,
    tensors_in,
    written_tensors,
)

__all__ = ["Rewind"]


class Rewind(DispatchMode):
    """A context that puts back, on leaving, every older storage and generator that changed inside.

    A storage is saved when it is first written, as the operator's schema declares; storages made
    inside (`made`) are left alone. Of the default generators only the CPU's is put back. If the
    function is `harmless`, nothing is saved: a cache may be too large to copy.
    """

    def __init__(self, *, harmless: bool = False) -> None:
        super().__init__()
        self._harmless = harmless
        self.made = StorageSet()
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []

    def __enter__(self) -> Rewind:
        self._note_generator(torch.default_generator)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # pyright: ignore[reportUnknownMemberType]
        for storage, before in self._saved.values():
            if before.nbytes() < storage.nbytes():  # `out=` grew it
                before.resize_(storage.nbytes())
            storage.copy_(before)
        for generator, state in self._generators:
            generator.set_state(state)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Args = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in written_tensors(func, args, kwargs):
            self._note_storage(tensor)
        if isinstance(kwargs.get("generator"), torch.Generator):
            self._note_generator(kwargs["generator"])
        given = {storage_key(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            if storage_key(tensor) not in given:
                self.made.add(tensor)
        return out

    def _note_storage(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if not self._harmless and key not in self._saved and tensor not in self.made:
            storage = tensor.untyped_storage()
            self._saved[key] = (storage, storage.clone())

    def _note_generator(self, generator: torch.Generator) -> None:
        if not self._harmless and all(known is not generator for known, _ in self._generators):
            self._generators.append((generator, generator.get_state()))
