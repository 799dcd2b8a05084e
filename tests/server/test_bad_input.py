# SPDX-License-Identifier: Apache-2.0
"""Whatever comes in: a clear 4xx, and the server goes on. Many of these once broke another engine.

The comments name the published faults of other servers that a case is modelled on.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import Running

ASKED = [{"role": "user", "content": "Hello"}]
BIG = 10**30

COMPLETIONS: list[tuple[dict, str]] = [
    ({"prompt": ""}, ""),  # an empty prompt ended the server: CVE-2024-8768 (here: a begin token)
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["x"] * 300}, "prompt"),
    ({"prompt": [[1]] * 300}, "prompt"),
    ({"prompt": [-1]}, "prompt"),  # negative ids wrote out of bounds: CVE-2026-21869
    ({"prompt": [1024]}, "prompt"),
    ({"prompt": [1 << 31]}, "prompt"),
    ({"prompt": [BIG]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["x", 1]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),  # a huge n took all memory: CVE-2026-34756
    ({"n": BIG}, "n"),
    ({"n": "2"}, "n"),
    ({"best_of": 10**6}, "best_of"),
    ({"best_of": 2}, "best_of"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": BIG}, "max_tokens"),
    ({"max_tokens": 8192}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e-9}, "temperature"),
    ({"temperature": BIG}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stop": "\udfff"}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [4000]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(9))}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options"),
    ({"stream_options": {"other": True}}, "stream_options"),
    ({"logprobs": BIG}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"model": ["demo"]}, "model"),
    ({"model": "x" * 600}, "model"),
    ({"priority": 1 << 31}, "priority"),
    # code, tensors and templates in a request: CVE-2025-10164, -2025-62164, -2025-61620
    ({"prompt_embeds": "gASVCgAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOULg=="}, "prompt_embeds"),
    ({"logits_processors": [{"qualname": "os.system"}]}, "logits_processors"),
    ({"custom_logit_processor": "80049526"}, "custom_logit_processor"),
    ({"chat_template": "{{ cycler.__init__.__globals__.os.popen('id') }}"}, "chat_template"),
    ({"trust_remote" + "_code": True}, "trust_remote" + "_code"),
    # patterns and schemas that never end: CVE-2025-48942, -48943, -48944
    ({"guided_regex": "(a+)+$"}, "guided_regex"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(?!a)b"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "[" * 50_000}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "root ::= root"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"logit_bias": {"1024": 1}}, "logit_bias"),
    ({"allowed_token_ids": [1024]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": ["x" * 600]}, "bad_words"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"__class__": "x"}, "__class__"),
    ({"x" * 5000: 1}, ""),
]

CHATS: list[tuple[dict, str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "root", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ({"messages": [*ASKED, *ASKED]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    # addresses to fetch, and files to decode: CVE-2025-6242, -2026-24779, -2026-22778
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
                    ],
                }
            ]
        },
        "messages",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "input_audio", "input_audio": {"data": "AAAA"}}],
                }
            ]
        },
        "messages",
    ),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    # settings of a template that reach code: CVE-2025-62426
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "g"}}],
                },
            },
        },
        "tool_choice",
    ),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_objects"}}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    (
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}},
        "response_format",
    ),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format"),
    ({"response_format": {"type": "text", "triggers": ["<"]}}, "response_format"),
    ({"structured_outputs": {"json_object": True, "regex": "a"}}, "structured_outputs"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"store": True}, "store"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ({"n": 10**9}, "n"),
]

RAW = [
    b"",
    b"null",
    b"[]",
    b"5",
    b"{",
    b'{"prompt": "x",}',
    b'{"prompt": "x"} trailing',
    b"\xff\xfe{}",
    b'{"prompt": "\xff"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
    b'{"prompt": ' + b"[" * 100_000 + b"}",
    b'{"prompt": ' + b'{"a":' * 100_000 + b"}",
    b"\x80\x04\x95\x0a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",  # a pickle
    b"<?xml version='1.0'?><!DOCTYPE x [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><x>&a;</x>",
]


def check_refused(found: httpx.Response, field: str) -> None:
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 700
    if field:
        assert error["param"].split(".")[0] == field, error
        assert error["message"].startswith(f"{error['param']}: "), error


@pytest.mark.parametrize(("extra", "field"), COMPLETIONS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_completion_is_refused_by_its_field(
    server: Running, extra: dict, field: str, stream: bool
) -> None:
    body = {"prompt": "Hello", "max_tokens": 2, "stream": stream} | extra
    content = json.dumps(body).encode()
    found = server.http.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    if extra == {"prompt": ""}:
        assert found.status_code == 200
    else:
        check_refused(found, field)


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        ("guided_json", "use structured_outputs"),
        ("guided_regex", "use structured_outputs"),
        ("max_new_tokens", "use max_tokens"),
        ("use_beam_search", "there is no beam search"),
        ("extra_body", "stand in the request itself"),
        ("best_of", "n gives several"),
        ("temprature", "use temperature"),
        ("max_tokenz", "use max_tokens"),
        ("no_stop_trim", "use include_stop_str_in_output"),
        ("rid", "x-request-id"),
        ("request_id", "x-request-id"),
        ("return_hidden_states", "there are none"),
        ("lora_path", "no adapters"),
        ("add_special_tokens", "give token ids"),
    ],
)
def test_a_field_of_another_server_is_told_ours(server: Running, field: str, hint: str) -> None:
    found = server.http.post("/v1/completions", json={"prompt": "Hello", field: 2})
    check_refused(found, field)
    assert hint in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("/health_generate", "/ready"),
        ("/get_server_info", "/v1/loads"),
        ("/get_model_info", "/v1/models"),
        ("/flush_cache", "--admin-socket"),
    ],
)
def test_an_address_of_another_server_is_told_ours(
    server: Running, address: str, hint: str
) -> None:
    for found in (server.http.get(address), server.http.post(address, json={})):
        assert found.status_code == 404 and hint in found.json()["error"]["message"]


def chat_with(part: dict) -> dict:
    return {"messages": [{"role": "user", "content": [part]}]}


CHAT, TURN = "/v1/chat/completions", {"role": "user", "content": "a"}
TEXT_ONLY = "are not supported: this server takes text"


@pytest.mark.parametrize(
    ("path", "extra", "said"),
    [
        (CHAT, {"tool_choice": {"type": "function", "function": {}}},
         "tool_choice.function.name: is required"),
        (CHAT, {"messages": []}, "messages: must not be empty"),
        (CHAT, {"messages": [{"rol": "user", "content": "a"}]},
         "messages.0.rol: is not a field that this server knows; use role"),
        (CHAT, {"store": True}, "store: must be false; this server keeps no answers: send the "
         "earlier turns with each request"),
        (CHAT, {"n": 0}, "n: must be at least 1"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]},
         "tools.0.function.name: must match ^[A-Za-z0-9_.-]{1,64}$"),
        (CHAT, {"response_format": {"type": "json_schema", "schema": {}}},
         "response_format.schema: is not a field that this server knows; use json_schema.schema"),
        (CHAT, chat_with({"type": "image_url", "image_url": {"url": "x"}}),
         f"messages.0.content.0.type: images {TEXT_ONLY}"),
        (CHAT, chat_with({"type": "input_audio", "input_audio": {}}),
         f"messages.0.content.0.type: sounds {TEXT_ONLY}"),
        ("/v1/messages", {"max_tokens": 1} | chat_with({"type": "image", "source": {}}),
         f"messages.0.content.0: images {TEXT_ONLY}"),
        ("/v1/messages", {"max_tokens": 1} | chat_with({"type": "text"}),
         "messages.0.content.0.text: is required"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         f"input.0.content.0.type: images {TEXT_ONLY}"),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "a", "name": "f"}]},
         "input.0.arguments: is required"),
        ("/tokenize", {"messages": [TURN | {"contnt": 1}]},
         "messages.0.contnt: is not a field that this server knows; use content"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_refusal_is_in_the_clients_words(
    server: Running, path: str, extra: dict, said: str
) -> None:
    body = ({"messages": ASKED} if path == CHAT else {}) | extra
    found = server.http.post(path, json=body)
    error = found.json()["error"]
    assert (found.status_code, error["message"]) == (400, said)
    assert path == "/v1/messages" or error["param"] == said.partition(": ")[0]


def test_a_misspelt_field_is_told_those_of_its_own_address(server: Running) -> None:
    asked = {"messages": ASKED, "max_completion_token": 2}
    found = server.http.post("/v1/chat/completions", json=asked)
    assert "use max_completion_tokens" in found.json()["error"]["message"]
    found = server.http.post("/tokenize", json={"prompt": "a", "temprature": 2})
    check_refused(found, "temprature")
    assert "use" not in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("extra", "hint"),
    [
        ({"stream_options": {"include_usge": True}}, "use include_usage"),
        ({"messages": [{"role": "user", "contnt": "a", "content": "a"}]}, "use content"),
        ({"chat_template_kwargs": {"enable_thinkin": True}}, "use enable_thinking"),
        ({"structured_outputs": {"choise": ["a"]}}, "use choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
         "use parameters"),
        ({"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}}, "use schema"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_misspelt_field_is_told_those_of_its_own_place(
    server: Running, extra: dict, hint: str
) -> None:
    found = server.http.post("/v1/chat/completions", json={"messages": ASKED} | extra)
    assert found.status_code == 400
    assert found.json()["error"]["message"].endswith(hint)


USUAL = {
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
}


def test_what_other_servers_clients_always_send_is_taken_with_that_value_alone(
    server: Running,
) -> None:
    asked: dict[str, Any] = {"messages": ASKED, "max_tokens": 2, "temperature": 0}
    found = server.http.post("/v1/chat/completions", json=asked | USUAL).json()
    plain = server.http.post("/v1/chat/completions", json=asked).json()
    assert found["choices"] == plain["choices"]
    for field, value in USUAL.items():
        other = server.http.post("/v1/chat/completions", json=asked | {field: not value})
        check_refused(other, field)


@pytest.mark.parametrize("stream", [{}, {"stream": False}, {"stream": None}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_settings_of_a_stream_need_a_stream(server: Running, path: str, stream: dict) -> None:
    asked: dict[str, Any] = {"max_tokens": 2, "stream_options": {"include_usage": True}}
    asked |= {"messages": ASKED} if "chat" in path else {"prompt": "Hello"}
    found = server.http.post(path, json=asked | stream)
    check_refused(found, "stream_options")
    assert "stream: true" in found.json()["error"]["message"]
    assert server.http.post(path, json=asked | {"stream": True}).status_code == 200


@pytest.mark.parametrize(
    "neutral",
    [{"tool_choice": "none"}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_without_tools_a_choice_that_changes_nothing_is_taken(
    server: Running, path: str, neutral: dict
) -> None:
    chat = {"messages": ASKED, "max_tokens": 2}
    asked = chat if "chat" in path else {"input": "Hello", "max_output_tokens": 2}
    assert server.http.post(path, json=asked | neutral).status_code == 200
    check_refused(server.http.post(path, json=asked | {"tool_choice": "required"}), "tool_choice")


@pytest.mark.parametrize(("extra", "field"), CHATS)
def test_a_bad_chat_is_refused_by_its_field(server: Running, extra: dict, field: str) -> None:
    content = json.dumps({"messages": ASKED, "max_tokens": 2} | extra).encode()
    found = server.http.post(
        "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    check_refused(found, field)


@pytest.mark.parametrize("content", RAW, ids=range(len(RAW)))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
def test_a_body_that_is_no_request_is_refused(server: Running, content: bytes, path: str) -> None:
    found = server.http.post(path, content=content, headers={"content-type": "application/json"})
    assert found.status_code == 400
    assert found.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(server: Running, kind: str) -> None:
    """A browser sends these to another site without asking it first."""
    content, headers = b'{"prompt": "Hello", "max_tokens": 1}', {"content-type": kind}
    assert server.http.post("/v1/completions", content=content, headers=headers).is_error


@pytest.mark.parametrize(
    "path",
    [
        "/page/../../../../etc/passwd",
        "/page/..%2f..%2fetc%2fpasswd",
        "/page/%2e%2e/app.py",
        "/page//etc/passwd",
        "/page/page.js%00.css",
        "/page/__init__.py",
        "/v1/models/..%2f..%2fetc",
    ],
)
def test_no_path_leaves_the_pages_folder(server: Running, path: str) -> None:
    """Paths out of a folder: CVE-2026-7302."""
    found = server.http.get(path)
    assert found.status_code == 404
    assert "root:" not in found.text and "import" not in found.text


@pytest.mark.parametrize("path", ["/invocations", "/pause", "/update_weights", "/docs", "/redoc"])
def test_there_is_no_door_for_operators(server: Running, path: str) -> None:
    assert server.http.post(path, json={}).status_code == 404
    assert server.http.get(path).status_code == 404


def test_a_huge_header_is_refused(server: Running) -> None:
    """A header without an end took all memory: CVE-2025-48956."""
    assert server.http.get("/version", headers={"x-filler": "x" * 20_000}).status_code == 200
    assert server.http.get("/version", headers={"x-filler": "x" * 40_000}).status_code == 431
    many = {f"x-{n}": "y" * 100 for n in range(400)}
    assert server.http.get("/version", headers=many).status_code == 431
    with pytest.raises(httpx.HTTPError):
        server.http.get("/version", headers={"x-filler": "x" * 4_000_000}).raise_for_status()
    assert server.http.get("/health").status_code == 200


def test_a_bad_request_among_good_ones_ends_alone(server: Running) -> None:
    good = {"prompt": "Emma was", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    before = server.post("/v1/completions", **good).json()["choices"]
    for bad in ({"prompt": [4000]}, {"prompt": [5] * 9000}, {"temperature": -1}):
        assert server.post("/v1/completions", **(good | bad)).status_code == 400
        assert server.post("/v1/completions", **good).json()["choices"] == before


def sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds."""
    found: set[str] = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            target = str(link.readlink())
            found |= {target[8:-1]} if target.startswith("socket:[") else set()
    return found


def network_sockets(pid: int) -> list[tuple[str, str]]:
    """(protocol, local port in hexadecimal) of a process's sockets that reach a network."""
    found: list[tuple[str, str]] = []
    mine = sockets(pid)
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        table = Path(f"/proc/{pid}/net/{protocol}")
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            fields = line.split()
            if fields[9] in mine:
                found.append((protocol, fields[1].rpartition(":")[2]))
    return found


def test_the_server_opens_no_connection_of_its_own(server: Running) -> None:
    server.post("/v1/completions", prompt="Emma was", max_tokens=4)
    port = f"{int(server.url.rpartition(':')[2]):04X}"
    outward = network_sockets(server.process.pid)
    assert outward and set(outward) <= {("tcp", port)}
    assert network_sockets(server.engine_pid()) == []
