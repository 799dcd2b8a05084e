# SPDX-License-Identifier: Apache-2.0
"""A process of an engine that several share.

`torchrun .. -m freewheel.worker COMMAND ..` runs `freewheel COMMAND ..` on rank 0, and has the
other ranks follow it: the way to engines that span machines. `--follow` is how rank 0 starts the
others where all are on one machine.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from freewheel.cli import app
from freewheel.cli.terminal import fail
from freewheel.config import launched_rank
from freewheel.engine import follow_local, join
from freewheel.errors import ConfigError, FreewheelError

FOLLOW = "--follow"


def main(arguments: list[str]) -> None:
    """Run this process's part. Ends the process if another rank is gone."""
    try:
        if arguments[:1] == [FOLLOW]:
            store, ranks, device, leader, rank = arguments[1:]
            threading.Thread(target=_end_with, args=(int(leader),), daemon=True).start()
            follow_local(store, int(ranks), device, int(rank))
            return
        launched = launched_rank()
        join(launched, _device(arguments))
    except FreewheelError as error:
        fail(str(error))
        sys.stderr.flush()
        os._exit(2 if isinstance(error, ConfigError) else 1)  # a GPU may wait for the lost rank
    if not launched.rank:
        app.main()


def _end_with(leader: int) -> None:
    """End this process when rank 0, which started it, is gone: it may still wait to meet it."""
    while os.getppid() == leader:
        time.sleep(0.5)
    os._exit(1)


def _device(arguments: list[str]) -> str:
    """What `--device` says: ranks meet before the command reads its options."""
    for name, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if name == "--device" or name.startswith("--device="):
            return name.partition("=")[2] or value
    return "auto"


if __name__ == "__main__":
    main(sys.argv[1:])
