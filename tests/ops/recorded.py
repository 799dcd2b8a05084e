# SPDX-License-Identifier: Apache-2.0
"""What the ops of a running model were called with, and whether a body agrees on such inputs.

Recording runs on the CPU, with the CPU bodies; the calls then serve bodies of any device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6}
"""Of the largest value of a result: what `sparse_mla` and `index_logits` state."""

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


def written(name: str) -> tuple[int, ...]:
    """Which arguments the op writes."""
    arguments = torch.ops.freewheel.__getattr__(name).default._schema.arguments
    return tuple(i for i, argument in enumerate(arguments) if argument.is_write)


class Recording(DispatchMode):
    """Keeps copies of the first, second, fourth, eighth, .. call of each op at each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._counts: Counter[tuple[object, ...]] = Counter()

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
                self.calls.append(call.map(lambda _, a: a.clone()))
        return func(*args, **kwargs)


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


def _undefined(call: Call, result: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`result` with zeros where the op's contract leaves it open."""
    for place, index in enumerate(written(call.name)):
        del index
        result[place][0] = 0  # row 0 and page 0 are scratch
    if call.name == "index_logits":
        lens, skip = call.args[5], call.args[6]
        scores = result[0]
        beyond = torch.arange(scores.shape[-1], device=lens.device) >= lens[..., None]
        scores.masked_fill_(beyond | (lens <= skip)[..., None], 0)
    return result


def outcome(call: Call, body: Callable[..., Any]) -> tuple[Tensor, ...]:
    """What `body` wrote, then what it returned; zeros where the contract leaves it open."""
    own = written(call.name)
    args = call.map(lambda i, a: a.clone() if i in own else a).args
    returned = body(*args)
    results = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    return _undefined(call, tuple(one.clone() for one in (*(args[i] for i in own), *results)))


def faults(calls: tuple[Call, ...], device: str) -> list[str]:
    """What is wrong with the bodies for `device`, of which the calls must reach a dozen."""
    own = [call for call in calls if (call.name, device) in IMPLEMENTATIONS]
    assert len({call.name for call in own}) >= 12
    found = ((call, fault(call, device)) for call in own)
    return [f"{call.name}: {why}" for call, why in found if why is not None]


def fault(call: Call, device: str) -> str | None:
    """How the body for `device` departs from the specification on `call`; None if it does not.

    Numbers that are not floats must be the same; floats stay within `BOUNDS` of the specification
    in float64, or of that in their own dtype where the op also gives picks, which rounding moves.
    """
    call = call.map(lambda _, a: a.to(device))
    found = outcome(call, IMPLEMENTATIONS[call.name, device])
    specification = SPECIFICATIONS[call.name]
    expected = outcome(call, specification)
    picks = any(not one.is_floating_point() for one in expected)
    wide = call.map(lambda _, a: a.double() if a.dtype in PLAIN else a)
    exact = expected if picks else outcome(wide, specification)
    for place, (own, same, best) in enumerate(zip(found, expected, exact, strict=True)):
        if own.dtype not in BOUNDS:
            if not torch.equal(own, same):
                return f"result {place}: {int((own != same).sum())} of {own.numel()} differ"
            continue
        if not torch.equal(own.isfinite(), best.isfinite()):
            return f"result {place}: other values are finite"
        live = best.isfinite()
        away = (own[live].double() - best[live].double()).abs()
        if not away.numel():
            continue
        bound = BOUNDS[own.dtype] * float(best[live].abs().max()) + TINY
        if float(away.max()) > bound:
            return f"result {place}: {float(away.max()):.3g} away where {bound:.3g} is allowed"
    return None
