"""What holds of any pipeline of nano-batches, counted anew from its operations."""

import itertools

import pytest


def check_pipeline(pipeline, operations, interference, layers):
    """Asserts that rows are whole, what an operation waits for has ended, units and kinds are not used twice, and the
    length lies between what resources and dependencies need and the operations one after the other."""
    by_name = {operation.name: operation for operation in operations}
    length = pipeline.length_s
    tiny = 1e-6 * length
    assert pipeline.sequential_s == pytest.approx(layers * sum(operation.seconds for operation in operations))
    assert length <= pipeline.sequential_s + tiny
    for kind in {operation.kind for operation in operations}:
        assert length >= layers * sum(o.seconds for o in operations if o.kind == kind) - tiny
    parts = {}
    for one in pipeline.operations:
        parts.setdefault((one.name, one.layer), []).append(one)
    assert parts.keys() == set(itertools.product(by_name, range(layers)))
    earliest = {}  # ends by operation, layer and part if all units were everyone's
    for (name, layer), found in sorted(parts.items(), key=lambda item: (item[0][1], list(by_name).index(item[0][0]))):
        operation = by_name[name]
        edges = [row for one in sorted(found, key=lambda one: one.part) for row in one.rows]
        assert edges[0] == 0 and edges[-1] == 1 and edges[1:-1:2] == edges[2:-1:2]
        for one in found:
            share = one.rows[1] - one.rows[0]
            seconds = operation.seconds * share * operation.cut.get(len(found), 1.0)
            taken = seconds / interference.performance(operation.kind, one.units)
            assert one.end_s - one.start_s == pytest.approx(taken)
            ready = 0.0
            places = [(n, layer) for n in operation.after] + [(n, layer - 1) for n in operation.after_layer]
            for before, at in places:
                for other in parts.get((before, at), ()):
                    if other.rows[0] < one.rows[1] and one.rows[0] < other.rows[1]:
                        assert other.end_s <= one.start_s + tiny
                        ready = max(ready, earliest[before, at, other.part])
            earliest[name, layer, one.part] = ready + seconds
    assert length >= max(earliest.values()) - tiny
    for one in pipeline.operations:
        now = [other for other in pipeline.operations if other.start_s <= one.start_s + tiny < other.end_s - tiny]
        assert sum(other.units for other in now) <= 1 + 1e-6
        assert len({other.kind for other in now}) == len(now)
