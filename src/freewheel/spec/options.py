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
