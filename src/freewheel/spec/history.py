# SPDX-License-Identifier: Apache-2.0
"""The cache group of models whose every layer may look at all earlier tokens."""

from __future__ import annotations

from freewheel.spec.cache import CacheGroup
from freewheel.spec.model import DsaSpec
from freewheel.spec.storage import RowStorage

HISTORY = 0
"""Index of the group among a model's cache groups, hence of its page tables and write slots."""

LATENT = "latent"
INDEX_KEY = "index_key"


def history_group(spec: DsaSpec, page_size: int, storage: RowStorage, mtp: bool) -> CacheGroup:
    """Latents of every layer, and index keys of the layers that run an indexer of their own.

    `mtp`: the multi-token-prediction layer is loaded; it has both.
    """
    extra = (spec.mtp.layer,) if mtp and spec.mtp is not None else ()
    own = spec.attention
    full = tuple(i for i, runs in enumerate(spec.indexer.full_layers) if runs)
    return CacheGroup(
        name="history",
        page_size=page_size,
        stride=1,
        retention=None,
        fields=(
            storage.latents(LATENT, own.kv_lora_rank, own.rope_dim, (*range(spec.layers), *extra)),
            storage.index_keys(INDEX_KEY, spec.indexer.dim, (*full, *extra)),
        ),
    )
