# SPDX-License-Identifier: Apache-2.0
"""The beginning of sparse attention by the ops that it is made of, which have bodies here."""

from __future__ import annotations

from freewheel.ops.openings import open_latents_apart
from freewheel.ops.registry import implement

implement("block_open_latents", "cpu")(open_latents_apart)
