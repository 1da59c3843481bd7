"""Generates with the offload engine from Python: OPT-125m's shape with random weights, in 256 MiB.

python examples/generate.py [CACHE]
"""

import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.api import GenerationRequest, HardwareLimits, Job, ModelSpec, OffloadPolicy, SamplingParams
from harness.common.files import default_cache
from harness.registry import make_engine, prepare_model

PROMPT, NEW, COUNT = 32, 8, 8


def main(cache: Path) -> None:
    """Prepares the model (once per cache), loads it within the limit and prints each result as it finishes."""
    model = prepare_model("offload", ModelSpec("facebook/opt-125m", weights="dummy", dtype="bfloat16"), cache)
    engine = make_engine("offload", {})
    rng = random.Random(0)
    requests = [
        GenerationRequest(f"r{i}", tuple(rng.randrange(5, 50000) for _ in range(PROMPT)), SamplingParams(NEW))
        for i in range(COUNT)
    ]
    with TemporaryDirectory() as scratch:
        report = engine.load(
            model,
            OffloadPolicy(schedule="sweep", gpu_batch_size=COUNT),
            HardwareLimits(host_memory=256 << 20),
            Job(Path(scratch), cache, max_sequence=PROMPT + NEW, mean_sequence=PROMPT + NEW // 2),
        )
        device, host, disk = (size >> 20 for size in report.weights_by_tier)
        print(f"weights: {device} MiB on a device, {host} MiB in RAM, {disk} MiB on disk; {report.compute_dtype}")
        for result in engine.generate(requests):
            print(result.id, result.finish_reason, *result.tokens)
        engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default_cache())
