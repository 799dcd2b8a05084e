# SPDX-License-Identifier: Apache-2.0
"""Definitions of tools, of the kinds that users send: one for each kind of arguments."""

from __future__ import annotations

from typing import Any


def _tool(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def _text(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


_POINT = {
    "type": "object",
    "properties": {
        "latitude": {"type": "number", "minimum": -90, "maximum": 90},
        "longitude": {"type": "number", "minimum": -180, "maximum": 180},
    },
    "required": ["latitude", "longitude"],
    "additionalProperties": False,
}

DEFINITIONS: dict[str, dict[str, Any] | None] = {
    "get_time": _tool({}),
    "no_parameters": None,
    "get_weather": _tool(
        {
            "location": _text(description="City and country, such as Bern, Switzerland"),
            "unit": _text(enum=["celsius", "fahrenheit"]),
        },
        "location",
    ),
    "search_web": _tool(
        {
            "query": _text(),
            "count": {"type": "integer", "minimum": 1, "maximum": 50, "default": 10},
            "fresh": {"type": "boolean"},
        },
        "query",
    ),
    "run_shell": _tool(
        {"command": _text(), "timeout_ms": {"type": "integer", "minimum": 0}}, "command"
    ),
    "read_file": _tool({"path": _text(), "offset": {"type": "integer"}, "limit": {}}, "path"),
    "edit_file": _tool(
        {"path": _text(), "old_text": _text(), "new_text": _text(), "all": {"type": "boolean"}},
        "path",
        "old_text",
        "new_text",
        additionalProperties=False,
    ),
    "send_email": _tool(
        {
            "to": {"type": "array", "items": _text(format="email"), "minItems": 1},
            "subject": _text(maxLength=120),
            "body": _text(),
        },
        "to",
        "subject",
        "body",
    ),
    "mail_one": _tool({"to": _text(format="email"), "body": _text()}, "to", "body"),
    "book_flight": _tool(
        {
            "from": _text(pattern="^[A-Z]{3}$"),
            "to": _text(pattern="^[A-Z]{3}$"),
            "date": _text(format="date"),
            "passengers": {"type": "integer", "minimum": 1, "maximum": 9},
            "class": _text(enum=["economy", "business", "first"]),
        },
        "from",
        "to",
        "date",
    ),
    "create_event": _tool(
        {
            "title": _text(minLength=1, maxLength=80),
            "start": _text(format="date-time"),
            "end": _text(format="date-time"),
            "guests": {"type": "array", "items": _text()},
        },
        "title",
        "start",
    ),
    "move_robot": _tool({"to": _POINT, "speed": {"type": "number"}}, "to"),
    "set_heating": _tool(
        {"degrees": {"type": "number", "minimum": 5, "maximum": 30.5}, "room": _text()}, "degrees"
    ),
    "sample": _tool(
        {"probability": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}}, "probability"
    ),
    "add": _tool({"a": {"type": "number"}, "b": {"type": "number"}}, "a", "b"),
    "sum_up": _tool({"numbers": {"type": "array", "items": {"type": "number"}}}, "numbers"),
    "query_database": _tool(
        {
            "sql": _text(),
            "parameters": {"type": "array", "items": {"type": ["string", "number", "null"]}},
        },
        "sql",
    ),
    "place_order": _tool(
        {
            "items": {
                "type": "array",
                "items": _tool(
                    {"sku": _text(), "quantity": {"type": "integer", "minimum": 1}},
                    "sku",
                    "quantity",
                ),
                "minItems": 1,
            },
            "note": {"anyOf": [_text(), {"type": "null"}]},
        },
        "items",
    ),
    "create_user": _tool(
        {
            "name": _text(),
            "age": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "address": {"$ref": "#/$defs/Address"},
        },
        "name",
        "address",
        **{"$defs": {"Address": _tool({"street": _text(), "city": _text()}, "street", "city")}},
    ),
    "nullable_text": _tool({"cursor": {"type": ["string", "null"]}}, "cursor"),
    "update_issue": _tool(
        {
            "number": {"type": "integer"},
            "labels": {
                "type": "array",
                "items": _text(enum=["bug", "docs", "speed"]),
                "uniqueItems": True,
            },
            "state": {"const": "closed"},
        },
        "number",
    ),
    "look_up": _tool(
        {"id": {"type": "integer"}, "name": _text()},
        anyOf=[{"required": ["id"]}, {"required": ["name"]}],
    ),
    "either_way": {
        "anyOf": [
            _tool({"path": _text()}, "path"),
            _tool({"url": _text(), "depth": {"type": "integer"}}, "url"),
        ]
    },
    "patch": _tool(
        {"title": _text(), "body": _text(), "draft": {"type": "boolean"}}, minProperties=1
    ),
    "pay": _tool(
        {"card": _text(), "code": _text(), "cash": {"type": "boolean"}},
        dependentRequired={"card": ["code"]},
    ),
    "draw": _tool(
        {
            "shape": {
                "oneOf": [
                    _tool({"kind": {"const": "circle"}, "radius": {"type": "number"}}, "kind"),
                    _tool({"kind": {"const": "square"}, "side": {"type": "number"}}, "kind"),
                ]
            }
        },
        "shape",
    ),
    "call_api": _tool(
        {"method": _text(enum=["GET", "POST"]), "body": {"type": "object"}}, "method"
    ),
    "set_headers": _tool(
        {"headers": {"type": "object", "additionalProperties": _text()}}, "headers"
    ),
    "tree": _tool(
        {"root": {"$ref": "#/$defs/Node"}},
        "root",
        **{
            "$defs": {
                "Node": _tool(
                    {
                        "name": _text(),
                        "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
                    },
                    "name",
                )
            }
        },
    ),
    "many_optional": _tool(
        {f"option_{letter}": _text() for letter in "abcdefghij"}
        | {f"count_{letter}": {"type": "integer"} for letter in "abcd"}
    ),
    "think": _tool({"thought": _text(), "step": {"type": "integer", "minimum": 1}}, "thought"),
}
