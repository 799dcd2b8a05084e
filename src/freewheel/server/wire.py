# SPDX-License-Identifier: Apache-2.0
"""What the HTTP process and the engine process say to one another: msgpack, never pickle."""

from __future__ import annotations

from msgspec import Struct, field
from msgspec.msgpack import Decoder, Encoder

from freewheel.engine import Load, Logprobs, RoundTimes
from freewheel.spec import Handoff, SamplingParams

UNFIT = 3
"""Exit code of an engine process that could not start and has said why: see `Unfit`."""


class Submit(Struct, tag=True):
    """A request of token ids. `id` is the HTTP process's own and never used twice."""

    id: str
    prompt: list[int]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
    shows: bool = False
    handoff: Handoff | None = None


class Abort(Struct, tag=True):
    """Requests that nobody waits for any more."""

    ids: list[str]


class Flush(Struct, tag=True):
    """Forget what the prefix cache holds."""


class Loading(Struct, tag=True):
    """Bytes of weights read, of bytes in all."""

    done: int
    total: int


class Ready(Struct, tag=True):
    """Everything is loaded and every graph made. `drafter` is "none" without drafts. `kv_port`:
    where other engines ask for computed prompts; 0 where they do not."""

    context_len: int
    depth: int
    device: str
    graph: str
    dtype: str
    drafter: str
    seconds: float
    load: Load
    kv_port: int = 0


class Unfit(Struct, tag=True):
    """The engine cannot start, and would not the next time either. `misled`: by an option or by the
    model's folder."""

    message: str
    misled: bool = False


class Refused(Struct, tag=True):
    """A request cannot be served. `field` is the parameter to blame."""

    id: str
    field: str
    message: str


class Step(Struct, tag=True, omit_defaults=True):
    """What one letter brought one request; see `freewheel.engine.TokenStep`."""

    id: str
    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    finish: str | None = None
    queued_seconds: float | None = None
    cached_tokens: int | None = None
    cached_host_tokens: int = 0
    cached_disk_tokens: int = 0
    logprobs: tuple[Logprobs, ...] | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    picks: tuple[tuple[int, ...], ...] | None = None
    fault: str = ""


class Progress(Struct, tag=True):
    """Steps since the last one. Sent at least once a second, so silence means a fault.

    `turn`: the engine's turns so far. `begun` and `aborted`: the turn before which these requests'
    orders were obeyed, since the last report.
    """

    steps: list[Step]
    rounds: list[RoundTimes]
    load: Load
    turn: int = 0
    begun: dict[str, int] = field(default_factory=dict[str, int])
    aborted: dict[str, int] = field(default_factory=dict[str, int])


Order = Submit | Abort | Flush
Report = Loading | Ready | Unfit | Refused | Progress

encode = Encoder().encode
decode_order = Decoder(Order).decode
decode_report = Decoder(Report).decode
