# SPDX-License-Identifier: Apache-2.0
"""What is said of a rank that is gone is this project's own, whatever its libraries say."""

from __future__ import annotations

import pytest

from freewheel.runtime.parallel.group import lost

GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
    "peer [127.0.0.1]:28823. This may indicate the remote process has terminated. GLHF"
)
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/Utils.hpp:12, remote process exited"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (GLOO, "Connection closed by peer [127.0.0.1]:28823"),
        (NCCL, "NCCL error remote process exited"),
        ("Connection reset by peer.\nmore", "Connection reset by peer"),
    ],
)
def test_a_lost_rank_is_told_without_places_in_the_sources_of_others(
    said: str, reason: str
) -> None:
    assert str(lost("", RuntimeError(said))) == (
        f"tp: another rank of this engine is gone ({reason}); start it anew"
    )
