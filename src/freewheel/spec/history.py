# SPDX-License-Identifier: Apache-2.0
"""The cache group of models whose every layer may look at all earlier tokens."""

from __future__ import annotations

from freewheel.spec.cache import CacheField, CacheGroup
from freewheel.spec.model import DsaSpec

HISTORY = 0
"""Index of the group among a model's cache groups, hence of its page tables and write slots."""

LATENT = "latent"
INDEX_KEY = "index_key"


def history_group(spec: DsaSpec, page_size: int, dtype: str, mtp: bool) -> CacheGroup:
    """Latents of every layer, and index keys of the layers that run an indexer of their own.

    `mtp`: the multi-token-prediction layer is loaded; it has both.
    """
    extra = (spec.mtp.layer,) if mtp and spec.mtp is not None else ()
    full = tuple(i for i, runs in enumerate(spec.indexer.full_layers) if runs)
    return CacheGroup(
        name="history",
        page_size=page_size,
        stride=1,
        retention=None,
        fields=(
            CacheField(LATENT, spec.attention.latent_width, dtype, (*range(spec.layers), *extra)),
            CacheField(INDEX_KEY, spec.indexer.dim, dtype, (*full, *extra)),
        ),
    )
