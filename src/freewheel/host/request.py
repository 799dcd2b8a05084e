# SPDX-License-Identifier: Apache-2.0
"""A request as the host sees it: what was asked, what has come home, where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from freewheel.errors import RequestError
from freewheel.host.guide import Guide
from freewheel.host.tenancy import Tenancy
from freewheel.spec import (
    Adjustments,
    Admission,
    FinishReason,
    Grammar,
    MaskWrite,
    RowResult,
    SamplingParams,
    TokenScore,
)
from freewheel.spec.sampling import MAX_STOP_IDS
from freewheel.spec.shape import ADJUSTS, ECHOES, REPORTS


class RequestState(StrEnum):
    """Where a request stands. A preempted request is waiting again."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass
class RequestStats:
    """Counted from collected letters. `dropped`: tokens of letters that came after the end of the
    tenancy that they belonged to. `cached_tokens`: prompt tokens whose pages were found when the
    request was first admitted; of these `host_tokens` came from host memory, and `disk_tokens` from
    files. `violations`: those that a canary found when the output had `violated_at` tokens, the
    latest time. `first_token_time` is whatever clock the caller of `collect` reads."""

    prefill_rounds: int = 0
    decode_rounds: int = 0
    drafted: int = 0
    agreed: int = 0
    preemptions: int = 0
    dropped: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    violations: int = 0
    violated_at: int = -1
    first_token_round: int | None = None
    first_token_time: float | None = None

    def found(self, start: int, fetched: tuple[int, int], filed: Sequence[int], size: int) -> None:
        """Its first `start` tokens need not be computed; `size`: of a block."""
        self.cached_tokens = start
        self.disk_tokens = sum(max(0, min(at + size, start) - at) for at in filed)
        first, last = fetched
        self.host_tokens = max(0, min(last, start) - first) - self.disk_tokens

    def count(self, row: RowResult, prompt: bool, round_id: int, now: float | None) -> None:
        """Add what a letter says of the request's row. `prompt`: it was a prompt round."""
        self.prefill_rounds += prompt
        self.decode_rounds += not prompt
        self.drafted += row.drafted
        self.agreed += row.agreed
        if row.tokens and self.first_token_round is None:
            self.first_token_round, self.first_token_time = round_id, now

    @property
    def rounds(self) -> int:
        """Rounds that worked on this request, those of a preempted tenancy included."""
        return self.prefill_rounds + self.decode_rounds


@dataclass(eq=False)
class Request:
    """One prompt and its continuation.

    `seed` is resolved (`params.seed`, or one drawn by the caller). `stop_ids` are the ids that
    end the request on the device: the model's own, unless ignored, and `params.stop_token_ids`.
    `adjustments`: what `params` asks to change about logits, in token ids; None if nothing.
    `grammar_base`: where its grammar's table lies, once it has a place. `scores`: one for each of
    `output`, `echo`: for each prompt token but the first; if asked for.
    `guide` follows its grammar where no table does.
    Only requests with the same `cache_salt` find each other's pages. `block_keys` and
    `block_endings` are kept by `PrefixCache.keys`. `priority`: the lower goes first. `tenant`: who
    asks; tenants share the engine evenly. `overdue`: those of better priority have passed it often
    enough, and it is served before them; `shielded`: it once was, and is not preempted for their
    sake.
    `shows`: it is asked which keys its last prompt token picks; `picks`: the answer.
    `fetched`: the stretch of its tokens whose pages came from host memory since it began to wait;
    None: none were sent for; `filed`: where in it the blocks begin that came from files.
    `fault`: why it ended with an error, where more is known than that its logits held NaN or
    nothing was left to choose. Raises RequestError if the stop ids exceed
    MAX_STOP_IDS.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    context_len: int
    stop_ids: tuple[int, ...] = ()
    adjustments: Adjustments | None = None
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
    guide: Guide | None = None
    shows: bool = False
    output: list[int] = field(default_factory=list[int])
    scores: list[TokenScore] = field(default_factory=list[TokenScore])
    echo: list[TokenScore] = field(default_factory=list[TokenScore])
    picks: tuple[tuple[int, ...], ...] = ()
    grammar_base: int = 0
    finish: FinishReason | None = None
    fault: str = ""
    tenancy: Tenancy | None = None
    turn: int = -1  # the lower, the longer it has not been served
    arrival: int = -1  # the lower, the earlier it came
    overdue: bool = False
    shielded: bool = False
    fetched: tuple[int, int] | None = None
    filed: tuple[int, ...] = ()
    lifted: bool = False  # blocks were sent for from files since it began to wait
    stats: RequestStats = field(default_factory=RequestStats)
    block_keys: list[bytes] = field(default_factory=list[bytes])
    block_endings: list[bytes] = field(default_factory=list[bytes])

    def __post_init__(self) -> None:
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                "stop_token_ids",
                f"with the model's own, {len(self.stop_ids)} ids end this request; at most "
                f"{MAX_STOP_IDS} fit",
            )

    def check(self, context_len: int) -> None:
        """Raises RequestError unless the prompt and a token of answer fit `context_len` tokens."""
        prompt, room = len(self.prompt), context_len - 1
        if not prompt:
            raise RequestError("prompt", "is empty; it needs at least one token")
        if prompt > room:
            raise RequestError(
                "prompt",
                f"has {prompt} tokens; at most {room} fit a context of {context_len} with one "
                f"token of answer",
            )
        if self.limit > context_len:
            raise RequestError("context_len", f"{self.context_len} exceeds {context_len}")

    @property
    def limit(self) -> int:
        """Tokens, prompt included, at which the request ends: max_tokens or the context's end."""
        if self.params.max_tokens is None:
            return self.context_len
        return min(len(self.prompt) + self.params.max_tokens, self.context_len)

    @property
    def minimum(self) -> int:
        """Tokens, prompt included, before which no stop id may be chosen."""
        return min(len(self.prompt) + self.params.min_tokens, self.limit)

    def extras(self, prompt: bool) -> int:
        """What a round must do for it besides choosing (`StepShape.extras`)."""
        if prompt and self.params.prompt_logprobs is not None and not self.echoed:
            return ECHOES
        if self.params.logprobs is not None:
            return REPORTS
        return ADJUSTS if self.adjustments is not None else 0

    @property
    def echoed(self) -> bool:
        """Every prompt token but the first has its score, or nobody asked for them."""
        return self.params.prompt_logprobs is None or len(self.echo) >= len(self.prompt) - 1

    def take(self, row: RowResult, start: int | None) -> None:
        """Add what a letter brings. `start`: the first position of a prompt's rectangle."""
        self.output.extend(row.tokens)
        if self.params.logprobs is not None:
            self.scores.extend(row.scores)
        if self.shows:
            self.picks = row.picks or self.picks
        if start is not None and not self.echoed:
            # computed anew after a preemption, positions come twice; the first scores stay
            fresh = row.echo[max(len(self.echo) - start, 0) :]
            self.echo.extend(fresh[: len(self.prompt) - 1 - len(self.echo)])

    @property
    def form(self) -> str | None:
        """Where its answer is held to a form: on the "device" or the "host"; None for no form."""
        if self.guide is not None:
            return "host"
        return None if self.grammar is None else "device"

    @property
    def guided_from(self) -> int | None:
        """Output tokens before its host-followed grammar begins; None: it has not begun."""
        assert self.adjustments is not None
        trigger = self.adjustments.trigger
        if trigger < 0:
            return 0
        return self.output.index(trigger) + 1 if trigger in self.output else None

    def follow(self) -> None:
        """Ask its guide, if there is one, for the mask behind the output so far."""
        if self.guide is not None and (begun := self.guided_from) is not None:
            self.guide.follow(self.output[begun:])

    @property
    def guided(self) -> bool:
        """Its next token waits for a mask: its guide's grammar has begun."""
        return self.guide is not None and self.guided_from is not None

    def mask(self) -> MaskWrite | None:
        """The mask for the token behind the output so far. None: not there, or not needed."""
        bits = self.guide.mask() if self.guide is not None and self.guided else None
        return None if bits is None else MaskWrite(self.known, bits)

    @property
    def held(self) -> bool:
        """It waits for a mask, or for letters behind which one is made: rounds leave it out."""
        if not self.guided:
            return False
        pending = self.tenancy is not None and self.tenancy.pending > 0
        return pending or self.mask() is None

    @property
    def grammar(self) -> Grammar | None:
        return None if self.adjustments is None else self.adjustments.grammar

    @property
    def known(self) -> int:
        """Tokens that the host is certain of: the prompt and the output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def reusable(self) -> int:
        """Its first tokens that rounds need not pass over: none where each one's score is asked
        for; those of the prompt where a grammar's state follows the output from its first token.
        """
        if self.params.prompt_logprobs is not None:
            return 0
        followed = self.adjustments is not None and self.adjustments.constrains
        return len(self.prompt) if followed else self.known

    @property
    def state(self) -> RequestState:
        if self.finish is not None:
            return RequestState.FINISHED
        if self.tenancy is None:
            return RequestState.WAITING
        return RequestState.PREFILLING if self.tenancy.prefilling else RequestState.DECODING

    @property
    def row(self) -> int | None:
        """The row it occupies, or None."""
        return None if self.tenancy is None else self.tenancy.row

    @property
    def preempted(self) -> bool:
        """It has lost a row, and may have one again."""
        return self.stats.preemptions > 0

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Of running requests, the one of the highest rank loses its pages first: by priority, then
        the youngest."""
        return (not self.shielded, 0 if self.shielded else self.priority, self.arrival)

    @property
    def lower(self) -> int:
        """`computed` as of the last letter; 0 without a row."""
        return 0 if self.tenancy is None else self.tenancy.lower

    @property
    def upper(self) -> int:
        """The most that `computed` can be once all rounds in flight have run."""
        return 0 if self.tenancy is None else self.tenancy.upper

    @property
    def pages(self) -> tuple[tuple[int, ...], ...]:
        """The pages it holds in each group, in the order of their columns."""
        return () if self.tenancy is None else tuple(tuple(s.pages) for s in self.tenancy.spans)

    @property
    def finishing(self) -> bool:
        """Rounds in flight are certain to bring it to its limit, if nothing ends it before."""
        return self.tenancy is not None and self.known + self.tenancy.owed >= self.limit

    @property
    def decodes(self) -> bool:
        """Its prompt is launched, and another round may bring it tokens."""
        tenancy = self.tenancy
        if tenancy is None or tenancy.lower + tenancy.pending < tenancy.known:
            return False
        return len(self.prompt) + len(self.output) + tenancy.owed < tenancy.limit

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Certain tokens at positions `start` to `stop` (cut at `known`)."""
        border = len(self.prompt)
        if stop <= border:
            return self.prompt[start:stop]
        output = self.output[max(start - border, 0) : max(stop - border, 0)]
        return (*self.prompt[start:stop], *output)

    def admission(self) -> Admission:
        """The values that its row starts from."""
        adjustments = self.adjustments
        if adjustments is not None and adjustments.grammar is not None:
            adjustments = replace(adjustments, base=self.grammar_base)
        return Admission(
            known=self.known,
            computed=0 if self.tenancy is None else self.tenancy.start,
            limit=self.limit,
            minimum=self.minimum,
            temperature=self.params.temperature,
            top_k=self.params.top_k,
            top_p=self.params.top_p,
            min_p=self.params.min_p,
            seed=self.seed,
            stop_ids=self.stop_ids,
            adjustments=adjustments,
        )

    def end(self, reason: FinishReason, length: int | None = None) -> None:
        """Finish for `reason`, with the first `length` output tokens (None: all of them)."""
        if length is not None:
            if not 0 <= length <= len(self.output):
                raise RequestError("length", f"must be 0 to {len(self.output)}, got {length}")
            del self.output[length:]
            del self.scores[length:]
        self.finish = reason
