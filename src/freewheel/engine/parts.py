# SPDX-License-Identifier: Apache-2.0
"""What an `LLM` holds until it is closed: memory, graphs, and processes that work for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from freewheel.chat import Chat, open_chat
from freewheel.config import EngineConfig, find_model
from freewheel.engine.session import Session
from freewheel.engine.tokenizer import Tokenizer
from freewheel.host import Alarm, DepthPolicy, DiskIndex, Fleet, Scheduler
from freewheel.runtime import Built, build, disk_indexes
from freewheel.spec import ShapeLadder
from freewheel.structured import Compiler, GuideDesk


class Parts:
    """Of one engine. Raises what `build` raises."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        alarm: Alarm,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._config, self._tokenizer, self._alarm = config, tokenizer, alarm
        self.built: Built = build(config, progress, tokenizer_size=tokenizer.size)
        self.policy = _policy_of(self.built.ladder, config.run_ahead)
        self.session = Session(self.new_scheduler, self.built.executor)
        vocabulary = tokenizer.token_bytes(self.built.spec.vocab_size)
        self.compiler = Compiler(vocabulary, config.grammar_seconds)
        self.guides = GuideDesk(vocabulary, config.grammar_seconds)
        self._encoding: Chat | None = None

    @property
    def encoding(self) -> Chat:
        """How the model writes conversations. Raises UnsupportedModel if that is not known."""
        if self._encoding is None:
            folder = find_model(self._config.model)
            self._encoding = open_chat(folder, self.built.spec.family, self._tokenizer)
        return self._encoding

    def close(self) -> None:
        """End what is under way, and everything here, whatever of it fails."""
        with ExitStack() as stack:  # from the last to the first
            stack.callback(self.built.executor.close)
            stack.callback(self.compiler.close)
            stack.callback(self.guides.close)
            if self._encoding is not None:
                stack.callback(self._encoding.close)
            stack.callback(self.session.end)

    def new_scheduler(self) -> Scheduler | Fleet:
        """Of every copy of the model."""
        disks = disk_indexes(self._config, self.built.executor)
        copies = [self._new_copy(disk) for disk in disks]
        return copies[0] if len(copies) == 1 else Fleet(copies, self._config.prefill_share)

    def _new_copy(self, disk: DiskIndex | None) -> Scheduler:
        built, config = self.built, self._config
        return Scheduler(
            built.ladder,
            built.groups,
            built.sizes.pages,
            built.sizes.rows,
            built.sizes.row_width,
            built.sizes.row_width,
            config.run_ahead,
            prefix_cache=config.prefix_cache,
            shelf=built.shelf(),
            prefill_share=config.prefill_share,
            policy=self.policy,
            host_slots=built.sizes.host_slots,
            alarm=self._alarm,
            disk=disk,
        )


def _policy_of(ladder: ShapeLadder, run_ahead: int) -> DepthPolicy | None:
    """Who chooses the depth of rounds; None where there is one for all."""
    if len(ladder.depths) == 1:
        return None
    return DepthPolicy(ladder.depths, ladder.depth, run_ahead + 2)
