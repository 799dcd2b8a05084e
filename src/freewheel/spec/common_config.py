# SPDX-License-Identifier: Apache-2.0
"""What is read from every family's config.json alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from freewheel.errors import UnsupportedModel
from freewheel.spec.config_fields import MISSING, Fields
from freewheel.spec.model import ModelSpec, MtpSpec
from freewheel.spec.sampling import MAX_STOP_IDS

S = TypeVar("S", bound=ModelSpec)

WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "aux_loss_alpha",
        "chunk_size_feed_forward",
        "dtype",
        "ep_size",
        "head_dim",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "num_local_experts",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "qk_head_dim",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Fields known not to change what is computed. A `head_dim` here is not the latent attention's."""


def refuse_other_values(fields: Fields, required: Mapping[str, object]) -> None:
    """Raise UnsupportedModel if a field of `required` is there with another value."""
    for name, wanted in required.items():
        value = fields.get(name)
        if value is not MISSING and value != wanted:
            raise UnsupportedModel(
                f"{fields.where}: {name} {value!r} is not supported; use {wanted!r} or leave it out"
            )


def read_mtp(fields: Fields, layers: int, sparse: bool) -> MtpSpec | None:
    """The multi-token-prediction layer, if num_nextn_predict_layers promises one."""
    count = fields.whole("num_nextn_predict_layers", 0, low=0)
    if count > 1:
        raise UnsupportedModel(
            f"{fields.where}: num_nextn_predict_layers {count} is not supported; it must be 0 or 1"
        )
    return MtpSpec(layer=layers, sparse=sparse) if count else None


def bos_id(fields: Fields, vocab_size: int) -> int | None:
    """The begin-of-sequence id, if there is one."""
    value = fields.get("bos_token_id")
    return None if value is MISSING else _token_id(fields, "bos_token_id", value, vocab_size)


def eos_ids(
    config: Fields, generation: Mapping[str, object] | None, vocab_size: int
) -> tuple[int, ...]:
    """End-of-sequence ids of both files, each an id or a list, in order and once."""
    files = (config, Fields(generation or {}, "generation_config.json"))
    ids: dict[int, None] = {}
    for fields in files:
        value = fields.get("eos_token_id")
        if value is MISSING:
            continue
        listed = fields.items("eos_token_id") if isinstance(value, list | tuple) else (value,)
        for item in listed or ():
            ids[_token_id(fields, "eos_token_id", item, vocab_size)] = None
    if len(ids) > MAX_STOP_IDS:
        where = " and ".join(fields.where for fields in files)
        raise UnsupportedModel(
            f"{where}: eos_token_id lists {len(ids)} ids; at most {MAX_STOP_IDS} are supported"
        )
    return tuple(ids)


def _token_id(fields: Fields, name: str, value: object, vocab_size: int) -> int:
    token = fields.as_whole(name, value, low=0)
    if token >= vocab_size:
        raise fields.wrong(name, f"below vocab_size ({vocab_size})", value)
    return token


def with_ignored(spec: S, fields: Fields) -> S:
    """`spec` with a note of the fields that nothing has read."""
    ignored = tuple(sorted(fields.values.keys() - fields.used - WITHOUT_EFFECT))
    if not ignored:
        return spec
    note = f"fields of config.json that are not read: {', '.join(ignored)}"
    return replace(spec, ignored=ignored, notes=(*spec.notes, note))
