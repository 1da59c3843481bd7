"""Data wrangling: entity matching, imputation and error detection as questions with worked examples before them.

Source: Narayan et al. 2022, as FlexGen ran it (Sheng et al. 2023, tables 10 and 11). The worked examples are data too:
a prefix for each task, in the folder `wrangling_prefixes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.api import HarnessError
from harness.api.task import Judged
from suites.tasks.data import Data
from suites.tasks.measures import f1, judged
from suites.tasks.prompts import Example, Material, PromptTask

Row = Mapping[str, str]
PREFIXES = "wrangling_prefixes"
YES, NO = "Yes", "No"


@dataclass(frozen=True)
class Wrangling(PromptTask):
    """One of the six tasks: how a row of its table becomes a question, and which column answers it."""

    name: str
    max_tokens: int
    columns: tuple[str, ...]
    question: Callable[[Row], str]
    answer: Callable[[Row], str]
    table: str = "test.csv"
    judged_by_start: bool = False
    stop: tuple[str, ...] = ("\n",)
    temperature: float = 0.0
    outputs: int = 1
    protocol: str = "worked examples of Narayan et al. 2022 by hand; the answer up to the first newline, in lower case"

    def material(self, folder: Path | None) -> Material:
        """A row each: the prefix, and the row's question."""
        if folder is None:
            raise HarnessError(f"task {self.name}: its tables and worked examples are on no hub; "
                               "name the folder that has them by --data-dir")  # fmt: skip
        data = Data(folder)
        prefix = self._prefix(data)
        table = data.rows(f"{self.name}/{self.table}", self.columns)
        examples = [Example(prefix(row) + self.question(row), (self.answer(row),)) for row in table]
        return Material(examples, data.digests)

    def worth(self, examples: Sequence[Example], answers: Sequence[Sequence[str]]) -> Judged:
        """Accuracy; and F1 of the answer yes, where the question is one of yes or no."""
        given = [each[0].split("\n")[0].strip().lower() for each in answers]
        wanted = [example.answers[0].strip().lower() for example in examples]
        if self.judged_by_start:
            right = [one.startswith(other) for one, other in zip(given, wanted, strict=True)]
        else:
            right = [one == other for one, other in zip(given, wanted, strict=True)]
        values = {"accuracy": [float(one) for one in right]}
        if not {*wanted} <= {YES.lower(), NO.lower()}:
            return judged(values)
        return judged(values, f1=f1([one == YES.lower() for one in wanted], right))

    def _prefix(self, data: Data) -> Callable[[Row], str]:
        """The worked examples before a row's question: the same for all, or by the row's column."""
        if not data.has(f"{PREFIXES}/{self.name}.json"):
            same = data.text(f"{PREFIXES}/{self.name}.txt")
            return lambda row: same
        by_column = data.json_object(f"{PREFIXES}/{self.name}.json")

        def prefix(row: Row) -> str:
            found = by_column.get(row["col_name"])
            if not isinstance(found, str):
                raise HarnessError(f"{PREFIXES}/{self.name}.json has no prefix for column {row['col_name']!r}")
            return found

        return prefix


def _fields(row: Row, names: Mapping[str, str], side: str = "") -> str:
    return ". ".join(f"{shown}: {row[column + side]}" for column, shown in names.items())


def _pair(what: str, names: Mapping[str, str], ending: str) -> Callable[[Row], str]:
    return lambda row: f"{what} A is {_fields(row, names, '_A')}. {what} B is {_fields(row, names, '_B')}. {ending}"


def _matching(name: str, what: str, names: Mapping[str, str], ending: str) -> Wrangling:
    columns = (*(column + side for side in ("_A", "_B") for column in names), "label")
    return Wrangling(name, 3, columns, _pair(what, names, ending), lambda row: _yes(row, "label"))


def _imputing(name: str, most: int, names: Sequence[str], wanted: str, ending: str) -> Wrangling:
    shown = dict(zip(names, names, strict=True))
    return Wrangling(
        name, most, (*names, wanted), lambda row: f"{_fields(row, shown)}. {ending}", lambda row: row[wanted]
    )


def _yes(row: Row, column: str) -> str:
    """A column of 0 and 1. Raises HarnessError for what is neither."""
    found = {"1": YES, "0": NO}.get(row[column].strip())
    if found is None:
        raise HarnessError(f"column {column}: {row[column]!r} is neither 0 nor 1 (in {'; '.join(row.values())[:80]!r})")
    return found


def _spelling(row: Row) -> str:
    return f"Is there a x spelling error in {row['col_name']}: {row['value'] or 'nan'}?"


_SAME = "Are Product A and Product B the same?"

TASKS = (
    _matching("em_beer", "Product", {"Beer_Name": "name", "Brew_Factory_Name": "factory"}, _SAME),
    _matching("em_fodors_zagats", "Product", {n: n for n in ("name", "addr", "city", "phone", "type", "class")}, _SAME),
    _matching("em_itunes_amazon", "Song",
              {"Song_Name": "name", "Artist_Name": "artist name", "Album_Name": "album name", "Genre": "genre",
               "Price": "price", "Time": "time", "Released": "released"}, "Same Song?"),
    _imputing("di_buy", 10, ("name", "description"), "manufacturer", "Who is the manufacturer?"),
    _imputing("di_restaurant", 5, ("name", "addr", "phone", "type"), "city", "What is the city?"),
    Wrangling("ed_hospital", 3, ("col_name", "value", "is_clean"), _spelling,
              lambda row: NO if _yes(row, "is_clean") == YES else YES, "test_sample200.csv", judged_by_start=True),
)  # fmt: skip
