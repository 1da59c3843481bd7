"""What all engines on transformers' models share."""

import torch

from engines.adapters.causal_lm import _project_rows


class _Model(torch.nn.Module):
    """A projection, as transformers names it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 7, bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def test_the_projection_takes_rows_in_one_piece() -> None:
    model, seen = _Model(), []
    _project_rows(model)
    model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].is_contiguous()))
    hidden = torch.randn(3, 5, 4)
    last = hidden[:, -1:, :]
    assert not last.is_contiguous()
    assert torch.equal(model.head(last), torch.nn.functional.linear(last, model.head.weight))
    assert seen == [True]


def test_models_without_one_are_left_alone() -> None:
    _project_rows(torch.nn.ReLU())
