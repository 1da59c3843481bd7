"""What quantization costs a real model: WikiText perplexity of SmolLM2 at the bits of weights and cache.

SmolLM2's file is itself of 4-bit groups of 32, so groups of 64 are a second, harsher quantization, of 135 million
parameters: the figures are an indication, not those of a model quantized once, nor of a large one.
"""

import math
from pathlib import Path

import pytest
import transformers

from engines.offload.engine import OffloadEngine
from harness.api import HardwareLimits, Job, OffloadPolicy

pytestmark = pytest.mark.slow
TEXT = Path(__file__).parents[3] / "shared" / "data" / "wikitext2_raw" / "wiki.test.raw"
#: Tokens of a window and windows: token-level perplexity, every window by itself.
WINDOW, WINDOWS = 512, 4
POLICIES = {
    "exact": {},
    "weights in the file's groups": {"weight_bits": 4, "group_size": 32},
    "cache 4 bit": {"kv_bits": 4},
    "8 bit": {"weight_bits": 8, "kv_bits": 8},
    "4 bit": {"weight_bits": 4, "kv_bits": 4},
    "cache 4 bit, 10 % of the values": {"kv_bits": 4, "value_sparsity": 0.1},
    "3 bit": {"weight_bits": 3, "kv_bits": 3},
}


@pytest.fixture(scope="module")
def perplexity(smollm2, tmp_path_factory):
    if not TEXT.exists():
        pytest.skip(f"no {TEXT.name}: the shared data are not here")
    ids = transformers.AutoTokenizer.from_pretrained(smollm2.path)(TEXT.read_text()[:60_000]).input_ids
    windows = [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(WINDOWS)]
    assert len(windows[-1]) == WINDOW
    cache = tmp_path_factory.mktemp("cache")
    found = {}
    for name, more in POLICIES.items():
        engine = OffloadEngine()
        policy = OffloadPolicy(schedule="sweep", gpu_batch_size=16, **more)
        engine.load(smollm2, policy, HardwareLimits(), Job(cache, cache, WINDOW + 1, WINDOW))
        scores = engine.score([([], window) for window in windows])
        found[name] = math.exp(-sum(s.logprob for s in scores) / (WINDOW * WINDOWS))
        engine.close()
    return found


def test_weights_that_are_quantized_already_lose_nothing(perplexity):
    assert perplexity["weights in the file's groups"] == pytest.approx(perplexity["exact"], rel=1e-4)


def test_eight_bits_are_nearly_free(perplexity):
    assert perplexity["8 bit"] <= 1.005 * perplexity["exact"]


def test_a_cache_of_four_bits_costs_little(perplexity):
    assert perplexity["exact"] < perplexity["cache 4 bit"] <= 1.06 * perplexity["exact"]


def test_fewer_bits_cost_more(perplexity):
    """Larger groups cost this small model's weights 40 %: more than the 15 % that were hoped for."""
    assert 1.15 * perplexity["exact"] < perplexity["4 bit"] <= 1.6 * perplexity["exact"]
    assert perplexity["3 bit"] > 1.5 * perplexity["4 bit"]


def test_a_tenth_of_the_values_is_not_all_of_them(perplexity):
    """Attention of so small a model, to half of 512 tokens on average, is spread over more than a tenth of them."""
    all_of_them, tenth = perplexity["cache 4 bit"], perplexity["cache 4 bit, 10 % of the values"]
    assert 1.01 * all_of_them < tenth <= 1.45 * all_of_them
