"""JUnit XML for CI servers."""

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.api import RunRecord
from harness.common.printable import clean
from reports.records import command_of, name_of, workload_of
from reports.samples import THROUGHPUT, Sample, samples_of
from reports.text import grouped, median, number, one_line


@dataclass(frozen=True)
class Case:
    """A test case for a cell; `kind` is a failure's type and `figures` its text."""

    group: str
    name: str
    outcome: Literal["passed", "failed", "skipped"]
    message: str
    kind: str = ""
    figures: str = ""


def junit(suites: Mapping[str, Sequence[Case]]) -> str:
    """JUnit XML of test suites by name."""
    root = ET.Element("testsuites")
    for name, cases in suites.items():
        counts = Counter(case.outcome for case in cases)
        numbers = {"tests": len(cases), "failures": counts["failed"], "errors": 0, "skipped": counts["skipped"]}
        suite = ET.SubElement(root, "testsuite", {"name": _xml(name)} | {k: str(n) for k, n in numbers.items()})
        for case in cases:
            element = ET.SubElement(suite, "testcase", classname=_xml(case.group), name=_xml(case.name))
            message = _xml(case.message)
            if case.outcome == "failed":
                ET.SubElement(element, "failure", message=message, type=_xml(case.kind)).text = _xml(case.figures)
            elif case.outcome == "skipped":
                ET.SubElement(element, "skipped", message=message)
            else:
                ET.SubElement(element, "system-out").text = ". ".join(filter(None, (message, _xml(case.figures))))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def cases_of(records: Iterable[RunRecord]) -> dict[str, list[Case]]:
    """A case for each cell, by suite; it fails if a launch does not end as the suite expects."""
    suites = grouped(samples_of(records, THROUGHPUT).values(), lambda s: one_line(s.spec.suite) or "records")
    return {suite: [_case(sample) for sample in samples] for suite, samples in suites.items()}


def _case(sample: Sample) -> Case:
    last = sample.records[-1]
    group, name = workload_of(last), name_of(last)
    wrong = [r for r in sample.ended if r.status != r.spec.expect]
    if wrong:
        message = f"{len(wrong)} of {len(sample.ended)} launches: {wrong[-1].status}: {one_line(wrong[-1].reason)}"
        return Case(group, name, "failed", message, kind=wrong[-1].status, figures=command_of(wrong[-1]))
    if not sample.ended:
        return Case(group, name, "skipped", "interrupted before a launch ended")
    speeds = sample.undisturbed.speeds or sample.speeds
    speed = median(speeds)
    return Case(group, name, "passed", f"{number(speed)} tok/s, {len(speeds)} launches" if speed else last.status)


def _xml(text: str) -> str:
    """Replaces characters that XML forbids even when escaped."""
    return clean(text).replace("\ufffe", "\ufffd").replace("\uffff", "\ufffd")
