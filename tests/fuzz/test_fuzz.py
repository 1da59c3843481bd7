"""Whatever bytes a parser meets, it takes them or says in one line why not. `make fuzz` tries many more."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.mutations import mutated
from tests.fuzz.parsers import PARSERS, read

#: Inputs that once were a fault, by parser: kept for good.
CORPUS = Path(__file__).parent / "corpus"
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))


@pytest.mark.parametrize("name", PARSERS)
def test_valid_inputs_are_taken(name):
    parser = PARSERS[name]
    for seed in parser.seeds:
        taken = read(parser, seed)
        assert taken, seed[:200]


@pytest.mark.parametrize("name", PARSERS)
def test_any_bytes_are_taken_or_refused_in_a_line(name):
    parser = PARSERS[name]

    @settings(
        max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
    )
    @given(mutated(parser.seeds, parser.words))
    def search(content):
        read(parser, content)

    search()


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_what_was_a_fault_is_none_any_more(path):
    read(PARSERS[path.parent.name], path.read_bytes())
