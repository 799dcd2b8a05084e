# SPDX-License-Identifier: Apache-2.0
"""The items that an answer has in OpenAI's Responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from freewheel.server.choices import Call, Said


@dataclass(eq=False)
class Thoughts:
    """What was thought before the answer, so far."""

    id: str
    text: str = ""


Block = Said | Call | Thoughts


def id_of(block: Block) -> str:
    """Its id among the items."""
    if isinstance(block, Thoughts):
        return block.id
    return f"fc_{block.key}" if isinstance(block, Call) else f"msg_{block.key}"


def item_of(block: Block, status: str, empty: bool = False) -> dict[str, Any]:
    """The item. `empty`: as it is when it is announced."""
    if isinstance(block, Thoughts):
        content = [] if empty else [{"type": "reasoning_text", "text": block.text}]
        return {"id": block.id, "type": "reasoning", "summary": [], "content": content}
    head = {"id": id_of(block), "status": status}
    if isinstance(block, Call):
        arguments = "" if empty else block.arguments
        call = {"call_id": f"call_{block.key}", "name": block.name, "arguments": arguments}
        return head | {"type": "function_call"} | call
    content = [] if empty else [text_part(block.text)]
    return head | {"type": "message", "role": "assistant", "content": content}


def text_part(text: str) -> dict[str, Any]:
    """The content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
