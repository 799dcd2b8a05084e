# SPDX-License-Identifier: Apache-2.0
"""The parts that models are made of: small frozen classes that hold tensors and call ops.

May import torch, `freewheel.spec`, `freewheel.ops`, `freewheel.state` and `freewheel.errors`. A
part's `load` asks a WeightSource for each of its tensors by checkpoint name, so the loading code
is the table of names. A part never reads a device value and never keeps one between steps.
"""

from __future__ import annotations

from freewheel.nn.decoder import DecoderLayer, load_decoder_layer
from freewheel.nn.hyper import HyperHead, load_hyper_head, spread
from freewheel.nn.linear import (
    Embedding,
    Head,
    Linear,
    TokenHead,
    TokenTable,
    load_embedding,
    load_head,
    load_linear,
)
from freewheel.nn.mtp import MtpLayer, load_mtp_layer
from freewheel.nn.norm_rope import Norm, load_norm, load_wide_norm, rope_table
from freewheel.nn.sight import whole_sight
from freewheel.nn.source import WeightSource, held_tensors, wide_dtype
from freewheel.nn.stream_layer import RopeTables, StreamLayer, load_stream_layer
from freewheel.nn.stream_mtp import StreamMtp, load_stream_mtp
from freewheel.spec.entry_groups import entry_groups
from freewheel.spec.history import HISTORY, history_group

__all__ = [
    "HISTORY",
    "DecoderLayer",
    "Embedding",
    "Head",
    "HyperHead",
    "Linear",
    "MtpLayer",
    "Norm",
    "RopeTables",
    "StreamLayer",
    "StreamMtp",
    "TokenHead",
    "TokenTable",
    "WeightSource",
    "entry_groups",
    "held_tensors",
    "history_group",
    "load_decoder_layer",
    "load_embedding",
    "load_head",
    "load_hyper_head",
    "load_linear",
    "load_mtp_layer",
    "load_norm",
    "load_stream_layer",
    "load_stream_mtp",
    "load_wide_norm",
    "rope_table",
    "spread",
    "whole_sight",
    "wide_dtype",
]
