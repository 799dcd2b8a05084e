# SPDX-License-Identifier: Apache-2.0
"""Plain data that both the host and the device side speak: shapes, plans, cache groups, requests.

May import the standard library and `freewheel.errors`. Must never import torch or numpy.
"""

from __future__ import annotations

from freewheel.spec.adjustments import Adjustments, Form, Grammar, HostGrammar
from freewheel.spec.cache import CacheField, CacheGroup
from freewheel.spec.compressed import (
    ClampedMoeSpec,
    CompressedSpec,
    CompressionSpec,
    EntryIndexerSpec,
    HyperSpec,
    LayerKind,
    SharedKvSpec,
)
from freewheel.spec.handoff import Handoff, Piece, WireSettings
from freewheel.spec.model import (
    AttentionSpec,
    DsaSpec,
    IndexerSpec,
    ModelSpec,
    MoeSpec,
    MtpSpec,
    RopeSpec,
    YarnSpec,
)
from freewheel.spec.model_config import read_model_spec
from freewheel.spec.plan import (
    Admission,
    Feed,
    MaskWrite,
    PageCopy,
    PageWrite,
    RowResult,
    StepPlan,
    StepResult,
    TableWrite,
    TokenScore,
    feed_bound,
    page_writes_bound,
)
from freewheel.spec.sampling import FinishReason, SamplingParams
from freewheel.spec.shape import (
    MAX_DEPTH,
    MAX_LAG,
    MAX_VERIFY_WIDTH,
    TABLES,
    ShapeLadder,
    StepShape,
)
from freewheel.spec.transfer import BlockCopy, SlotPlan, Transfer, TransferResult, Way
from freewheel.spec.violation import Violation

__all__ = [
    "MAX_DEPTH",
    "MAX_LAG",
    "MAX_VERIFY_WIDTH",
    "TABLES",
    "Adjustments",
    "Admission",
    "AttentionSpec",
    "BlockCopy",
    "CacheField",
    "CacheGroup",
    "ClampedMoeSpec",
    "CompressedSpec",
    "CompressionSpec",
    "DsaSpec",
    "EntryIndexerSpec",
    "Feed",
    "FinishReason",
    "Form",
    "Grammar",
    "Handoff",
    "HostGrammar",
    "HyperSpec",
    "IndexerSpec",
    "LayerKind",
    "MaskWrite",
    "ModelSpec",
    "MoeSpec",
    "MtpSpec",
    "PageCopy",
    "PageWrite",
    "Piece",
    "RopeSpec",
    "RowResult",
    "SamplingParams",
    "ShapeLadder",
    "SharedKvSpec",
    "SlotPlan",
    "StepPlan",
    "StepResult",
    "StepShape",
    "TableWrite",
    "TokenScore",
    "Transfer",
    "TransferResult",
    "Violation",
    "Way",
    "WireSettings",
    "YarnSpec",
    "feed_bound",
    "page_writes_bound",
    "read_model_spec",
]
