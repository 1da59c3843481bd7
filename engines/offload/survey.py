"""Lists the transformers architectures that the engine runs, by trying each.

`python -m engines.offload.survey > docs/reference/architectures.md`, or `make architectures`.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engines.models.checkpoints import prepare, shape_of
from engines.offload.engine import OffloadEngine
from engines.offload.model.meta_model import MetaModel
from harness.api import HardwareLimits, HarnessError, Job, ModelSpec, OffloadPolicy

_LAYERS = 4  # enough for every kind of layer that a default configuration alternates
_LARGEST = 50_000_000  # parameters of a small model
#: Sizes of a small model by configuration key; an architecture gets the keys that its configuration has.
_SMALL: Mapping[str, int] = {
    "vocab_size": 512, "max_position_embeddings": 128, "n_positions": 128, "sliding_window": 8,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "word_embed_proj_dim": 64, "head_dim": 16,
    "num_hidden_layers": 3, "n_layer": 3, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2,
    "intermediate_size": 160, "ffn_dim": 160, "n_inner": 160, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ALWAYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")  # all configurations take these
_CONTEXTS = (1, 20, 45)  # tokens: within and beyond the sliding window, and in several chunks
_CHUNK = 11
_CONTINUATION = (7, 8, 9)


def refusal(kind: str) -> str:
    """Why the engine refuses an architecture's default configuration; empty if it runs it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _default(kind).save_pretrained(folder)
        except Exception as exc:  # some have no default
            return f"it has no default configuration ({type(exc).__name__})"
        try:
            MetaModel(Path(folder), shape_of(Path(folder)), torch.float32)
        except HarnessError as exc:
            return str(exc).replace(f"{folder}/", "").removeprefix(f"{kind}: ")
    return ""


def difference(kind: str) -> float | None:
    """The largest relative difference between the engine's and transformers' log-probabilities, in float32.

    Measured on a small random model of the architecture, with chunked prompts; None if its configuration has no small
    form. Raises HarnessError if the engine refuses the small model.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not _save_small(kind, folder / "model"):
            return None
        torch.manual_seed(1)
        pairs = [(tuple(torch.randint(5, 500, (n,)).tolist()), _CONTINUATION) for n in _CONTEXTS]
        reference = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager").eval()
        expected = [_logprob(reference, *pair) for pair in pairs]
        engine = OffloadEngine()
        policy = OffloadPolicy(schedule="sweep", gpu_batch_size=len(pairs), prefill_chunk=_CHUNK)
        try:
            local = prepare(ModelSpec(str(folder / "model")), folder)
            engine.load(local, policy, HardwareLimits(), Job(folder, folder, 64, 64))
            scores = engine.score(pairs)
        finally:
            engine.close()
    return max(abs(score.logprob - value) / abs(value) for score, value in zip(scores, expected, strict=True))


def _default(kind: str) -> transformers.PretrainedConfig:
    """The default configuration, with few layers if it accepts that."""
    try:
        return AutoConfig.for_model(kind, num_hidden_layers=_LAYERS)
    except Exception:  # for example, it has a list with an entry per layer
        return AutoConfig.for_model(kind)


def _save_small(kind: str, folder: Path) -> bool:
    """Saves a small random model with weights large enough that errors show in its logits; False if there is none."""
    try:
        defaults = AutoConfig.for_model(kind).to_dict()
        sizes = {k: v for k, v in _SMALL.items() if k in _ALWAYS or defaults.get(k) is not None}
        if defaults.get("num_key_value_heads") == 1:
            del sizes["num_key_value_heads"]
        config = AutoConfig.for_model(kind, **sizes)
        with torch.device("meta"):
            if sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters()) > _LARGEST:
                return False
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    except Exception:  # each configuration has its own conditions
        return False
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return True


@torch.inference_mode()
def _logprob(model: Any, context: Sequence[int], continuation: Sequence[int]) -> float:
    logits = model(torch.tensor([[*context, *continuation]]), use_cache=False).logits[0, len(context) - 1 : -1]
    chosen = logits.double().log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])
    return float(chosen.sum())


def _measured(kind: str) -> str:
    try:
        largest = difference(kind)
    except HarnessError as exc:
        return f"the small model is refused: {exc}".replace("|", "/")
    return "no small model" if largest is None else f"{largest:.0e}"


def _table() -> str:
    kinds = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    runs: list[str] = []
    refused: list[str] = []
    for number, kind in enumerate(kinds, 1):
        reason = refusal(kind).replace("|", "/")
        outcome = reason or _measured(kind)
        (refused if reason else runs).append(f"| `{kind}` | {outcome} |")
        sys.stderr.write(f"[{number}/{len(kinds)}] {kind}: {outcome}\n")
    return "\n".join(
        [
            "# Architectures",
            "",
            f"The causal models of transformers {transformers.__version__} that the offload engine runs or refuses,",
            "generated by `make architectures`. Each default configuration is tried on the meta device; the engine",
            "refuses an architecture with the reason below, before it loads anything. An architecture that runs is",
            "compared with transformers on a small random model in float32; the difference is the largest relative",
            "difference of a log-probability, with prompts in chunks and beyond sliding windows.",
            "",
            f"{len(runs)} of {len(kinds)} run.",
            "",
            "| runs | difference |",
            "|---|---|",
            *runs,
            "",
            "| refused | reason |",
            "|---|---|",
            *refused,
            "",
        ]
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sys.stdout.write(_table())
