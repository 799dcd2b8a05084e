# SPDX-License-Identifier: Apache-2.0
"""A hand-over that is refused names the field that its client sent, in whichever words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from freewheel.config import EngineConfig
from freewheel.server.failures import ApiError
from freewheel.server.handoff import handing_of
from freewheel.server.schema import Choices
from freewheel.server.serving import Serving
from freewheel.spec.handoff import KV_PORT


def decode_engine() -> Serving:
    config = EngineConfig(model="demo", role="decode", kv_peers=("10.0.0.7",))
    return cast(Serving, SimpleNamespace(link=SimpleNamespace(config=config), kv_port=KV_PORT))


def asked(words: str, host: str | None, port: int | None) -> Choices:
    if words == "sglang":
        fields: dict[str, Any] = {"bootstrap_room": 1}
        found = {"bootstrap_host": host, "bootstrap_port": port}
    else:
        found = {"remote_host": host, "remote_port": port, "remote_request_id": "a"}
        fields = {"kv_transfer_params": {"do_remote_prefill": True, **found}}
        found = {}
    return Choices.model_validate({**fields, **found})


@pytest.mark.parametrize(
    ("words", "host", "port", "param", "cure"),
    [
        ("sglang", "10.1.2.3", 9000, "bootstrap_host", "--kv-peer"),
        ("sglang", None, None, "bootstrap_host", "must be told whom to ask"),
        ("vllm", "10.1.2.3", 9000, "kv_transfer_params.remote_host", "--kv-peer"),
        ("vllm", None, 9000, "kv_transfer_params", "lacks remote_host"),
        ("vllm", "127.0.0.1", KV_PORT + 1, "kv_transfer_params.remote_host", "--kv-peer"),
    ],
)
def test_a_refused_place_is_told_in_the_words_that_were_sent(
    words: str, host: str | None, port: int | None, param: str, cure: str
) -> None:
    with pytest.raises(ApiError) as refused:
        handing_of(asked(words, host, port), decode_engine())
    assert refused.value.param == param
    assert str(refused.value).startswith(f"{param}: ") and cure in str(refused.value)


@pytest.mark.parametrize("words", ["sglang", "vllm"])
@pytest.mark.parametrize(("host", "port"), [("10.0.0.7", 1234), ("localhost", KV_PORT)])
def test_a_peer_is_let_through_in_either_words(words: str, host: str, port: int) -> None:
    handoff = handing_of(asked(words, host, port), decode_engine()).handoff
    assert handoff is not None and handoff.source == (host, port)
