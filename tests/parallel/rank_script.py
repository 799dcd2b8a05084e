# SPDX-License-Identifier: Apache-2.0
"""A rank of two, as a process: what it picked and whom it believes, written to a file as JSON.

`python -m tests.parallel.rank_script STORE RANK OUT TP DP`
"""

from __future__ import annotations

import json
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from freewheel.config import keep_to_loopback
from freewheel.errors import RankError
from freewheel.graph.dispatch import DispatchMode, op_name
from freewheel.models import open_folder
from freewheel.models.load import load_folder
from freewheel.runtime.parallel import Channel
from freewheel.runtime.parallel.group import close_groups, meeting_place, open_groups
from freewheel.spec.mesh import Mesh
from tests.models.paged import Paged

CHECKPOINTS = Path(__file__).parents[2] / "src" / "freewheel" / "checkpoints"
TOKENS = [(7 * n + n * n) % 1000 for n in range(160)]


class Picks(DispatchMode):
    """Keeps a digest of every index list."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if op_name(func) == "freewheel::topk_slots":
            self.digests.append(blake2b(out.numpy().tobytes()).hexdigest())
        return out


def picks(name: str, mesh: Mesh) -> list[str]:
    """Of a prompt in two chunks, in float32: in the order of layers."""
    folder = open_folder(CHECKPOINTS / name)
    loaded = load_folder(folder, torch.float32, positions=256, mesh=mesh)
    found = Picks()
    with torch.inference_mode(), found:
        Paged(loaded, length=256, page_size=128).hidden(TOKENS, [100, 60])
    return found.digests


def main(store: str, rank: int, out: str, tp: int, dp: int) -> None:
    torch.set_num_threads(1)
    keep_to_loopback()
    channel = Channel(open_groups("cpu", rank, 2, meeting_place(store, 2), 0), lambda: "")
    channel.form(tp, dp)
    channel.agree("the first round", b"0123456789abcdef")
    try:
        channel.agree("the second round", bytes([rank] * 16))
        said = ""
    except RankError as error:
        said = str(error)
    mesh = Mesh(tp, rank, dp > 1, dp)
    found = {name: picks(name, mesh) for name in ("demo", "demo-v4")}
    Path(out).write_text(json.dumps({"said": said, "picks": found}), encoding="utf-8")
    close_groups()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
