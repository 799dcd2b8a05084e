# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's config says of its model, as plain data. `read_model_spec` fills it in."""

from __future__ import annotations

from dataclasses import dataclass

from freewheel.spec.quantization import QuantizationSpec


@dataclass(frozen=True)
class YarnSpec:
    """YaRN's interpolation of the rotary frequencies (Peng et al. 2023, section 3.2).

    `cos_sin_factor` multiplies the rotary tables themselves. The temperature that DeepSeek applies
    to the attention logits instead is folded into `AttentionSpec.scale`.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    cos_sin_factor: float
    truncate: bool


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of `dim` dimensions. `yarn` None: no scaling of the frequencies."""

    dim: int
    theta: float
    yarn: YarnSpec | None


@dataclass(frozen=True)
class AttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, section 2.1).

    `scale` multiplies q.k: (nope_dim + rope_dim)^-0.5, times YaRN's mscale squared where the
    config has one. `interleaved`: rotary pairs are neighbours (2i, 2i+1), else halves (i, i+dim/2).
    `latent_norm_eps`: of the two norms inside attention, which these families fix at 1e-6 whatever
    `rms_norm_eps` says (transformers' reference and DeepSeek's own agree).
    """

    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    interleaved: bool
    latent_norm_eps: float = 1e-6

    @property
    def query_dim(self) -> int:
        """Width of one head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_width(self) -> int:
        """Elements that one token stores: the normed latent, then the rotated shared key."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True)
class IndexerSpec:
    """The lightning indexer (DeepSeek-V3.2, section 2.1), which picks `topk` keys for each query.

    `full_layers[i]`: layer i runs its own indexer; otherwise it reuses the picks of the nearest
    full layer below (GLM-5.2). `interleaved` is the indexer's own rotary layout, which differs
    from the attention's in DeepSeek-V3.2.
    """

    heads: int
    dim: int
    topk: int
    interleaved: bool
    full_layers: tuple[bool, ...]
    key_norm_eps: float = 1e-6


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts with sigmoid scores and a selection bias (DeepSeek-V3, section 2.1.2).

    `groups` experts' groups, of which the best `top_groups` stay in the running; `top_k` experts a
    token, each `width` wide; `shared` experts of the same width run for every token.
    """

    experts: int
    top_k: int
    groups: int
    top_groups: int
    width: int
    shared: int
    normalise: bool
    scale: float


@dataclass(frozen=True)
class MtpSpec:
    """One multi-token-prediction layer (DeepSeek-V3, section 2.2), stored behind the last layer.

    `layer` is its index in the checkpoint's names; `sparse`: its MLP is a mixture of experts.
    """

    layer: int
    sparse: bool


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What every family has.

    `family` is config.json's `model_type`. `eos_ids`: union of config.json and
    generation_config.json. `ignored`: fields of config.json that nothing here reads. `notes`:
    sentences about choices a user may want to know.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    norm_eps: float
    max_positions: int
    tied_head: bool
    quantization: QuantizationSpec | None
    mtp: MtpSpec | None
    bos_id: int | None
    eos_ids: tuple[int, ...]
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def page_multiple(self) -> int:
        """What the tokens of a cache page must be a multiple of."""
        return 1

    @property
    def mtp_prefix(self) -> str:
        """How the names of the multi-token-prediction layer's tensors begin.

        The trailing dot keeps layer 6 apart from layer 61.
        """
        return f"model.layers.{self.layers}."

    @property
    def mtp_prefixes(self) -> tuple[str, ...]:
        """`mtp_prefix`, and others by which a checkpoint may call the same layer."""
        return (self.mtp_prefix,)

    @property
    def reading(self) -> str:
        """What a query attends to, for people."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DsaSpec(ModelSpec):
    """A model of the DeepSeek-sparse-attention kind.

    `sparse_layers[i]`: layer i's MLP is a mixture of experts.
    """

    dense_width: int
    attention: AttentionSpec
    indexer: IndexerSpec
    rope: RopeSpec
    moe: MoeSpec | None
    sparse_layers: tuple[bool, ...]

    @property
    def topk(self) -> int:
        """Keys that a query attends to at most."""
        return self.indexer.topk

    @property
    def reading(self) -> str:
        return f"the best {self.topk} earlier tokens"
