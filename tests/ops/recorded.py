# SPDX-License-Identifier: Apache-2.0
"""What the ops of a running model were called with, and whether a body agrees on such inputs.

Recording runs on the CPU, with the CPU bodies; the calls then serve bodies of any device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from freewheel import LLM, SamplingParams
from freewheel.engine import convert
from freewheel.graph.dispatch import DispatchMode, OpOverload
from freewheel.ops import IMPLEMENTATIONS, SPECIFICATIONS
from tests.ops.near_codes import TILES, moves

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6}
"""Of the largest value of a result: what `sparse_mla` and `index_logits` state."""

ROUGHER = {"outlier": 8}
"""Scores a thousand times as large have as much less behind the point, which a softmax shows."""

TINY = 2.0**-120
"""Below this a device may flush to zero."""

BATCH = 2
"""Rows of a recorded batch: caches and weights have more of whatever they count first."""

PLAIN = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Call:
    """One call. `args`: every argument of the schema; what the op writes is as it was before."""

    name: str
    args: tuple[Any, ...]

    @property
    def shape(self) -> tuple[object, ...]:
        return (self.name, *(a.shape if isinstance(a, Tensor) else repr(a) for a in self.args))

    @property
    def width(self) -> int:
        """Queries of a row; 1 for what has no rectangle of them."""
        of_batch = (a for a in self.args if isinstance(a, Tensor) and 0 < a.shape[0] <= BATCH)
        return max((a.shape[1] for a in of_batch if a.dim() > 2), default=1)

    def map(self, change: Callable[[int, Tensor], Tensor]) -> Call:
        own = enumerate(self.args)
        return Call(self.name, tuple(change(i, a) if isinstance(a, Tensor) else a for i, a in own))


def _schema(name: str) -> Any:
    """The op's arguments."""
    return torch.ops.freewheel.__getattr__(name).default._schema.arguments


def written(name: str) -> tuple[int, ...]:
    """Which arguments the op writes."""
    return tuple(i for i, argument in enumerate(_schema(name)) if argument.is_write)


class Recording(DispatchMode):
    """Keeps copies of the first, second, fourth, eighth, .. call of each op at each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._counts: Counter[tuple[object, ...]] = Counter()
        self._copies: dict[tuple[object, ...], Tensor] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "freewheel":
            name = func._schema.name.split("::")[1]
            rest = func._schema.arguments[len(args) :]
            every = (*args, *(kwargs.get(one.name, one.default_value) for one in rest))
            call = Call(name, every)
            self._counts[call.shape] += 1
            if self._counts[call.shape].bit_count() == 1:
                self.calls.append(call.map(self._copy))
        return func(*args, **kwargs)

    def _copy(self, _: int, values: Tensor) -> Tensor:
        """One copy serves for as long as a place holds the same, as weights do."""
        place = (values.data_ptr(), values.shape, values.stride(), values.dtype)
        last = self._copies.get(place)
        if last is None or not torch.equal(last, values):
            last = self._copies[place] = values.clone()
        return last


def record(model: str, dtype: str, rows: str = "auto") -> tuple[Call, ...]:
    """The ops of a few rounds of two requests, one of which asks for everything.

    `rows`: the caches' precision.
    """
    llm = LLM(
        model, device="cpu", dtype=dtype, kv_cache_dtype=rows, speculate=3, max_batch=BATCH,
        context_len=256, chunk=32, max_grammars=1, cache_bytes=48 << 20,
    )  # fmt: skip
    plain = SamplingParams(max_tokens=12)
    rich = SamplingParams(
        max_tokens=12, temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, seed=3, logprobs=2,
        presence_penalty=0.5, repetition_penalty=1.1, logit_bias={5: 1.0},
    )  # fmt: skip
    prompts = [[(7 * i + 3) % 500 + 1 for i in range(length)] for length in (150, 23)]
    with Recording() as recording:
        llm.generate(prompts, [plain, rich])
    return tuple(recording.calls)


@cache
def recorded(model: str, dtype: str) -> tuple[Call, ...]:
    """`record` of a model that ships with the project: plain weights and caches."""
    return record(model, dtype)


@cache
def recorded_packed(model: str, to: str) -> tuple[Call, ...]:
    """`record` of that model with weights in `to` and caches in FP8."""
    with TemporaryDirectory() as folder:
        convert(model, Path(folder) / "packed", to)
        return record(str(Path(folder) / "packed"), "bfloat16", "fp8")


def equal(values: Tensor) -> Tensor:
    return torch.full_like(values, 0.5)


def zeros(values: Tensor) -> Tensor:
    return torch.zeros_like(values)


def one_hot(values: Tensor) -> Tensor:
    """Of every vector one number is 1, each time at the next place."""
    flat = torch.zeros_like(values).view(-1, values.shape[-1])
    lines = torch.arange(flat.shape[0], device=values.device)
    flat[lines, lines % flat.shape[1]] = 1
    return flat.view_as(values)


def denormal(values: Tensor) -> Tensor:
    """Numbers of float32 that have no normal exponent, or none at all."""
    return values * 1e-40


def outlier(values: Tensor) -> Tensor:
    """One number of every vector is a thousand times what it was."""
    grown = values.clone()
    grown[..., values.shape[-1] // 3] *= 1000
    return grown


KINDS = {kind.__name__: kind for kind in (equal, zeros, one_hot, denormal, outlier)}
"""What activations may look like at their worst."""


def twisted(call: Call, kind: str) -> Call:
    """`call` with every vector of its batch changed; weights, caches and columns stay."""

    def of_the_batch(index: int, values: Tensor) -> bool:
        few = values.dim() > 2 and values.shape[0] <= BATCH
        return few and values.dtype in PLAIN and index not in written(call.name)

    return call.map(lambda i, a: KINDS[kind](a) if of_the_batch(i, a) else a)


def shapes(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """The last call of each op at each shape of rounds, of which a prompt's pieces are no part."""
    rounds = (call for call in calls if call.width <= 4)
    return tuple({call.shape: call for call in rounds}.values())


def _argument(call: Call, name: str) -> Any:
    """By its name in the schema; None if the op has none."""
    names = [one.name for one in _schema(call.name)]
    return call.args[names.index(name)] if name in names else None


def _unread(call: Call) -> Tensor | None:
    """bool [B, ...]: places of results that nobody reads, so that contracts leave them open.

    Row 0 is scratch, and queries behind a row's live ones stand at position 0.
    """
    rows, positions = _argument(call, "rows"), _argument(call, "positions")
    dead = None if rows is None or rows.dim() != 1 else rows == 0  # bool [B]
    if call.name not in ("adjust", "constrain", "guide"):
        return dead
    behind = (positions == 0) & (torch.arange(positions.shape[1], device=positions.device) > 0)
    return behind if dead is None else behind | dead[:, None]


def _read(call: Call, results: list[Tensor]) -> list[Tensor]:
    """`results` with zeros in place of what nobody reads; log-probabilities apart from ids."""
    count, unread = sum(call.args[i] is not None for i in written(call.name)), _unread(call)
    for one in results[:count]:
        one[0] = 0  # row 0 and page 0 are scratch
    for one in results[count:]:
        if unread is not None and one.shape[: unread.dim()] == unread.shape:
            one[unread] = 0
    if call.name == "index_logits":
        lens, skip = _argument(call, "kv_lens"), _argument(call, "skip")
        beyond = torch.arange(results[0].shape[-1], device=lens.device) >= lens[..., None]
        results[0].masked_fill_(beyond | (lens <= skip)[..., None], 0)
    if call.name == "score":
        top = _argument(call, "top")
        own, ids, others = results[0].split([1, top, top], -1)
        floats = torch.cat((own, others), -1).contiguous().view(torch.float32)
        return [ids, floats]
    return results


def outcome(call: Call, body: Callable[..., Any]) -> list[Tensor]:
    """What `body` wrote, then what it returned; zeros where the contract leaves it open."""
    own = written(call.name)
    args = call.map(lambda i, a: a.clone() if i in own else a).args
    returned = body(*args)
    results = returned if isinstance(returned, tuple) else (returned,)
    every = [one for one in (*(args[i] for i in own), *results) if one is not None]
    return _read(call, [one.clone() for one in every])


def faults(calls: Iterable[Call], body: str, device: str, rougher: float = 1) -> list[str]:
    """What is wrong with the bodies for `body` on `device`, of which calls must reach a dozen."""
    own = [call for call in calls if (call.name, body) in IMPLEMENTATIONS]
    assert len({call.name for call in own}) >= 12
    found = ((call, fault(call, body, device, rougher)) for call in own)
    return [f"{call.name}: {why}" for call, why in found if why is not None]


def fault(call: Call, body: str, device: str, rougher: float = 1) -> str | None:
    """How the body for `body` departs from the specification on `call`; None if it does not.

    Numbers that are not floats must be the same, but for those of a cache in FP8; floats stay
    within `BOUNDS`, of the coarsest dtype among arguments and result, `rougher` times as wide, of
    the specification in float64, or of that in their own dtype where the op also gives picks, which
    rounding moves.
    """
    call = call.map(lambda _, a: a.to(device))
    found = outcome(call, IMPLEMENTATIONS[call.name, body])
    specification = SPECIFICATIONS[call.name]
    expected = outcome(call, specification)
    picks = any(not one.is_floating_point() for one in expected)
    wide = call.map(lambda _, a: a.double() if a.dtype in PLAIN else a)
    exact = expected if picks else outcome(wide, specification)
    given = [a for a in call.args if isinstance(a, Tensor)]
    coarsest = rougher * max(BOUNDS.get(a.dtype, 0.0) for a in (*given, *found))
    for place, (own, same, best) in enumerate(zip(found, expected, exact, strict=True)):
        if own.dtype in BOUNDS:
            why = _departs(own, best, coarsest)
        elif _holds_codes(own):
            why = moves(own, same)
        else:
            why = _differs(own, same)
        if why is not None:
            return f"result {place}: {why}"
    return None


def _differs(own: Tensor, same: Tensor) -> str | None:
    if torch.equal(own, same):
        return None
    return f"{int((own != same).sum())} of {own.numel()} differ"


def _holds_codes(values: Tensor) -> bool:
    """It is a cache of rows in FP8."""
    return values.dtype == torch.uint8 and values.dim() == 3 and values.shape[2] in TILES


def _departs(own: Tensor, best: Tensor, share: float) -> str | None:
    """By more than `share` of the largest value."""
    live = best.isfinite()
    if not torch.equal(own.isfinite(), live):
        return "other values are finite"
    away = (own[live].double() - best[live].double()).abs()
    bound = share * float(best[live].abs().max()) + TINY if live.any() else 0.0
    if not away.numel() or float(away.max()) <= bound:
        return None
    return f"{float(away.max()):.3g} away where {bound:.3g} is allowed"
