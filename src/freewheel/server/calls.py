# SPDX-License-Identifier: Apache-2.0
"""Tool calls of an answer in OpenAI's words for a chat."""

from __future__ import annotations

from typing import Any

from freewheel.chat import CallBegun, CallDelta
from freewheel.server.choices import Choice, Part


def call_objects(choice: Choice) -> list[dict[str, Any]]:
    """All calls of an answer."""
    return [
        {
            "id": f"call_{call.key}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in choice.calls
    ]


def call_deltas(part: Part) -> list[dict[str, Any]]:
    """What one round adds to calls: one entry a call."""
    found: dict[int, dict[str, Any]] = {}
    for event in part.told.events:
        if isinstance(event, CallBegun):
            call = part.choice.calls[event.index]
            found[event.index] = {
                "index": event.index,
                "id": f"call_{call.key}",
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
        elif isinstance(event, CallDelta):
            entry = found.setdefault(
                event.index, {"index": event.index, "function": {"arguments": ""}}
            )
            entry["function"]["arguments"] += event.text
    return list(found.values())
