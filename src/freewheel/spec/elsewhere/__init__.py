# SPDX-License-Identifier: Apache-2.0
"""Options and fields by the names that other engines have for them: what to write here instead."""

from freewheel.spec.elsewhere.hints import (
    address_hint,
    argument_hint,
    field_hint,
    hint,
    near,
    option_hint,
    params_hint,
    prompt_hint,
)
from freewheel.spec.elsewhere.rows import Names, Row, Section

__all__ = [
    "Names",
    "Row",
    "Section",
    "address_hint",
    "argument_hint",
    "field_hint",
    "hint",
    "near",
    "option_hint",
    "params_hint",
    "prompt_hint",
]
