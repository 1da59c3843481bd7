"""Shares of reached lines by package."""

from tests.coverage_by_package import by_package


def test_a_folder_deep_in_a_package_counts_for_it_and_empty_ones_do_not():
    files = {
        name: {"summary": {"covered_lines": reached, "num_statements": lines}}
        for name, reached, lines in (
            ("harness/cli/run.py", 3, 4),
            ("engines/offload/kernels/panels.py", 2, 5),
            ("engines/offload/engine.py", 1, 1),
            ("reports/page.py", 0, 2),
            ("engines/__init__.py", 0, 0),
        )
    }
    assert by_package(files) == {
        "engines/offload": (3, 6), "harness/cli": (3, 4), "reports": (0, 2), "all": (6, 12),
    }  # fmt: skip
    assert [*by_package(files)][-1] == "all"
