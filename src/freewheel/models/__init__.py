# SPDX-License-Identifier: Apache-2.0
"""Model families, and the way from a folder on disk to a model in memory.

May import torch, numpy, safetensors, `freewheel.spec`, `freewheel.nn`, `freewheel.state` and
`freewheel.errors`. Families do not import one another; what they share is in `freewheel.nn`.
"""

from __future__ import annotations

from freewheel.models.base import DraftHead, Model
from freewheel.models.catalogue import Catalogue
from freewheel.models.folder import ModelFolder, open_folder
from freewheel.models.header import StoredTensor
from freewheel.models.load import (
    LoadedModel,
    LoadReport,
    has_mtp_weights,
    load_dummy,
    load_folder,
    load_model,
    open_dummy,
)
from freewheel.models.random_source import RandomSource
from freewheel.models.weights import SafetensorsSource

__all__ = [
    "Catalogue",
    "DraftHead",
    "LoadReport",
    "LoadedModel",
    "Model",
    "ModelFolder",
    "RandomSource",
    "SafetensorsSource",
    "StoredTensor",
    "has_mtp_weights",
    "load_dummy",
    "load_folder",
    "load_model",
    "open_dummy",
    "open_folder",
]
