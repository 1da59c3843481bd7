"""The base class of engines on transformers models hands the vocabulary projection contiguous rows."""

import torch

from engines.adapters.causal_lm import _make_projection_inputs_contiguous


class _Model(torch.nn.Module):
    """A projection, as transformers names it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 7, bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def test_the_projection_gets_contiguous_rows() -> None:
    model, seen = _Model(), []
    _make_projection_inputs_contiguous(model)
    model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].is_contiguous()))
    hidden = torch.randn(3, 5, 4)
    last = hidden[:, -1:, :]
    assert not last.is_contiguous()
    assert torch.equal(model.head(last), torch.nn.functional.linear(last, model.head.weight))
    assert seen == [True]


def test_a_model_without_a_projection_is_unchanged() -> None:
    _make_projection_inputs_contiguous(torch.nn.ReLU())
