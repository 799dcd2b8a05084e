# SPDX-License-Identifier: Apache-2.0
"""What options came to, and checks of those that users give."""

from __future__ import annotations

from dataclasses import dataclass, field

from freewheel.errors import ConfigError


@dataclass(frozen=True)
class Decision:
    """One resolved default and the reason for it, for `inspect` and logs."""

    option: str
    value: str
    reason: str


@dataclass
class Decisions:
    """Collected while an engine starts."""

    made: list[Decision] = field(default_factory=list[Decision])

    def note(self, option: str, value: object, reason: str) -> None:
        self.made.append(Decision(option, str(value), reason))


def check_range(option: str, value: object, low: int, high: int) -> None:
    """Raise ConfigError unless it is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{option}: must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{option}: must be between {low} and {high}, got {value}")


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless it is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{option}: must be one of {', '.join(choices)}; got {value!r}")


def check_deterministic(device: str, kv_cache_dtype: str) -> None:
    """Raise ConfigError where the deterministic mode could not be kept."""
    if device != "cuda":
        raise ConfigError(
            'deterministic: is for CUDA devices; on the CPU, dtype="float64" gives the same '
            "tokens in any company"
        )
    if kv_cache_dtype == "fp8":
        raise ConfigError(
            "deterministic: attention over FP8 rows does not keep one order of sums; choose "
            "another kv_cache_dtype"
        )
