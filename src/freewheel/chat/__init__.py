# SPDX-License-Identifier: Apache-2.0
"""Conversations to prompt tokens, and answers back to thoughts, text and tool calls.

Which encoding a model has is read from its folder (`open_chat`): a chat template that it ships, or
the encoding that its family publishes instead. Content is encoded as plain text: a control token
spelt by a user never becomes one. Jinja and DeepSeek's library are imported by a process of its own
alone (`worker`); everything else here needs the standard library.
"""

from __future__ import annotations

from freewheel.chat.markup import CallBegun, CallDelta, CallEnded, Content, Event, Parser, values_of
from freewheel.chat.open import (
    GLM_MARKUP,
    V4_MARKUP,
    V32_MARKUP,
    Chat,
    Markup,
    Prompt,
    open_chat,
)
from freewheel.chat.pieces import NO_THINK, THINK, Vocabulary
from freewheel.chat.turns import Ask, Effort, Message, Tool, ToolCall

__all__ = [
    "GLM_MARKUP",
    "NO_THINK",
    "THINK",
    "V4_MARKUP",
    "V32_MARKUP",
    "Ask",
    "CallBegun",
    "CallDelta",
    "CallEnded",
    "Chat",
    "Content",
    "Effort",
    "Event",
    "Markup",
    "Message",
    "Parser",
    "Prompt",
    "Tool",
    "ToolCall",
    "Vocabulary",
    "open_chat",
    "values_of",
]
