"""OPT as it was published: accuracy on LAMBADA and perplexity of WikiText-2, where its weights are at hand."""

from pathlib import Path

import pytest

from tests.offload import with_kernels

huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("lm_eval", reason="needs lm-eval")
DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DATA.exists(), reason="needs shared/data")]

#: Accuracy and perplexity of lambada_openai, and WikiText-2 by tokens in float16 (GPTQ, Frantar et al. 2022, table 3).
PUBLISHED = {
    "facebook/opt-125m": (0.3790, 26.02, 27.65),
    "facebook/opt-350m": (0.4516, 16.40, 22.00),
    "facebook/opt-1.3b": (0.5793, 6.64, 14.63),
    "facebook/opt-2.7b": (0.6359, 5.12, 12.47),
    "facebook/opt-6.7b": (0.6771, 4.25, 10.86),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_opt_is_as_good_as_it_was_published(cli, model):
    weights = huggingface_hub.try_to_load_from_cache(model, "pytorch_model.bin")
    if not isinstance(weights, str):
        pytest.skip(f"the weights of {model} are not in the hub's cache on this machine")
    with_kernels(cli.folder / "cache")
    suite = cli.suite(
        "  - {name: a, engine: offload, policy: {schedule: sweep, gpu_batch_size: 32, compute_dtype: float32}}",
        model=f"{{id: {Path(weights).parent}, weights: pickle}}",
        workload="[{kind: task, task: 'lm_eval:lambada_openai'}, {kind: task, task: wikitext2_tokens}]",
        timeout="12h",
    )
    cli.run(suite, "--data-dir", str(DATA))
    lambada, wikitext = (record.accuracy.figures for record in cli.records())
    accuracy, perplexity, by_tokens = PUBLISHED[model]
    assert lambada["acc"] == pytest.approx(accuracy, abs=0.001)
    assert lambada["perplexity"] == pytest.approx(perplexity, rel=0.005)
    assert wikitext["token_perplexity"] == pytest.approx(by_tokens, rel=0.005)
