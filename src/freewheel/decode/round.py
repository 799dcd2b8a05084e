# SPDX-License-Identifier: Apache-2.0
"""The round: one program for prompts, chunks, decoding, verifying and drafting, captured whole.

A row has `known` certain tokens, the first `computed` of them with stored cache rows, and perhaps
drafts behind them. A round covers `width` tokens from `computed` on, certain ones first, then
drafts; asks the target for its own token after each; accepts the drafts that agree; appends what
was decided; and lets the drafter write new drafts. Nothing here asks what kind of forward it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from freewheel import ops
from freewheel.decode.choice import choose_next
from freewheel.decode.drafter import Drafter, Verified
from freewheel.decode.report import echo, report, show
from freewheel.models.base import Model
from freewheel.spec.shape import StepShape
from freewheel.state import (
    CachePool,
    Canary,
    Picks,
    SequenceState,
    open_step,
    receive,
    receive_table,
)


@dataclass(frozen=True)
class Round:
    """What every round of an engine works on."""

    state: SequenceState
    cache: CachePool
    target: Model
    drafter: Drafter
    canary: Canary | None = None

    def advance(self, shape: StepShape, inbox: Tensor, outbox: Tensor) -> None:
        """One round of `shape`. inbox int32 [words], outbox int32 [B, words]: the two letters."""
        state, cache = self.state, self.cache
        if shape.tables:
            receive_table(state, inbox, shape, cache.groups)
            return
        rows = receive(state, inbox, shape, cache.groups)  # int32 [B]
        if self.canary is not None:
            rows = self.canary.check(shape, inbox, outbox)
        opened = ops.open_round(*state.lengths, rows, shape.width, shape.choices - 1)
        start, given, query_lens = opened  # int32 [B] each

        view = open_step(state, rows, start, query_lens, shape.width)
        if shape.shows:
            view = replace(view, picks=Picks(rows, given))
        hidden = self.target.forward(view, cache)  # float [B, W, H]
        logits = self.target.logits(chosen_queries(hidden, given, shape))  # float [B, C, V]
        positions = chosen_queries(view.positions, given, shape)
        choice = choose_next(state, rows, positions, logits, shape, steps=shape.width)

        seen = chosen_queries(view.tokens, given, shape)  # int32 [B, C]
        accept_lens, live = ops.commit(
            state.tokens, *state.lengths, outbox, state.stop_ids, rows, *opened, seen, choice
        )  # int32 [B] each
        if shape.adjusts:
            lens = (start, accept_lens)
            ops.follow(
                state.tokens,
                rows,
                *lens,
                state.uses,
                *state.adjust.automata,
                state.vocabulary,
                shape.width,
            )
        if shape.reports:
            report(logits, choice, given, shape, outbox)
        if shape.echoes:
            echo(state, view, self.target, hidden, shape, outbox)
        if view.picks is not None:
            show(view.picks, shape, outbox)
        verified = Verified(rows, start, accept_lens, live, hidden)
        self.drafter.draft(state, cache, verified, shape)
        if self.canary is not None:
            self.canary.seal(shape, rows)


def chosen_queries(x: Tensor, given: Tensor, shape: StepShape) -> Tensor:
    """[B, C, ...] of x [B, W, ...]: the queries whose next token is chosen (see StepShape.choices).

    given int32 [B]: certain tokens in the rectangle, of which a prompt's rectangle takes the last.
    """
    if shape.choices == shape.width:
        return x
    last = (given.long() - 1).clamp(min=0).view(-1, *[1] * (x.dim() - 1))
    return x.gather(1, last.expand(-1, 1, *x.shape[2:]))
