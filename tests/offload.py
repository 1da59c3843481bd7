"""Small random models, and what it takes to hold the offload engine against transformers with them."""

import os
import random
import signal
from pathlib import Path

import hypothesis.strategies as st
import psutil
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from engines.models import checkpoints
from engines.offload.engine import OffloadEngine
from engines.offload.kernels.quantizer import plain_quantizer, reference_quantizer
from engines.offload.memory.storage import Plain
from harness.api import (
    GenerationRequest,
    HardwareLimits,
    HarnessError,
    Job,
    ModelSpec,
    OffloadPolicy,
    SamplingParams,
    Score,
)

CONTEXT = 128
VOCAB = 512
#: Where greedy paths part, the reference's two best logits must be closer than this: float32 sums in another order.
NEAR_TIE = 1e-3
COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIGS = {
    "opt": COMMON | {"ffn_dim": 160, "word_embed_proj_dim": 64, "max_position_embeddings": CONTEXT},
    "llama": COMMON | {"intermediate_size": 160, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT},
}
#: Transposed matrices; caps and windows; experts.
OTHERS = {
    "gpt2": {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT},
    "gemma2": CONFIGS["llama"] | {"head_dim": 16, "sliding_window": 8},
    "mixtral": CONFIGS["llama"] | {"intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 4},
}


def save(folder, kind, dtype=torch.float32, **changes):
    """A random model whose logits differ enough to tell right from wrong."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**CONFIGS.get(kind, {}), **changes})
    module = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.05)
    module.to(dtype).save_pretrained(folder)
    return folder


WORDS = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(3, VOCAB))]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
)


def save_with_tokenizer(folder):
    """A random LLaMA with a tokenizer of whole words, `w3` to `w511`, and a template for chats."""
    save(folder, "llama", bos_token_id=0, eos_token_id=1)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return folder


def drop_tensor(folder, name):
    """Takes a tensor out of a model of one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


def prepare(folder):
    """The model in a folder, described for `load`."""
    return checkpoints.prepare(ModelSpec(str(folder)), Path(folder) / "cache")


def tiny(folder, kind, dtype=torch.float32, **changes):
    """A random model (see `save`), described for `load`."""
    return prepare(save(folder, kind, dtype, **changes))


#: Compiled once for all processes and sessions that find the same sources: it takes a compiler seconds.
KERNELS = Path(__file__).parents[1] / ".pytest_cache" / "kernels"


def with_kernels(cache):
    """The same cache folder, with compiled kernels in it."""
    Path(cache).mkdir(parents=True, exist_ok=True)
    if not (Path(cache) / "kernels").exists():
        KERNELS.mkdir(parents=True, exist_ok=True)
        (Path(cache) / "kernels").symlink_to(KERNELS)
    return cache


def load(model, cache, /, budget=None, device=None, max_sequence=64, engine=None, reproducible=False, **policy):
    """An engine, by default the offload engine, with a model loaded within `budget` bytes, and its report."""
    engine = engine or OffloadEngine()
    job = Job(cache, with_kernels(cache), max_sequence, max_sequence, reproducible=reproducible)
    limits = HardwareLimits(device_memory=device, host_memory=budget)
    return engine, engine.load(model, OffloadPolicy(**policy), limits, job)


def rank_pids():
    """Ranks that this process has started."""
    found = psutil.Process().children()
    return sorted(child.pid for child in found if "engines.offload.rank" in child.cmdline())


def check_a_killed_rank_is_named(engine, pid):
    """Kills a rank amid a job: an error names it, and no rank is left."""
    results = engine.generate(requests_of(3, 8, eos=False))
    next(results)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(HarnessError, match=r"all ranks have ended: rank \d died of SIGKILL"):
        list(results)
    with pytest.raises(HarnessError, match="load the model again"):
        list(engine.generate(requests_of(3, 2)))
    engine.close()
    assert rank_pids() == []


def answers(engine, requests):
    """Each request's tokens by its id."""
    return {result.id: result.tokens for result in engine.generate(requests)}


def load_and_answer(model, cache, requests, /, **policy):
    """What an engine loaded for these requests alone answers, and what its load reported."""
    engine, report = load(model, cache, **policy)
    found = answers(engine, requests)
    engine.close()
    return found, report


def all_greedy(reference, requests, tokens):
    """Whether each request's tokens, by its id, are the reference's own but for near ties."""
    return all(same_by_the_near_tie_rule(reference, request, tokens[request.id]) for request in requests)


def logits_of(reference, context, continuation):
    """The reference's logits from which it would choose each token of the continuation."""
    with torch.no_grad():
        return reference(torch.tensor([[*context, *continuation[:-1]]])).logits[0, len(context) - 1 :]


def exact_score(reference, context, continuation):
    """The reference's score of a continuation, in float64."""
    log_probs = logits_of(reference, context, continuation).double().log_softmax(-1)
    chosen = torch.tensor(continuation)
    return Score(log_probs.gather(1, chosen[:, None]).sum().item(), bool((log_probs.argmax(-1) == chosen).all()))


def greedy(reference, prompt, count, **options):
    """The tokens that transformers' own generation chooses."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    found = reference.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=count, **options)
    return tuple(found[0, len(prompt) :].tolist())


def same_by_the_near_tie_rule(reference, request, tokens):
    """Greedy by the reference's own logits, token by token, but for choices between near-equals."""
    logits = logits_of(reference, request.prompt, tokens)
    eos = reference.generation_config.eos_token_id
    if request.sampling.ignore_eos and eos is not None:
        logits[:, eos] = -torch.inf
    best = logits.max(dim=-1).values
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return bool((best - chosen < NEAR_TIE).all())


@st.composite
def policies(draw):
    """Schedules, batches, cuts of prompts and placements; with 16 tokens planned for a sequence some must wait."""
    schedule = draw(st.sampled_from(["row", "zigzag", "sweep"]))
    resident = draw(st.sampled_from([None, 0.0, 0.4, 1.0]))
    return {
        "schedule": schedule,
        "gpu_batch_size": draw(st.integers(1, 6)),
        "num_gpu_batches": draw(st.integers(1, 3)) if schedule == "zigzag" else 1,
        "prefill_chunk": draw(st.sampled_from([None, 1, 5, 64])),
        "weights": None if resident is None else (0.0, resident, 1.0 - resident),
        "max_sequence": draw(st.sampled_from([16, 64])),
    }


def words(rng, count):
    """Random tokens that no model here gives a meaning to."""
    return tuple(rng.randrange(5, VOCAB) for _ in range(count))


def requests_of(seed, count, eos=True):
    rng = random.Random(seed)
    return [
        GenerationRequest(
            f"r{i}",
            words(rng, rng.randint(1, 40)),
            SamplingParams(max_tokens=rng.randint(1, 24), ignore_eos=eos and rng.random() < 0.7),
        )
        for i in range(count)
    ]


#: Five requests of six tokens.
GOOD = [GenerationRequest(f"g{i}", (5 + i, 6, 7), SamplingParams(6, ignore_eos=True)) for i in range(5)]


def quantizer_of(stored):
    """The definition of how keys and values are stored so."""
    return plain_quantizer(stored) if isinstance(stored, Plain) else reference_quantizer(stored)


def hadamard_matrix(size):
    """Sylvester's matrix, orthogonal: float32 [size, size], of a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / size**0.5
