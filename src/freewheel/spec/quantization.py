# SPDX-License-Identifier: Apache-2.0
"""What config.json says of quantised weights. How a tensor is stored, its file's header says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from freewheel.errors import CheckpointError, UnsupportedModel
from freewheel.spec.config_fields import MISSING, Fields

BLOCK = 128
"""Rows and columns that one scale of an FP8 weight covers."""

METHOD = "fp8"

REQUIRED_VALUES: Mapping[str, tuple[object, ...]] = {
    "quant_method": (METHOD,),
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8", "fp4"),
}
"""Fields that say what the stored numbers mean, and the values that are implemented."""

IRRELEVANT = frozenset(
    {"dequantize", "modules_to_convert", "kv_cache_scheme", "quantization_status", "version"}
)


@dataclass(frozen=True)
class QuantizationSpec:
    """`quantization_config`: FP8 weights with one scale for each 128 x 128 block.

    `scale_fmt`: "ue8m0" where scales are powers of two, "float" otherwise. `expert_dtype`: what it
    says of routed experts, None where it says nothing. `excluded`: modules that it says are not
    quantised, by name or by the end of it.
    """

    scale_fmt: str
    expert_dtype: str | None
    excluded: tuple[str, ...]

    def excludes(self, module: str) -> bool:
        """Whether `module`, a tensor's name without its last part, is said not to be quantised."""
        return any(
            module == own or module.startswith(f"{own}.") or module.endswith(f".{own}")
            for own in self.excluded
        )


def read_quantization(fields: Fields) -> QuantizationSpec | None:
    """What `quantization_config` says; None if it is absent.

    Raises UnsupportedModel, naming the field, for any other method than FP8 in 128 x 128 blocks.
    """
    given = fields.mapping("quantization_config")
    if not given:
        return None
    own = Fields(given, f"{fields.where}: quantization_config")
    method = own.text("quant_method", "unnamed")
    if method != METHOD:
        raise UnsupportedModel(
            f"{own.where} names the method {method!r}, which is not supported; supported: "
            f"{METHOD} in blocks of {BLOCK} x {BLOCK}"
        )
    _refuse_other_values(own)
    _check_block(own)
    experts = own if own.has("expert_dtype") else fields  # DeepSeek-V4 has it at the top
    excluded = own.items("modules_to_not_convert") or own.items("ignored_layers") or ()
    if not all(isinstance(name, str) and name for name in excluded):
        raise own.wrong("modules_to_not_convert", "a list of names", list(excluded))
    _refuse_unknown(own)
    return QuantizationSpec(
        scale_fmt=own.text("scale_fmt", "float"),
        expert_dtype=experts.text("expert_dtype") if experts.has("expert_dtype") else None,
        excluded=tuple(str(name) for name in excluded),
    )


def _refuse_other_values(own: Fields) -> None:
    for name, known in REQUIRED_VALUES.items():
        value = own.get(name)
        if value is not MISSING and value not in known:
            raise UnsupportedModel(
                f"{own.where}: {name} {value!r} is not supported; supported: "
                f"{', '.join(map(repr, known))}"
            )


def _check_block(own: Fields) -> None:
    sizes = own.items("weight_block_size")
    if sizes is None:
        raise UnsupportedModel(
            f"{own.where}: weight_block_size is missing, so that one scale would serve a whole "
            f"weight; supported: [{BLOCK}, {BLOCK}]"
        )
    if sizes != (BLOCK, BLOCK):
        raise UnsupportedModel(
            f"{own.where}: weight_block_size {list(sizes)} is not supported; supported: "
            f"[{BLOCK}, {BLOCK}]"
        )


def _refuse_unknown(own: Fields) -> None:
    known = own.used | REQUIRED_VALUES.keys() | IRRELEVANT | {"ignored_layers"}
    unknown = sorted(name for name in own.values.keys() - known if own.has(name))
    if unknown:
        raise CheckpointError(
            f"{own.where}: {', '.join(unknown)} is not known, and might change what weights mean"
        )
