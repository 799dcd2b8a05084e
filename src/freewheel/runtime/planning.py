# SPDX-License-Identifier: Apache-2.0
"""What a mesh of cards would make of a model: bytes, tokens and the least time a round can take.

A floor, not a forecast. Every weight that a round needs is read once from memory, every key and
value that it attends to likewise, at the rates below; launches, waits and the exchange between
ranks come on top, and the latter is given apart. Nothing here was measured on many cards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freewheel.config import EngineConfig, find_model
from freewheel.errors import ConfigError
from freewheel.models.folder import read_spec
from freewheel.models.load import load_model
from freewheel.models.planned import PlannedSource
from freewheel.spec.compressed import CompressedSpec, LayerKind
from freewheel.spec.mesh import Mesh
from freewheel.spec.model import DsaSpec, ModelSpec

BANDWIDTH = 4.3e12
"""Bytes a second that an H200 reads, as measured by copies."""

FLOPS = 790e12
"""bfloat16 operations a second, dense."""

EXCHANGE = 10e-6
"""Seconds of one sum over ranks at decode sizes: assumed, from what other engines report."""

SPARE = 0.1
"""Share of a card's memory left to graphs, workspaces and the caller."""

ROW_BYTES = 2
"""Of an element of a cache in bfloat16."""


@dataclass(frozen=True)
class RoundFloor:
    """One round of `batch` requests in all: milliseconds of reading and computing, and of
    exchanges."""

    batch: int
    floor_ms: float
    exchange_ms: float


@dataclass(frozen=True)
class GpuPlan:
    """Of one card. `kv_tokens`: of history that the whole engine holds, on every card of a copy of
    the model the same.

    `request_bytes`: what a request takes besides, whatever its length. `fits`: some tokens do.
    """

    family: str
    mesh: Mesh
    context: int
    depth: int
    weight_bytes: int
    token_bytes: float
    request_bytes: int
    kv_tokens: int
    rounds: tuple[RoundFloor, ...]

    @property
    def fits(self) -> bool:
        return self.kv_tokens > 0


def plan_gpus(
    model: str,
    gpus: int,
    *,
    batches: Sequence[int],
    context: int,
    speculate: int,
    dp: int = 1,
    ep: bool = False,
    card_bytes: float = 141e9,
) -> GpuPlan:
    """Read config.json of `model` alone and plan `gpus` cards that share every layer.

    `dp`: copies of all but the experts, which share the cards evenly. Raises CheckpointError for a
    configuration that is none, ConfigError if so many cards cannot share it.
    """
    if gpus < 1:
        raise ConfigError(f"gpus: must be at least 1, got {gpus}")
    if dp < 1 or gpus % dp:
        raise ConfigError(f"dp: {dp} copies cannot share {gpus} cards evenly")
    if not batches or min(batches) < 1 or context < 1 or card_bytes <= 0:
        raise ConfigError("plan: batch, context and card memory must be positive")
    path = find_model(model, "dummy")
    spec = read_spec(path if path.is_file() else path / "config.json")
    try:
        config = EngineConfig(model=model, speculate=speculate, tp=gpus // dp, dp=dp, ep=ep)
        mesh = config.mesh(context)
        source = PlannedSource(spec, mesh)
        built, _ = load_model(spec, source, positions=context)
    except ConfigError as error:
        if not str(error).startswith("tp: "):
            raise
        why = str(error).removeprefix("tp: ")
        raise ConfigError(f"gpus: {gpus} make tp {gpus // dp}, but {why}") from error
    groups = built.cache_groups(max(64, spec.page_multiple), "bfloat16")
    token_bytes = sum(g.token_bytes for g in groups if g.retention is None)
    kept = [g for g in groups if g.retention is not None]
    request = sum((g.retention or 0) * g.token_bytes for g in kept)
    weights = sum(source.sizes.values())
    room = card_bytes * (1 - SPARE) - weights - -(-max(batches) // dp) * request
    depth = speculate if spec.mtp is not None else 0
    return GpuPlan(
        family=spec.family,
        mesh=mesh,
        context=context,
        depth=depth,
        weight_bytes=weights,
        token_bytes=token_bytes,
        request_bytes=round(request),
        kv_tokens=max(0, dp * int(room / token_bytes)),
        rounds=tuple(_floor(spec, source.sizes, mesh, b, context, depth) for b in batches),
    )


def _floor(
    spec: ModelSpec, sizes: dict[str, int], mesh: Mesh, batch: int, context: int, depth: int
) -> RoundFloor:
    """The target over `own * (1 + depth)` tokens, the draft layer over them, then its steps.

    `own`: rows of the fullest copy. Experts see the tokens of all copies.
    """
    own = -(-batch // mesh.dp)
    passes = [(False, 1 + depth)]
    if depth:
        passes += [(True, 1 + depth), *[(True, 1)] * (depth - 1)]
    seconds, layers = 0.0, 0
    for draft, width in passes:
        seconds += _weights_time(spec, sizes, draft, own * width, batch * width)
        seconds += _attention_time(spec, mesh, own, own * width, context, draft)
        layers += 1 if draft else spec.layers
    head = _head_bytes(sizes)
    seconds += (1 + depth) * head / BANDWIDTH
    # Of a copy's ranks: two sums a layer, one of the embedding, and the logits of each choice.
    within = 0 if mesh.tp == 1 else 2 * layers + len(passes) + 1 + depth
    # Between copies: tokens to their experts and back, a layer, and the letters home.
    between = 0 if mesh.dp == 1 else 2 * layers + 1
    exchange = (within + between) * EXCHANGE
    return RoundFloor(batch, 1e3 * seconds, 1e3 * exchange)


def _weights_time(
    spec: ModelSpec, sizes: dict[str, int], draft: bool, tokens: int, every: int
) -> float:
    """Seconds to read the weights of one pass, or to compute with them if that takes longer.

    `tokens` of one copy, `every` of all.
    """
    experts, chosen = _experts(spec)
    hit = 1 - (1 - chosen / experts) ** every  # of the experts, on even routing
    always = routed = 0
    for name, size in sizes.items():
        if name.startswith(spec.mtp_prefixes) != draft or _is_table(name):
            continue
        if ".experts." in name and ".shared" not in name:
            routed += size
        else:
            always += size
    # Two operations a weight and token; FP8 and MXFP4 weights have as many bytes or fewer.
    work = 2 * (tokens * always + every * routed * chosen / experts)
    return max((always + routed * hit) / BANDWIDTH, work / FLOPS)


def _attention_time(
    spec: ModelSpec, mesh: Mesh, batch: int, tokens: int, context: int, draft: bool
) -> float:
    """Seconds to read index keys once a request, and a query's keys for every query."""
    if isinstance(spec, DsaSpec):
        layers = 1 if draft else spec.layers
        full = 1 if draft else sum(spec.indexer.full_layers)
        index = full * batch * context * spec.indexer.dim
        keys = layers * tokens * min(spec.topk, context) * spec.attention.latent_width
        work = 4 * keys * spec.attention.heads / mesh.tp
        scores = 2 * full * tokens * context * spec.indexer.heads * spec.indexer.dim
    else:
        assert isinstance(spec, CompressedSpec)
        index, keys, scores = _entries_read(spec, batch, tokens, context, draft)
        work = 4 * keys * spec.attention.heads / mesh.tp
    index, scores = index / mesh.scan.count, scores / mesh.scan.count
    return max(ROW_BYTES * (index + keys) / BANDWIDTH, (work + scores) / FLOPS)


def _entries_read(
    spec: CompressedSpec, batch: int, tokens: int, context: int, draft: bool
) -> tuple[float, float, float]:
    """Elements of index entries and of keys and entries, and operations of scoring."""
    window, dim = min(spec.attention.window, context), spec.attention.head_dim
    if draft:
        return 0, tokens * window * dim, 0
    sparse, heavy = (len(spec.layers_of(k)) for k in (LayerKind.SPARSE, LayerKind.HEAVY))
    close = context // spec.compression.sparse_ratio
    far = context // spec.compression.heavy_ratio
    seen = spec.layers * window + sparse * min(spec.indexer.topk, close) + heavy * far
    index = sparse * batch * close * spec.indexer.dim
    scores = 2 * sparse * tokens * close * spec.indexer.heads * spec.indexer.dim
    return index, tokens * seen * dim, scores


def _experts(spec: ModelSpec) -> tuple[int, int]:
    """(routed experts of a layer, those that a token takes)."""
    assert isinstance(spec, DsaSpec | CompressedSpec)
    return (1, 1) if spec.moe is None else (spec.moe.experts, spec.moe.top_k)


TABLES = ("embed_tokens.weight", "embed.weight", "lm_head.weight", "head.weight", "tid2eid")


def _is_table(name: str) -> bool:
    """An embedding, of which few rows are read, or the head, which is counted apart."""
    return name.endswith(TABLES)


def _head_bytes(sizes: dict[str, int]) -> int:
    heads = (size for name, size in sizes.items() if name in ("lm_head.weight", "head.weight"))
    return next(heads, 0)
