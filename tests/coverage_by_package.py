"""`python -m tests.coverage_by_package FILE`: lines that tests reach, by package, of the JSON report of coverage."""

import json
import sys
from collections import Counter
from pathlib import Path, PurePosixPath


def by_package(files: dict[str, dict]) -> dict[str, tuple[int, int]]:
    """Lines reached and lines, by package, such as `engines/offload`, and of all."""
    reached, lines = Counter(), Counter()
    for name, file in files.items():
        summary = file["summary"]
        for package in ("/".join(PurePosixPath(name).parent.parts[:2]), "all"):
            reached[package] += summary["covered_lines"]
            lines[package] += summary["num_statements"]
    return {package: (reached[package], lines[package]) for package in sorted(+lines, key=lambda p: (p == "all", p))}


if __name__ == "__main__":
    report = json.loads(Path(sys.argv[1]).read_text())
    for package, (reached, lines) in by_package(report["files"]).items():
        sys.stdout.write(f"{package:<22} {reached:>6} of {lines:>6} lines  {reached / lines:6.1%}\n")
