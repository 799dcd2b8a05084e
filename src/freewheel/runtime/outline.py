# SPDX-License-Identifier: Apache-2.0
"""What each graph of an engine would hold, from headers alone: the round, traced without memory."""

from __future__ import annotations

from collections import Counter

import torch

from freewheel.config import Decisions, EngineConfig
from freewheel.decode import Round
from freewheel.graph import calls_on_meta
from freewheel.memory import plan_memory
from freewheel.runtime.build import (
    find_folder,
    make_drafter,
    plan_groups,
    resolve_device,
    resolve_drafter,
    resolve_dtype,
    sketch,
)
from freewheel.runtime.mailbox import outbox_shape
from freewheel.spec.shape import StepShape
from freewheel.state import Arena, CachePool, InboxLayout, SequenceState


def outline(config: EngineConfig) -> dict[StepShape, Counter[str]]:
    """Shape -> operator calls of its round by name, views not counted, in the order of capture.

    An operator of this package is one call, whatever kernels its body takes on a device. Raises
    what `build` raises before it loads.
    """
    decisions = Decisions()
    folder = find_folder(config)
    drafter = resolve_drafter(config, folder, decisions)
    dtype = resolve_dtype(config, resolve_device(config, decisions), decisions)
    found = sketch(config, folder, drafter, dtype)
    groups = plan_groups(config, folder.spec, found.model, dtype, decisions)
    sizes = plan_memory(config, groups, folder.spec.max_positions, decisions)
    arena = Arena("meta")
    state = SequenceState.build(arena, sizes.rows, sizes.row_width, groups)
    cache = CachePool(arena, groups, sizes.pages)
    round_ = Round(state, cache, found.model, make_drafter(drafter, found.draft_head))

    def calls(shape: StepShape) -> Counter[str]:
        words = InboxLayout.of(shape, groups, sizes.row_width, state.vocabulary).words
        inbox = torch.empty(words, dtype=torch.int32, device="meta")  # int32 [words]
        outbox = torch.empty(outbox_shape(shape), dtype=torch.int32, device="meta")
        return calls_on_meta(lambda: round_.advance(shape, inbox, outbox))

    return {shape: calls(shape) for shape in config.ladder().shapes()}
