# SPDX-License-Identifier: Apache-2.0
"""Free text with tags in it: what begins like a tag is one of them, whole."""

from __future__ import annotations

from typing import Any

import pytest

from freewheel.errors import RequestError
from freewheel.structured import Tag, ToolGrammar, tag_tree
from tests.program.test_tool_grammars import CONTROL, accepts, table_of

SIZE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ON: dict[str, Any] = {"enum": [True, False]}
TAGS = [Tag("<f=size>", SIZE, "</f>"), Tag("<f=on>", ON, "</f>")]
CALL = Tag("<tool_call>on", ON, "</tool_call>")


def takes(tags: list[Tag], trigger: str, text: str, control: dict[str, int]) -> bool:
    return accepts(ToolGrammar(tag_tree(tags, [trigger], control), None), text, control)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("", True),
        ("no tag at all, a < b, <f", True),
        ("<f=on>true</f>", True),
        ('so: <f=size>{"n":3}</f>', True),
        ('<f=on>false</f> and <f=size>{"n": 3}</f><f=on>true</f>, that is all', True),
        ("<f=other>", False),
        ("a <f=on>maybe</f>", False),
        ("a <f=on>true", False),
        ('<f=size>{"n":"3"}</f>', False),
        ("<f=on>true</f> <f=", False),
    ],
)
def test_tags_are_whole_and_the_rest_is_free(text: str, good: bool) -> None:
    assert takes(TAGS, "<f=", text, {}) == good


def test_control_tokens_open_and_close_tags() -> None:
    assert takes([CALL], "<tool_call>", "hm <tool_call>ontrue</tool_call> more", CONTROL)
    assert takes([CALL], "<tool_call>", "<tool_call>onfalse</tool_call>", CONTROL)
    assert not takes([CALL], "<tool_call>", "<tool_call>off", CONTROL)


def test_they_run_on_the_device() -> None:
    assert table_of(tag_tree(TAGS, ["<f="], {})) is not None


@pytest.mark.parametrize(
    ("tags", "triggers", "answer"),
    [
        (TAGS, [], "triggers: must be one"),
        (TAGS, ["<f=", "<g="], "triggers: must be one"),
        (TAGS, ["<g="], "structures.0.begin: must begin with '<g='"),
        (TAGS, [""], "structures.0.begin: must begin"),
        ([], ["<f="], "structures: is empty"),
        ([CALL], ["<tool"], "triggers: must not end within a control token"),
        ([Tag("<f=a>", ON, "/<f")], ["<f="], "structures.0.end: must not end as"),
    ],
)
def test_what_cannot_be_kept_is_named(tags: list[Tag], triggers: list[str], answer: str) -> None:
    with pytest.raises(RequestError, match=f"^{answer}"):
        tag_tree(tags, triggers, CONTROL)
