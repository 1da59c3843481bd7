"""Models described by their configurations alone: the catalogue's shapes again, and a line for what is not modelled."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engines.models import shapes
from engines.models.describe import describe
from harness import registry
from harness.api import HarnessError, ModelDescription, ModelSpec, UnsupportedError
from tests.offload import save

SMALL = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "torch_dtype": "float32",
}  # fmt: skip


def described(folder: Path, engine: str = "flexgen_ref", **changes: object) -> ModelDescription:
    """What `config.json` tells with changed keys; FlexGen's code is not asked whether it runs the architecture."""
    path = folder / "mine.json"
    path.write_text(json.dumps({k: v for k, v in (SMALL | changes).items() if v is not None}))
    return registry.describe_model(engine, ModelSpec(str(path)), folder / "cache")


def test_a_configuration_without_weights_has_the_shape_and_dtype_that_it_names(tmp_path):
    found = described(tmp_path, engine="offload")
    shape = found.shape
    assert (shape.num_layers, shape.hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (3, 64, 4, 2, 16)
    assert shape.params_per_layer == 2 * 64 * (64 + 32) + 3 * 64 * 160
    assert shape.params_total == 3 * (shape.params_per_layer + 2 * 64) + 2 * 512 * 64 + 64
    assert (found.dtype, found.caveats) == ("float32", ())
    assert described(tmp_path, torch_dtype=None).dtype == "float16"


@pytest.mark.parametrize("model", ["tiny/llama", "tiny/olmoe", "tiny/opt"])
def test_a_shipped_shape_is_that_of_its_configuration(tmp_path, model):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shapes.config_kwargs(model)))
    assert describe(ModelSpec(str(path)), tmp_path).shape == shapes.shape(model)


def test_a_folder_is_described_by_its_weights_and_by_its_configuration_where_they_are_missing(tmp_path):
    folder = save(tmp_path / "model", "llama")
    whole = describe(ModelSpec(str(folder)), tmp_path)
    shutil.copytree(folder, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    assert replace(describe(ModelSpec(str(tmp_path / "bare")), tmp_path), id=whole.id) == whole
    assert whole.dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, "3 of 3 layers attend to a window of 64 tokens"),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, ""),
        ({"model_type": "gemma3_text", "sliding_window": 64, "layer_types":
          ["sliding_attention", "full_attention", "sliding_attention"]}, "2 of 3 layers attend to a window of 64"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "its checkpoint is quantized"),
    ],
)  # fmt: skip
def test_what_the_performance_model_leaves_out_is_said(tmp_path, changes, words):
    found = described(tmp_path, **changes).caveats
    assert [words] == [line[: len(words)] for line in found] if words else not found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "is not a JSON object"),
        ("{", "is not valid JSON"),
        ('{"model_type": "no_such_kind"}', "transformers builds no causal model"),
        (json.dumps(SMALL | {"num_hidden_layers": 10**9}), "more than any model has"),
    ],
)
def test_a_configuration_that_is_none_is_refused_by_its_own_name(tmp_path, text, words):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(HarnessError, match=words) as refused:
        describe(ModelSpec(str(path)), tmp_path)
    assert str(path) in str(refused.value)
    assert "/config.json" not in str(refused.value)


def test_an_architecture_that_our_engine_cannot_run_is_refused_for_it_alone(tmp_path):
    bert = {"model_type": "bert", "num_key_value_heads": None}
    with pytest.raises(UnsupportedError, match="attends to later tokens"):
        described(tmp_path, engine="offload", **bert)
    assert described(tmp_path, **bert).shape.family == "bert"


def test_the_hub_is_not_waited_for_without_a_network(tmp_path, monkeypatch):
    def no_address(*_: object) -> None:
        raise OSError("no such name")

    monkeypatch.setattr("engines.models.hub.getproxies", dict)
    monkeypatch.setattr("engines.models.hub.socket.getaddrinfo", no_address)
    with pytest.raises(HarnessError, match=r"opt-30: the hub cannot be reached \(no network\); give.*opt-30b"):
        describe(ModelSpec("facebook/opt-30"), tmp_path)


@pytest.mark.parametrize(("model", "words"), [("", "is empty"), ("x.gguf", "no such file"), ("a b", "nor a hub id")])
def test_names_that_can_be_no_model(tmp_path, model, words):
    with pytest.raises(HarnessError, match=words):
        describe(ModelSpec(model), tmp_path)
