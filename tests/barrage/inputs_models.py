"""Model folders and GGUF files that lie: about sizes, offsets, names of files, chat templates and tokenizers."""

import base64
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.barrage import good
from tests.barrage.case import FAILED, REFUSED, Case
from tests.barrage.odd_files import put

KIND = "models"
_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size",
          "vocab_size", "max_position_embeddings", "head_dim", "num_labels", "num_local_experts",
          "num_experts_per_tok", "pad_token_id")  # fmt: skip
_VALUES: Mapping[str, Any] = {
    "billions": 3_000_000_000,
    "10-to-30": 10**30,
    "minus-one": -1,
    "zero": 0,
    "half": 1.5,
    "text": "many",
    "null": None,
    "list": [1],
}
#: Whole changes of the configuration.
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "unknown-type": {"model_type": "nonsense"},
    "type-with-a-path": {"model_type": "../../x"},
    "type-is-a-number": {"model_type": 5},
    "no-causal-model": {"model_type": "vit", "architectures": ["ViTModel"]},
    "code-of-its-own": {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"},
    "experts-by-the-billion": {"model_type": "mixtral", "num_local_experts": 3_000_000_000},
    "experts-negative": {"model_type": "mixtral", "num_local_experts": -4},
    "experts-of-text": {"model_type": "mixtral", "num_local_experts": "many"},
    "layer-types": {"model_type": "qwen2", "layer_types": ["nonsense"] * 5},
    "rope": {"rope_parameters": {"rope_type": "nonsense", "rope_theta": -1}},
    "rope-of-text": {"rope_scaling": "fast"},
    "labels": {"id2label": {str(i): "x" for i in range(100_000)}},
    "quantized": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "quantized-by-nobody": {"quantization_config": {"quant_method": "nonsense"}},
    "dtype": {"dtype": "nonsense", "torch_dtype": "nonsense"},
    "activation": {"hidden_act": "__import__('os').abort"},
    "nested-text-config": {"text_config": {"text_config": {"num_hidden_layers": 10**9}}},
    "attention": {"_attn_implementation": "nonsense", "attn_implementation": "nonsense"},
}
_FIRST = "lm_head.weight"
#: Changes of a tensor's entry in the header of a safetensors file.
_ENTRIES: Mapping[str, Any] = {
    "no-dtype": {"dtype": None},
    "unknown-dtype": {"dtype": "F7"},
    "dtype-is-a-list": {"dtype": ["F32"]},
    "shape-negative": {"shape": [-32, -16]},
    "shape-overflows": {"shape": [2**40, 2**40]},
    "shape-of-another-size": {"shape": [33, 16]},
    "shape-of-text": {"shape": "32x16"},
    "shape-of-texts": {"shape": ["many", "16"]},
    "shape-of-many": {"shape": [1] * 1_000_000},
    "shape-null": {"shape": None},
    "offsets-negative": {"data_offsets": [-2048, 0]},
    "offsets-backwards": {"data_offsets": [2048, 0]},
    "offsets-overlap": {"data_offsets": [0, 2048]},
    "offsets-beyond": {"data_offsets": [2**40, 2**40 + 2048]},
    "offsets-of-2-to-63": {"data_offsets": [2**63, 2**63 + 2048]},
    "offsets-three": {"data_offsets": [0, 1, 2048]},
    "offsets-of-text": {"data_offsets": ["0", "many"]},
    "offsets-of-floats": {"data_offsets": [0.5, 2048.5]},
    "offsets-of-nothing": {"data_offsets": []},
    "offsets-infinite": {"data_offsets": [0, float("inf")]},
}
_HEAD = json.dumps(good.header()).encode()
_HEADERS: Mapping[str, Callable[[], bytes]] = {
    "length-zero": lambda: good.safetensors(length=0),
    "length-2-to-63": lambda: good.safetensors(length=2**63),
    "length-2-to-64": lambda: good.safetensors(length=2**64 - 1),
    "length-2-to-40": lambda: good.safetensors(length=2**40),
    "length-short": lambda: good.safetensors(length=len(_HEAD) - 1),
    "length-long": lambda: good.safetensors(length=len(_HEAD) + 1),
    "seven-bytes": lambda: b"\x01" * 7,
    "list": lambda: good.safetensors(b"[]"),
    "empty": lambda: good.safetensors(b"{}"),
    "entries-of-numbers": lambda: good.safetensors(b'{"a": 5}'),
    "nested-lists": lambda: good.safetensors(b"[" * 1_000_000),
    "nested-metadata": lambda: good.safetensors(b'{"__metadata__": ' + b'{"a":' * 100_000),
    "twice": lambda: good.safetensors(_HEAD[:-1] + b"," + _HEAD[1:]),
    "invalid-utf8": lambda: good.safetensors(_HEAD.replace(b"lm_head", b"lm_h\xff\xfed")),
    "name-with-nul": lambda: good.safetensors(_HEAD.replace(b"lm_head", b"lm_\\u0000ead")),
    "name-with-a-surrogate": lambda: good.safetensors(_HEAD.replace(b"lm_head", b"lm_\\ud800ead")),
    "200-000-names": lambda: good.safetensors(
        json.dumps({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(200_000)}).encode()
    ),
    "cut": lambda: good.safetensors()[:-100],
    "longer": lambda: good.safetensors() + bytes(100),
}
_SHARD = "model.safetensors"
_INDEXES: Mapping[str, Any] = {
    "upwards": {"weight_map": {_FIRST: f"../{_SHARD}"}},
    "absolute": {"weight_map": {_FIRST: "/etc/passwd"}},
    "device": {"weight_map": {_FIRST: "/dev/zero"}},
    "below": {"weight_map": {_FIRST: f"sub/{_SHARD}"}},
    "nul": {"weight_map": {_FIRST: "model\0.safetensors"}},
    "digits": {"weight_map": {_FIRST: f"model-{'9' * 5000}-of-{'9' * 5000}.safetensors"}},
    "itself": {"weight_map": {_FIRST: "model.safetensors.index.json"}},
    "dot": {"weight_map": {_FIRST: "."}},
    "dots": {"weight_map": {_FIRST: ".."}},
    "no-name": {"weight_map": {_FIRST: ""}},
    "surrogate": {"weight_map": {_FIRST: "\ud800.safetensors"}},
    "missing": {"weight_map": {_FIRST: "model-00002-of-00002.safetensors"}},
    "number": {"weight_map": {_FIRST: 5}},
    "null": {"weight_map": {_FIRST: None}},
    "list-in-map": {"weight_map": {_FIRST: [_SHARD]}},
    "list": {"weight_map": [_SHARD]},
    "empty": {"weight_map": {}},
    "nothing": {},
    "not-an-object": [1],
}
_LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
_TEMPLATES: Mapping[str, Any] = {
    "loops": _LOOP,
    "loops-over-a-huge-range": "{% for i in range(10 ** 12) %}{% endfor %}",
    "allocates": "{{ 'a' * 10 ** 11 }}",
    "allocates-slowly": "{% set n = namespace(s='a') %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "writes-much": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "recurses": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "digits": "{{ (10 ** 5000) ~ '' }}",
    "format": "{{ '%099999999999d' % 1 }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "raises": "{{ raise_exception('no\nwith two lines \x1b[31m') }}",
    "syntax": "{% for %}",
    "includes": "{% include '/etc/passwd' %}",
    "number": 5,
    "list": ["{{ messages }}"],
    "empty": "",
    "nested": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
}
_TOKENIZERS: Mapping[str, Any] = {
    "number": 5,
    "nothing": {},
    "unknown-model": good.TOKENIZER | {"model": {"type": "Nonsense"}},
    "no-vocabulary": good.TOKENIZER | {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}},
    "ids-negative": good.TOKENIZER | {"model": {"type": "WordLevel", "vocab": {"w3": -1}, "unk_token": "<unk>"}},
    "ids-huge": good.TOKENIZER | {"model": {"type": "WordLevel", "vocab": {"w3": 2**32 - 1}, "unk_token": "w3"}},
    "ids-of-text": good.TOKENIZER | {"model": {"type": "WordLevel", "vocab": {"w3": "w3"}, "unk_token": "w3"}},
    "merges-of-nothing": good.TOKENIZER | {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}},
    "added-ids-huge": good.TOKENIZER | {"added_tokens": [good.TOKENIZER["added_tokens"][0] | {"id": 2**31}]},
    "regex-that-backtracks": good.TOKENIZER
    | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(w+)+$"}, "behavior": "Isolated", "invert": False}},
    "regex-that-is-none": good.TOKENIZER
    | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
    "unknown-pre-tokenizer": good.TOKENIZER | {"pre_tokenizer": {"type": "Nonsense"}},
    **{
        f"charsmap-{name}": good.TOKENIZER
        | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}}
        for name, charsmap in {
            "empty": b"",
            "short": b"\1",
            "of-gigabytes": struct.pack("<I", 2**32 - 4) + bytes(8),
            "out-of-bounds": struct.pack("<III", 8, 2**32 - 1, 0x12345678),
            "no-text": struct.pack("<II", 4, 0) + b"\xff\xfe",
        }.items()
    },
    "charsmap-no-base64": good.TOKENIZER | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "%"}},
}


def cases() -> Iterator[Case]:
    """Configurations, safetensors, indexes, templates, tokenizers and GGUF files."""
    for key in _SIZES:
        for name, value in _VALUES.items():
            yield _config(f"{key}/{name}", {key: value})
    for name, changes in _CONFIGS.items():
        yield _config(name, changes)
    for name, changes in _ENTRIES.items():
        header = good.header()
        header[_FIRST] |= changes
        yield _case(f"safetensors/{name}", _SHARD, partial(_safetensors, header), REFUSED)
    for name, make in _HEADERS.items():
        # of two entries of one name the last may count, and what names mean only loading tells
        lax = name == "twice" or name.startswith("name-with")
        yield _case(f"safetensors/{name}", _SHARD, make, FAILED if lax else REFUSED)
    for name, content in _INDEXES.items():
        yield _case(f"index/{name}", "model.safetensors.index.json", partial(_json, content), REFUSED)
    for name, template in _TEMPLATES.items():
        config = good.TOKENIZER_CONFIG | {"chat_template": template}
        case = _case(f"template/{name}", "tokenizer_config.json", partial(_json, config), FAILED)
        yield _asking(case, {"messages": [{"role": "user", "content": "w3"}]})
    for name, tokenizer in _TOKENIZERS.items():
        case = _case(f"tokenizer/{name}", "tokenizer.json", partial(_json, tokenizer), FAILED)
        yield _asking(case, {"prompt": "w" * 40 + "!"})
    for name, make in gguf_files().items():
        words = (*good.OFFLOAD, "--model", "m.gguf")
        yield Case(KIND, f"gguf/{name}", words, partial(_put_gguf, make), REFUSED, torch=True)


def _config(name: str, changes: Mapping[str, Any]) -> Case:
    # what a model of this family does not read has no effect
    return _case(f"config/{name}", "config.json", partial(_json, good.CONFIG | changes), FAILED | {4})


def _case(name: str, file: str, make: Callable[[], bytes], codes: frozenset[int]) -> Case:
    return Case(KIND, name, good.OFFLOAD, partial(_put, file, make), codes, torch=True)


def _asking(case: Case, request: Mapping[str, Any]) -> Case:
    """The case with another request."""

    def prepare(folder: Path) -> None:
        case.prepare(folder)
        put(folder / "in.jsonl", good.lines(request))

    return Case(case.kind, case.name, case.arguments, prepare, case.codes, torch=True)


def _put(file: str, make: Callable[[], bytes], folder: Path) -> None:
    good.write_model(folder)
    put(folder / "model" / file, make())


def _put_gguf(make: Callable[[], bytes], folder: Path) -> None:
    put(folder / "m.gguf", make())


def _json(content: Any) -> bytes:
    return json.dumps(content).encode()


def _safetensors(header: Any) -> bytes:
    return good.safetensors(_json(header))


def _text(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def _field(name: bytes, kind: int, value: bytes) -> bytes:
    """A field of a GGUF file; kinds 4, 6, 8, 9 and 10: uint32, float32, text, array and uint64."""
    return _text(name) + struct.pack("<I", kind) + value


def _array(kind: int, length: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, length) + items


def _gguf(fields: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), *, magic: bytes = b"GGUF",
          version: int = 3, fields_said: int | None = None, tensors_said: int | None = None) -> bytes:  # fmt: skip
    """A file of LLaMA's architecture, with as many fields and tensors as it has, or as it says."""
    fields = (_field(b"general.architecture", 8, _text(b"llama")), *fields)
    counts = (
        len(tensors) if tensors_said is None else tensors_said,
        len(fields) if fields_said is None else fields_said,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join((*fields, *tensors))
    return head + bytes(-len(head) % 32) + bytes(4096)


def _tensor(name: bytes = b"output.weight", dims: tuple[int, ...] = (16, 32), kind: int = 0, offset: int = 0,
            dims_said: int | None = None) -> bytes:  # fmt: skip
    said = len(dims) if dims_said is None else dims_said
    return _text(name) + struct.pack(f"<I{len(dims)}QIQ", said, *dims, kind, offset)


def gguf_files() -> Mapping[str, Callable[[], bytes]]:
    """GGUF files that say what cannot be."""
    uint, ulong, many, most = partial(struct.pack, "<I"), partial(struct.pack, "<Q"), 2**31, 2**63
    one = (_tensor(),)
    files: dict[str, Callable[[], bytes]] = {
        "magic": lambda: _gguf(tensors=one, magic=b"FUGG"),
        "no-magic": lambda: b"",
        "version-0": lambda: _gguf(tensors=one, version=0),
        "version-99": lambda: _gguf(tensors=one, version=99),
        "version-backwards": lambda: _gguf(tensors=one, version=3 << 24),
        "no-tensors": _gguf,
        "no-blocks": lambda: _gguf(tensors=one),
        "array-nested": lambda: _gguf((_field(b"a", 9, _array(9, 1) * 5000 + _array(4, 1, uint(1))),), one),
        "array-of-no-type": lambda: _gguf((_field(b"a", 9, _array(99, 1, uint(1))),), one),
        "type-99": lambda: _gguf((_field(b"a", 99, uint(1)),), one),
        "field-twice": lambda: _gguf((_field(b"a", 4, uint(1)),) * 2, one),
        "name-invalid": lambda: _gguf((_field(b"\xff\xfe", 4, uint(1)),), one),
        "architecture-twice": lambda: _gguf((_field(b"general.architecture", 4, uint(1)),), one),
        "alignment-zero": lambda: _gguf((_field(b"general.alignment", 4, uint(0)),), one),
        "alignment-three": lambda: _gguf((_field(b"general.alignment", 4, uint(3)),), one),
        "alignment-text": lambda: _gguf((_field(b"general.alignment", 8, _text(b"x")),), one),
        "tensor-of-no-type": lambda: _gguf(tensors=(_tensor(kind=255),)),
        "tensor-of-no-dims": lambda: _gguf(tensors=(_tensor(dims=()),)),
        "tensor-of-zero": lambda: _gguf(tensors=(_tensor(dims=(0, 0)),)),
        "tensor-of-many-dims": lambda: _gguf(tensors=(_tensor(dims_said=many),)),
        "tensor-overflows": lambda: _gguf(tensors=(_tensor(dims=(2**40, 2**40)),)),
        "tensor-beyond": lambda: _gguf(tensors=(_tensor(offset=2**40),)),
        "tensor-at-2-to-63": lambda: _gguf(tensors=(_tensor(offset=most),)),
        "tensor-twice": lambda: _gguf(tensors=one * 2),
        "tensor-with-a-path": lambda: _gguf(tensors=(_tensor(name=b"../../x"),)),
    }
    for name, number in (("2-to-31", many), ("2-to-63", most)):
        files |= {
            f"fields-{name}": partial(_gguf, tensors=one, fields_said=number),
            f"tensors-{name}": partial(_gguf, tensors=one, tensors_said=number),
            f"text-{name}": partial(_gguf, (_field(b"a", 8, _text(b"x", number)),), one),
            f"array-{name}": partial(_gguf, (_field(b"a", 9, _array(4, number)),), one),
            f"array-of-texts-{name}": partial(_gguf, (_field(b"a", 9, _array(8, number)),), one),
            f"blocks-{name}": partial(_gguf, (_field(b"llama.block_count", 10, ulong(number)),), one),
            f"width-{name}": partial(_gguf, (_field(b"llama.embedding_length", 10, ulong(number)),), one),
        }
    whole = _gguf(tensors=one)
    for i in range(1, 8):
        files[f"truncated-{i}"] = partial(bytes, whole[: i * 20])
    return files
