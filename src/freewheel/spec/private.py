# SPDX-License-Identifier: Apache-2.0
"""Files that hold keys, and who may read them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

log = logging.getLogger("freewheel.keys")


def warn_of_readers(option: str, path: Path) -> None:
    """Say so if others than its owner may read or change a file with a key.

    ssh ignores a private key that others may read. Here it is a warning: files that a container is
    given are often readable by all within it. It is for files that were taken: of one that is
    refused, that is said alone.
    """
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError:  # read a moment ago, and gone
        return
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning(
            "%s: %s may be read or changed by others than its owner (mode %04o); "
            "make it yours alone: chmod 600 %s",
            option,
            path,
            mode,
            path,
        )
