# SPDX-License-Identifier: Apache-2.0
"""What calls of tools are held to, where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freewheel.chat import GLM_MARKUP, V4_MARKUP, V32_MARKUP, Markup
from freewheel.errors import RequestError
from freewheel.server.failures import ApiError
from freewheel.server.structure import Structure
from freewheel.server.tools import Calling
from freewheel.structured import DSML_V4, DSML_V32, GLM, tool_grammar
from freewheel.structured import Tool as CallableTool

FORMATS = {V32_MARKUP: DSML_V32, V4_MARKUP: DSML_V4, GLM_MARKUP: GLM}
"""The grammar's words for each markup."""


def structure_of_calls(
    calling: Calling,
    markup: Markup | None,
    control_tokens: Mapping[str, int],
    other: Structure | None = None,
    budgeted: bool = False,
) -> Structure | None:
    """The form that calls are held to, or else `other`. Raises ApiError 400 for both.

    Calls that must be made are held to it, and so are calls of strict tools, and the names of calls
    if not all tools may be called. `budgeted`: there is a bound on thinking as well.
    """
    if other is not None and calling.offered:
        raise ApiError(
            400,
            f"{other.field}: an answer that may call tools cannot be held to another form; leave "
            "it out, or set tool_choice to none",
            param=other.field,
            code="invalid_value",
        )
    if markup is None or not calling.offered or not calling.held:
        return other
    tools = [
        CallableTool(
            one.name, one.parameters if calling.forced or one.name in calling.strict else None
        )
        for one in calling.callable
    ]
    try:
        found = tool_grammar(
            tools,
            calling.choice,
            FORMATS[markup],
            control_tokens,
            parallel=calling.parallel,
            whole=budgeted,
        )
    except RequestError as error:
        raise ApiError(400, str(error), param=error.field, code="invalid_value") from error
    if found is None:
        return other
    wanted: dict[str, Any] = {"calls": found.calls}
    if found.trigger is not None:
        wanted["grammar_trigger"] = found.trigger
    return Structure("tools", wanted)
