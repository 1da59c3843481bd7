"""The catalogue agrees with what transformers builds from the same configuration."""

import pytest

from engines.models import checkpoints, shapes
from harness.api import HarnessError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LARGE = ("175b", "66b", "30b", "65b", "70b", "70B", "72B", "32B", "22B-v0.1", "A3B")


def meta_model(model_id):
    config = transformers.AutoConfig.for_model(**shapes.config_kwargs(model_id))
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    "model_id", [pytest.param(m, marks=pytest.mark.slow) if m.endswith(LARGE) else m for m in shapes.CATALOGUE]
)
def test_sizes_equal_transformers(model_id) -> None:
    model, shape = meta_model(model_id), shapes.shape(model_id)
    assert shape.params_total == sum(p.numel() for p in model.parameters())
    layers = model.model.decoder.layers if shape.family == "opt" else model.model.layers
    assert shape == checkpoints._shape(model.config, model)
    assert (len(layers), model.config.vocab_size) == (shape.num_layers, shape.vocab)
    assert model.config.max_position_embeddings == shape.max_context


def test_published_totals() -> None:
    assert shapes.shape("facebook/opt-175b").params_total == 174_604_468_224
    assert shapes.shape("meta-llama/Meta-Llama-3-8B").params_total == 8_030_261_248
    assert shapes.shape("meta-llama/Llama-3.2-1B").params_total == 1_235_814_400
    assert shapes.shape("Qwen/Qwen2.5-7B").params_total == 7_615_616_512
    assert shapes.shape("mistralai/Mixtral-8x7B-v0.1").params_total == 46_702_792_704
    assert shapes.shape("allenai/OLMoE-1B-7B-0924").params_total == 6_919_161_856
    assert shapes.shape("Qwen/Qwen3-30B-A3B").params_total == 30_532_122_624


def test_long_context_models_scale_their_rotary_frequencies() -> None:
    rope = meta_model("meta-llama/Llama-3.2-1B").config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("llama3", 32.0, 8192)


def test_unknown_id_names_the_nearest() -> None:
    with pytest.raises(HarnessError, match=r"facebook/opt-1\.3b"):
        shapes.shape("facebook/opt-1.3")
