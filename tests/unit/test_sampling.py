"""The next token of one row: as rows of a batch have it, whichever way is faster."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.common.sampling import RowSampler
from harness.api import SamplingParams

EOS = (2, 5)
ROWS = st.lists(st.sampled_from((0.0, 1.0, 1.0 + 2**-9, -3.0)), min_size=8, max_size=40)  # ties, and almost ties


@given(ROWS, st.sampled_from(("float32", "bfloat16")), st.booleans(), st.integers(0, 3), st.integers(0, 3), st.data())
def test_a_row_alone_gets_the_token_that_it_gets_in_a_batch(values, dtype, ignore_eos, min_tokens, generated, data):
    allowed = data.draw(st.none() | st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    temperature, logprobs = data.draw(st.sampled_from((0.0, 0.8))), data.draw(st.sampled_from((None, 2)))
    params = SamplingParams(
        8, min_tokens=min_tokens, ignore_eos=ignore_eos, temperature=temperature, seed=3, logprobs=logprobs
    )
    mask = None if allowed is None else torch.tensor([allowed])
    logits = torch.tensor([values]).to(getattr(torch, dtype))
    alone, batch = RowSampler([params], EOS), RowSampler([params], EOS)
    scores = batch.select(torch.zeros(1, 0, dtype=torch.long), logits.float().clone(), generated, mask)
    token = alone.token(logits.clone(), generated, mask)
    assert token == scores[0].argmax()
    assert alone.logprobs == batch.logprobs
    if ignore_eos or generated < min_tokens:
        possible = [i for i in range(len(values)) if i not in EOS and (allowed is None or allowed[i])]
        assert token not in EOS or not possible


def test_a_batch_s_steps_are_counted_until_its_rows_may_end():
    params = [SamplingParams(8, min_tokens=2), SamplingParams(8)]
    sampler = RowSampler(params, EOS)
    scores = torch.zeros(2, 8)
    scores[:, EOS[0]] = 1
    chosen = [sampler(torch.zeros(2, 1), scores.clone()).argmax(dim=1).tolist() for _ in range(3)]
    assert chosen == [[0, 2], [0, 2], [2, 2]]
