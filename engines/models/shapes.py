"""Published shapes of the models that suites name, so that planning and dummy weights need no network."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.api import HarnessError, ModelShape


@dataclass(frozen=True)
class _Opt:
    """OPT (Zhang et al. 2022, table 1): learned positions, biases, tied embeddings, ffn = 4 x hidden."""

    layers: int
    hidden: int
    heads: int
    embed: int | None = None  # word_embed_proj_dim, where it differs from hidden (350m only)
    pre_norm: bool = True  # False: layer norm after each block (350m only)

    def config(self) -> dict[str, Any]:
        return {
            "model_type": "opt",
            "vocab_size": 50272,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "ffn_dim": 4 * self.hidden,
            "num_attention_heads": self.heads,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": self.embed or self.hidden,
            "do_layer_norm_before": self.pre_norm,
            "activation_function": "relu",
            "dropout": 0.1,
            "tie_word_embeddings": True,
            "pad_token_id": 1,
            "bos_token_id": 2,
            "eos_token_id": 2,
        }

    def shape(self) -> ModelShape:
        hidden, ffn, vocab, context = self.hidden, 4 * self.hidden, 50272, 2048
        embed = self.embed or hidden
        matrices = 4 * hidden * hidden + 2 * hidden * ffn
        biases_and_norms = 4 * hidden + ffn + hidden + 2 * (2 * hidden)
        projections = 2 * embed * hidden if embed != hidden else 0
        final_norm = 2 * hidden if self.pre_norm else 0
        positions = (context + 2) * hidden  # OPT offsets its positions by 2
        return ModelShape(
            family="opt",
            num_layers=self.layers,
            hidden=hidden,
            ffn=ffn,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=hidden // self.heads,
            vocab=vocab,
            max_context=context,
            params_per_layer=matrices,
            params_total=self.layers * (matrices + biases_and_norms)
            + vocab * embed
            + positions
            + projections
            + final_norm,
        )


@dataclass(frozen=True)
class _Llama:
    """LLaMA 1 to 3.2 (Touvron et al. 2023; Grattafiori et al. 2024): rotary positions, gated FFN, no biases.

    Qwen 2.5 (Qwen team 2024) adds biases on queries, keys and values. Mixtral (Jiang et al. 2024), OLMoE (Muennighoff
    et al. 2024) and Qwen 3 (Qwen team 2025) have `experts` feed-forwards of `ffn` in a layer, `active` of them for a
    token; the last two normalize queries and keys.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int = 32000
    context: int = 2048
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_factor: float | None = None  # the rotary frequency scaling of 3.1 and 3.2, beyond 8192 positions
    tied: bool = False
    family: str = "llama"
    experts: int = 1
    active: int = 1
    special: tuple[int, int] = (1, 2)  # ids of beginning and end of sequence
    head_dim: int = 0  # 0: hidden / heads

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)

    def config(self) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_factor is not None:
            rope |= {
                "rope_type": "llama3",
                "factor": self.rope_factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        count = "num_local_experts" if self.family == "mixtral" else "num_experts"
        router = {count: self.experts, "num_experts_per_tok": self.active} if self.experts > 1 else {}
        if self.family == "qwen3_moe":
            router |= {"moe_intermediate_size": self.ffn, "norm_topk_prob": True}
        return router | {
            "model_type": self.family,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "rope_parameters": rope,
            "tie_word_embeddings": self.tied,
            "bos_token_id": self.special[0],
            "eos_token_id": self.special[1],
        }

    def shape(self) -> ModelShape:
        attention = 2 * self.hidden * self.heads * self.head_dim + 2 * self.hidden * self.kv_heads * self.head_dim
        forward = 3 * self.hidden * self.ffn
        router = self.hidden * self.experts if self.experts > 1 else 0
        matrices = attention + router + forward * self.active
        idle = self.layers * forward * (self.experts - self.active)
        vectors = {
            "qwen2": (self.heads + 2 * self.kv_heads) * self.head_dim,  # biases
            "olmoe": (self.heads + self.kv_heads) * self.head_dim,  # norms of all heads together
            "qwen3_moe": 2 * self.head_dim,  # norms of each head
        }.get(self.family, 0)
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return ModelShape(
            family=self.family,
            num_layers=self.layers,
            hidden=self.hidden,
            ffn=self.ffn,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab=self.vocab,
            max_context=self.context,
            params_per_layer=matrices,
            params_total=self.layers * (matrices + vectors + 2 * self.hidden) + idle + embeddings + self.hidden,
            params_idle=idle,
        )


def _llama3(
    layers: int, hidden: int, ffn: int, heads: int, *, rope_factor: float | None = None, tied: bool = False
) -> _Llama:
    context = 8192 if rope_factor is None else 131072
    return _Llama(
        layers, hidden, ffn, heads, 8, 128256, context, 1e-5, 500000.0, rope_factor, tied, special=(128000, 128001)
    )


def _qwen(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, *, small: bool = False, context: int = 131072
) -> _Llama:
    """Qwen 2.5; the small models tie their embeddings."""
    vocab, special = 151936 if small else 152064, (151643, 151643)
    return _Llama(
        layers, hidden, ffn, heads, kv_heads, vocab, context, 1e-6, 1e6, tied=small, family="qwen2", special=special
    )


def _mixtral(layers: int, hidden: int, ffn: int, heads: int, context: int) -> _Llama:
    return _Llama(layers, hidden, ffn, heads, 8, 32000, context, 1e-5, 1e6, family="mixtral", experts=8, active=2)


def _olmoe(layers: int) -> _Llama:
    special = (50279, 50279)
    return _Llama(layers, 2048, 1024, 16, 16, 50304, 4096, 1e-5, family="olmoe", experts=64, active=8, special=special)


def _qwen3_moe(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> _Llama:
    special, family = (151643, 151645), "qwen3_moe"
    return _Llama(
        layers, hidden, ffn, heads, kv_heads, 151936, 40960, 1e-6, 1e6, None, False, family, 128, 8, special, 128
    )


_MODELS: Mapping[str, _Opt | _Llama] = {
    "facebook/opt-125m": _Opt(12, 768, 12),
    "facebook/opt-350m": _Opt(24, 1024, 16, embed=512, pre_norm=False),
    "facebook/opt-1.3b": _Opt(24, 2048, 32),
    "facebook/opt-2.7b": _Opt(32, 2560, 32),
    "facebook/opt-6.7b": _Opt(32, 4096, 32),
    "facebook/opt-13b": _Opt(40, 5120, 40),
    "facebook/opt-30b": _Opt(48, 7168, 56),
    "facebook/opt-66b": _Opt(64, 9216, 72),
    "facebook/opt-175b": _Opt(96, 12288, 96),
    "huggyllama/llama-7b": _Llama(32, 4096, 11008, 32, 32, norm_eps=1e-6),
    "huggyllama/llama-13b": _Llama(40, 5120, 13824, 40, 40, norm_eps=1e-6),
    "huggyllama/llama-30b": _Llama(60, 6656, 17920, 52, 52, norm_eps=1e-6),
    "huggyllama/llama-65b": _Llama(80, 8192, 22016, 64, 64),
    "meta-llama/Llama-2-7b-hf": _Llama(32, 4096, 11008, 32, 32, context=4096),
    "meta-llama/Llama-2-13b-hf": _Llama(40, 5120, 13824, 40, 40, context=4096),
    "meta-llama/Llama-2-70b-hf": _Llama(80, 8192, 28672, 64, 8, context=4096),
    "meta-llama/Meta-Llama-3-8B": _llama3(32, 4096, 14336, 32),
    "meta-llama/Meta-Llama-3-70B": _llama3(80, 8192, 28672, 64),
    "meta-llama/Llama-3.1-8B": _llama3(32, 4096, 14336, 32, rope_factor=8.0),
    "meta-llama/Llama-3.1-70B": _llama3(80, 8192, 28672, 64, rope_factor=8.0),
    "meta-llama/Llama-3.2-1B": _llama3(16, 2048, 8192, 32, rope_factor=32.0, tied=True),
    "meta-llama/Llama-3.2-3B": _llama3(28, 3072, 8192, 24, rope_factor=32.0, tied=True),
    "Qwen/Qwen2.5-0.5B": _qwen(24, 896, 4864, 14, 2, small=True, context=32768),
    "Qwen/Qwen2.5-1.5B": _qwen(28, 1536, 8960, 12, 2, small=True),
    "Qwen/Qwen2.5-3B": _qwen(36, 2048, 11008, 16, 2, small=True, context=32768),
    "Qwen/Qwen2.5-7B": _qwen(28, 3584, 18944, 28, 4),
    "Qwen/Qwen2.5-14B": _qwen(48, 5120, 13824, 40, 8),
    "Qwen/Qwen2.5-32B": _qwen(64, 5120, 27648, 40, 8),
    "Qwen/Qwen2.5-72B": _qwen(80, 8192, 29568, 64, 8),
    "mistralai/Mixtral-8x7B-v0.1": _mixtral(32, 4096, 14336, 32, 32768),
    "mistralai/Mixtral-8x22B-v0.1": _mixtral(56, 6144, 16384, 48, 65536),
    "allenai/OLMoE-1B-7B-0924": _olmoe(16),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(48, 2048, 768, 32, 4),
    # not published: a quarter of OLMoE's layers, for a machine without a GPU
    "twin/quarter-of-olmoe": _olmoe(4),
    # not published: LLaMA layers in the bytes of OPT-1.3b, for engines that do not implement OPT
    "twin/llama-of-opt-1.3b": _Llama(24, 2048, 5504, 32, 32, 50272, tied=True),
    # not published: negligible sizes that run the same code
    "tiny/opt": _Opt(2, 64, 2),
    "tiny/llama": _Llama(2, 64, 176, 2, 2),
    "tiny/olmoe": _Llama(2, 64, 64, 2, 2, family="olmoe", experts=8, active=2),
}

#: ModelShape by hub id, ordered by family and size.
CATALOGUE: Mapping[str, ModelShape] = {model_id: entry.shape() for model_id, entry in _MODELS.items()}


def tiny(family: str) -> str:
    """The id of the smallest model of a family; LLaMA's for a family without a tiny model."""
    return f"tiny/{family}" if f"tiny/{family}" in _MODELS else "tiny/llama"


def shape(model_id: str) -> ModelShape:
    """The shape of a model of the catalogue. Raises HarnessError naming the nearest id for an unknown one."""
    return CATALOGUE[_catalogue_id(model_id)]


def config_kwargs(model_id: str) -> dict[str, Any]:
    """Keywords for transformers' `AutoConfig.for_model`, with the model's published context length.

    Raises HarnessError for an id that is not in the catalogue.
    """
    return _MODELS[_catalogue_id(model_id)].config()


def _catalogue_id(model_id: str) -> str:
    if model_id in _MODELS:
        return model_id
    nearest = difflib.get_close_matches(model_id, _MODELS, n=1, cutoff=0.0)[0]
    raise HarnessError(
        f"model {model_id!r} is not in the catalogue of shapes (nearest: {nearest}); "
        "use one of `harness ls models`, or weights: auto"
    )
