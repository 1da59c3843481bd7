"""Runs sequences that are scored through passes of a loaded model until all are done."""

import time
from collections.abc import Iterator, Sequence

from engines.offload.model_runner import ModelRunner
from engines.offload.prefill_budget import make_scheduler
from engines.offload.scoring import Scoring


def score(runner: ModelRunner, sequences: Sequence[Scoring], prefill_chunk: int, max_logits: int) -> Iterator[Scoring]:
    """Yields each sequence when it is done. Per pass, a batch computes at most `prefill_chunk` prompt tokens and at
    most `max_logits` rows of logits.

    Raises HarnessError if another run is active. Closing the iterator early frees the run's KV blocks.
    """
    with runner.exclusive(), runner.one_run(), runner.whole() as share:
        prefill_chunk = min(prefill_chunk, share.plan.chunk)
        budget = runner.job_budget([(s.tokens, s.steps_left) for s in sequences], prefill_chunk, share)
        scheduler = make_scheduler(sequences, share.blocks, share.policy, share.plan, budget, prefill_chunk, max_logits)
        try:
            while scheduler.next_arrival_s is not None:
                yield from (sequence for sequence, done in runner.run_pass(scheduler, time.monotonic) if done)
        finally:
            scheduler.close()
