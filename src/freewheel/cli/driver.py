# SPDX-License-Identifier: Apache-2.0
"""Opening the CUDA device while PyTorch is still being imported.

It takes the driver some tenths of a second, in which Python can go on. A process has one context on
a device that libraries share, the primary one: PyTorch finds it open.
"""

from __future__ import annotations

import ctypes
import threading

LIBRARY = "libcuda.so.1"


def open_driver() -> None:
    """Begin, in a thread, to open the first device that this process sees, if there is one.

    Says nothing of what fails: whoever needs the device will.
    """
    threading.Thread(target=_open, daemon=True).start()


def _open() -> None:
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
