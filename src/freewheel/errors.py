# SPDX-License-Identifier: Apache-2.0
"""Every error that Freewheel raises on purpose. Each message names the field and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self


class FreewheelError(Exception):
    """Base of all errors below: catch this one to catch them all."""


class HostSync(FreewheelError, RuntimeError):
    """A device value was about to reach the host, or a shape was about to depend on one."""


class CaptureError(FreewheelError, RuntimeError):
    """A function cannot become a replayable graph."""


class ConfigError(FreewheelError, ValueError):
    """An engine option is out of range or contradicts another."""


class RankError(FreewheelError, RuntimeError):
    """Another process of the same engine ended, did not start, or decided otherwise."""


class CheckpointError(FreewheelError, ValueError):
    """A model folder is incomplete, inconsistent or of an unsupported kind."""


class UnsupportedModel(CheckpointError):
    """The folder is well formed, but holds a model that Freewheel does not run."""


class RequestError(FreewheelError, ValueError):
    """A request is invalid. `field` is the name of the offending parameter."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field

    @classmethod
    def of_names(cls, wrong: Iterable[tuple[str, str]]) -> Self:
        """A line for each of the names, of which there is one at least; `field` is the first."""
        (field, message), *others = wrong
        return cls(field, "\n".join((message, *(f"{name}: {said}" for name, said in others))))


class StartError(FreewheelError, RuntimeError):
    """A process that Freewheel needs did not start."""


class CapacityError(RequestError):
    """A request could never fit, however long it waited."""


class ClosedError(FreewheelError, RuntimeError):
    """An engine was asked for something after it had been closed."""
