# SPDX-License-Identifier: Apache-2.0
"""Pieces of OpenAI's answers that several endpoints share."""

from __future__ import annotations

import secrets
import time
from typing import Any

from freewheel.server.generation import Usage


def new_id(prefix: str) -> str:
    """An id that nobody guesses."""
    return f"{prefix}-{secrets.token_hex(12)}"


def now() -> int:
    return int(time.time())


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage. Its words for predicted output are what drafts are."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached,
            "cached_tokens_by_tier": usage.tiers,
        },
        "completion_tokens_details": {
            "reasoning_tokens": usage.thought,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.rejected,
        },
    }
