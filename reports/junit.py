"""JUnit XML, for CI servers that show how tests ended."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.api import RunRecord
from reports.cells import name_of, workload_of
from reports.samples import THROUGHPUT, Sample, samples_of
from reports.text import clean, median, number, one_line


@dataclass(frozen=True)
class Case:
    """One cell: what it is called, how it ended, in a few words why, and its figures."""

    group: str
    name: str
    outcome: Literal["passed", "failed", "skipped"]
    words: str
    kind: str = ""
    figures: str = ""


def junit(suites: Mapping[str, Sequence[Case]]) -> str:
    """Test suites by name."""
    root = ET.Element("testsuites")
    for name, cases in suites.items():
        counts = {o: str(sum(c.outcome == o for c in cases)) for o in ("failed", "skipped")}
        suite = ET.SubElement(
            root, "testsuite", name=_xml(name), tests=str(len(cases)), failures=counts["failed"], errors="0",
            skipped=counts["skipped"],
        )  # fmt: skip
        for case in cases:
            found = ET.SubElement(suite, "testcase", classname=_xml(case.group), name=_xml(case.name))
            if case.outcome == "failed":
                failure = ET.SubElement(found, "failure", message=_xml(case.words), type=_xml(case.kind))
                failure.text = _xml(case.figures)
            elif case.outcome == "skipped":
                ET.SubElement(found, "skipped", message=_xml(case.words))
            else:
                ET.SubElement(found, "system-out").text = _xml(". ".join(filter(None, (case.words, case.figures))))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def cases_of(records: Iterable[RunRecord]) -> dict[str, list[Case]]:
    """A case for each cell, by suite: failed if a launch did not end as the suite expects."""
    suites: dict[str, list[Case]] = {}
    for sample in samples_of(records, THROUGHPUT).values():
        suites.setdefault(one_line(sample.spec.suite) or "records", []).append(_case(sample))
    return suites


def _case(sample: Sample) -> Case:
    last = sample.records[-1]
    group, name = workload_of(last), name_of(last)
    wrong = [r for r in sample.telling if r.status != r.spec.expect]
    if wrong:
        words = f"{len(wrong)} of {len(sample.telling)} launches: {wrong[-1].status}: {one_line(wrong[-1].reason)}"
        return Case(group, name, "failed", words, kind=wrong[-1].status, figures=wrong[-1].command)
    if not sample.telling:
        return Case(group, name, "skipped", "interrupted before a launch ended")
    speed = median(sample.speeds)
    return Case(group, name, "passed", f"{number(speed)} tok/s, {len(sample.ok)} launches" if speed else last.status)


def _xml(words: str) -> str:
    """XML has no place for most control characters, not even escaped."""
    return clean(words).replace("\ufffe", "\ufffd").replace("\uffff", "\ufffd")
