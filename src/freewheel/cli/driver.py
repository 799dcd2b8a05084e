# SPDX-License-Identifier: Apache-2.0
"""Opening the CUDA device while PyTorch is still being imported.

It takes the driver some tenths of a second, in which Python can go on. A process has one context on
a device that libraries share, the primary one: PyTorch finds it open.
"""

from __future__ import annotations

import ctypes
import threading

from freewheel.config import EngineConfig

LIBRARY = "libcuda.so.1"


def open_driver() -> None:
    """Begin, in a thread, to open the first device that this process sees, if there is one.

    Says nothing of what fails: whoever needs the device will.
    """
    threading.Thread(target=_open, daemon=True).start()


def finds_device() -> bool:
    """Whether the driver shows this process a device; PyTorch may still be one without CUDA."""
    driver, devices = _driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(devices)) == 0 and devices.value > 0


def check_early(config: EngineConfig) -> EngineConfig:
    """The same. Raises ConfigError, before PyTorch is imported, for what cannot be kept here."""
    if config.deterministic and (config.device == "cpu" or not finds_device()):
        config.check_deterministic("cpu")
    return config


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def _open() -> None:
    driver = _driver()
    if driver is None:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
