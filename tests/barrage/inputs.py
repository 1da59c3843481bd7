"""All bad inputs, of every kind."""

from collections.abc import Iterator

from tests.barrage import (
    inputs_features,
    inputs_files,
    inputs_http,
    inputs_models,
    inputs_options,
    inputs_programs,
    inputs_prompts,
    inputs_records,
    inputs_surroundings,
)
from tests.barrage.case import Case

_KINDS = (inputs_files, inputs_options, inputs_models, inputs_prompts, inputs_records, inputs_surroundings,
          inputs_programs, inputs_http, inputs_features)  # fmt: skip


def every_case() -> Iterator[Case]:
    """Every case, in the same order always."""
    for kind in _KINDS:
        yield from kind.cases()
