# SPDX-License-Identifier: Apache-2.0
"""Engines that will never start: the server says why, and tries none again."""

from __future__ import annotations

import pytest

from freewheel.errors import ConfigError, FreewheelError
from freewheel.server.link import EngineState
from tests.faults.line import Engines, play, unfit


def test_a_checkpoint_that_is_damaged_from_the_first_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines(monkeypatch, unfit("no shard 3"))

    async def test() -> None:
        async with engines.running() as link:
            await engines.until("unfit", lambda: link.state is EngineState.UNFIT)
            assert engines.starts == 1 and link.unfit == "no shard 3"

    play(test)


@pytest.mark.parametrize(("misled", "kind"), [(True, ConfigError), (False, FreewheelError)])
def test_an_engine_that_an_option_keeps_from_starting_blames_the_option(
    monkeypatch: pytest.MonkeyPatch, misled: bool, kind: type[FreewheelError]
) -> None:
    """So the command's exit code is that of bad arguments."""
    engines = Engines(monkeypatch, unfit("chunk: is too wide", misled))

    async def test() -> None:
        async with engines.running() as link:
            await engines.until("unfit", lambda: link.state is EngineState.UNFIT)
            with pytest.raises(FreewheelError, match="too wide") as caught:
                link.raise_if_unfit()
            assert type(caught.value) is kind

    play(test)
