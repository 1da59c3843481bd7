"""The good files that bad ones are made from: a suite, a run's records, requests, a profile, a history, a model."""

import functools
import json
import shlex
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import hardware

ROOT = Path(__file__).parents[2]
#: This interpreter, as a word of a line of sh.
PYTHON = shlex.quote(sys.executable)

SUITE = b"""\
name: tiny
description: a suite for the barrage
model: {id: fake}
workload: {kind: synthetic, prompt_len: 8, gen_len: 4}
machine_probe: false
warmup: 0
repeats: 1
timeout: 10s
matrix:
  - {name: a, engine: fake}
"""
#: Its requests have the lengths of trace.csv, or it searches its batch.
TRACED = SUITE.replace(b"kind: synthetic", b"kind: trace, trace: trace.csv, num_requests: 2")
TUNED = SUITE.replace(b"gen_len: 4}", b"gen_len: 4, num_requests: 2}").replace(b"a, ", b"a, policy: max_batch, ")
TRACE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n0,4,2\n1,5,3\n"
REQUESTS = b'{"custom_id": "one", "prompt": "w3 w4", "max_tokens": 2}\n{"prompt": "w5", "max_tokens": 2, "seed": 7}\n'
#: As `harness generate` writes it, for another model.
ANSWERS = b'{"line":1,"custom_id":"one","response":{},"error":null,"line_digest":"0","model_digest":"0"}\n'
PROFILE = (Path(hardware.__file__).parent / "laptop_cpu.yaml").read_bytes()

GENERATE = ("generate", "--input", "in.jsonl", "--output", "out.jsonl", "--memory", "2GiB")
FAKE = ("--model", "fake", "--engine", "fake")
#: Reads the folder `model` and the tokenizer in it, and plans, but loads nothing.
OFFLOAD = (*GENERATE, "--model", "model", "--engine", "offload", "--dry-run")
PLAN = ("plan", "facebook/opt-1.3b", "--prompt-len", "8", "--gen-len", "8", "--hardware", "laptop_cpu")
RUN = ("run", "tiny.yaml", "--out", "out", "--no-report", "--extra-tries", "0")

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GENERATION_CONFIG = {"bos_token_id": 0, "eos_token_id": 1}
_WORDS = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(3, 32))]
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": i, "content": _WORDS[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i in range(3)
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(_WORDS)}, "unk_token": "<unk>"},
}  # fmt: skip
TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "TokenizersBackend",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}",
}


def tensors() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's tensors."""
    hidden, wide, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    layer = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    layer |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
    layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    return {
        "model.embed_tokens.weight": (vocab, hidden),
        **{f"model.layers.0.{name}.weight": shape for name, shape in layer.items()},
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }


def header() -> dict[str, dict[str, Any]]:
    """The header of the model's safetensors file."""
    entries, end = {}, 0
    for name, shape in tensors().items():
        begin, end = end, end + 4 * functools.reduce(int.__mul__, shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    return entries


def safetensors(text: bytes | None = None, length: int | None = None) -> bytes:
    """The model's safetensors file, with `text` for its header, or with another `length` of it than it has."""
    head = json.dumps(header()).encode() if text is None else text
    size = max(entry["data_offsets"][1] for entry in header().values())
    return struct.pack("<Q", len(head) if length is None else length) + head + bytes(size)


def index() -> dict[str, Any]:
    """The model's index, of a single shard."""
    return {"metadata": {}, "weight_map": dict.fromkeys(tensors(), "model.safetensors")}


def record() -> dict[str, Any]:
    """A launch that was measured, with its requests, in the newest schema that has one."""
    golden = sorted((ROOT / "tests" / "golden").glob("record_v*.jsonl"), key=lambda path: int(path.stem[8:]))
    rows = [json.loads(line) for path in golden for line in path.read_text().splitlines()]
    found: dict[str, Any] = [row for row in rows if row["requests"] and row["status"] == "ok"][-1]
    return found | {"simulated": False}  # histories and explanations leave predictions out


def lines(*rows: object) -> bytes:
    """JSON lines."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@functools.cache
def history() -> bytes:
    """A SQLite history with that record in it."""
    from harness.api import parse_record
    from reports.history import open_history

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "h.db"
        store = open_history(f"sqlite:///{path}", make=True)
        store.add([parse_record(json.dumps(record()).encode(), "good")])
        store.close()
        return path.read_bytes()


def write(folder: Path) -> None:
    """Writes all good files but the model into the folder of a case."""
    for name in ("rec", "aa", "cache"):
        (folder / name).mkdir()
    for name in ("rec", "aa"):
        (folder / name / "records.jsonl").write_bytes(lines(record()))
    files = {
        "tiny.yaml": SUITE,
        "traced.yaml": TRACED,
        "tuned.yaml": TUNED,
        "trace.csv": TRACE,
        "in.jsonl": REQUESTS,
        "in.txt": b"w3 w4\n\nw5\n",
        "hw.yaml": PROFILE,
        "h.db": history(),
        "file": b"a file, where a folder would be needed\n",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)


def write_model(folder: Path) -> None:
    """Writes the folder `model`, of a LLaMA so small that its file is a few KB."""
    (folder / "model").mkdir()
    for name, content in model_files().items():
        (folder / "model" / name).write_bytes(content)


def model_files() -> dict[str, bytes]:
    """The files of that folder; its index is not needed."""
    parts = {
        "config.json": CONFIG,
        "generation_config.json": GENERATION_CONFIG,
        "tokenizer.json": TOKENIZER,
        "tokenizer_config.json": TOKENIZER_CONFIG,
    }
    return {name: json.dumps(part).encode() for name, part in parts.items()} | {"model.safetensors": safetensors()}
