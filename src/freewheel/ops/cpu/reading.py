# SPDX-License-Identifier: Apache-2.0
"""Projections and what reads them by the ops that they are made of, which have bodies here."""

from __future__ import annotations

from freewheel.ops.reading import add_norm_apart, wide_route_apart, wide_route_best_apart
from freewheel.ops.registry import implement

implement("block_add_rms_norm", "cpu")(add_norm_apart)
implement("wide_route", "cpu")(wide_route_apart)
implement("wide_route_best", "cpu")(wide_route_best_apart)
