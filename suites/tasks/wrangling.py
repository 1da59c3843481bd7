"""Data wrangling as few-shot prompts: entity matching, imputation and error detection.

Source: Narayan et al. 2022, as FlexGen ran it (Sheng et al. 2023, tables 10 and 11). The worked examples are data
files: a prefix for each task, in the folder `wrangling_prefixes`.
"""

import operator
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
    """A data wrangling task: how a row of its table becomes a question and an answer."""

    columns: tuple[str, ...]
    question: Callable[[Row], str]
    answer: Callable[[Row], str]
    table: str = "test.csv"
    judged_by_start: bool = False
    protocol: str = "worked examples of Narayan et al. 2022 by hand; the answer up to the first newline, in lower case"

    def material(self, folder: Path | None) -> Material:
        """An example for each row: the prefix and the row's question."""
        if folder is None:
            raise HarnessError(f"task {self.name}: its tables and worked examples are not on the hub; "
                               "name the folder that has them with --data-dir")  # fmt: skip
        data = Data(folder)
        prefix = self._prefix(data)
        table = data.rows(f"{self.name}/{self.table}", self.columns)
        examples = [Example(prefix(row) + self.question(row), (self.answer(row),)) for row in table]
        return Material(examples, data.digests)

    def evaluate(self, examples: Sequence[Example], answers: Sequence[Sequence[str]]) -> Judged:
        """Accuracy, and F1 of the answer yes for yes-or-no questions."""
        given = [texts[0].split("\n")[0].strip().lower() for texts in answers]
        expected = [example.answers[0].strip().lower() for example in examples]
        matches: Callable[[str, str], bool] = str.startswith if self.judged_by_start else operator.eq
        correct = [matches(answer, gold) for answer, gold in zip(given, expected, strict=True)]
        values = {"accuracy": [float(c) for c in correct]}
        if not {*expected} <= {YES.lower(), NO.lower()}:
            return judged(values)
        return judged(values, f1=f1([gold == YES.lower() for gold in expected], correct))

    def _prefix(self, data: Data) -> Callable[[Row], str]:
        """A function from a row to its worked examples: the same for all rows, or by the row's column."""
        if not data.has(f"{PREFIXES}/{self.name}.json"):
            text = data.text(f"{PREFIXES}/{self.name}.txt")
            return lambda row: text
        by_column = data.json_object(f"{PREFIXES}/{self.name}.json")

        def prefix(row: Row) -> str:
            text = by_column.get(row["col_name"])
            if not isinstance(text, str):
                raise HarnessError(f"{PREFIXES}/{self.name}.json has no prefix for column {row['col_name']!r}")
            return text

        return prefix


def _fields(row: Row, titles: Mapping[str, str], side: str = "") -> str:
    return ". ".join(f"{title}: {row[column + side]}" for column, title in titles.items())


def _pair(kind: str, titles: Mapping[str, str], ending: str) -> Callable[[Row], str]:
    return lambda row: f"{kind} A is {_fields(row, titles, '_A')}. {kind} B is {_fields(row, titles, '_B')}. {ending}"


def _matching(name: str, kind: str, titles: Mapping[str, str], ending: str) -> Wrangling:
    """An entity matching task; `titles` maps columns to their names in the prompt."""
    columns = (*(column + side for side in ("_A", "_B") for column in titles), "label")
    return Wrangling(name, 3, columns, _pair(kind, titles, ending), lambda row: _yes_or_no(row, "label"))


def _imputing(name: str, max_tokens: int, columns: Sequence[str], target: str, ending: str) -> Wrangling:
    """An imputation task: the prompt shows `columns` and asks for the column `target`."""
    titles = dict(zip(columns, columns, strict=True))
    return Wrangling(
        name,
        max_tokens,
        (*columns, target),
        lambda row: f"{_fields(row, titles)}. {ending}",
        lambda row: row[target],
    )


def _yes_or_no(row: Row, column: str) -> str:
    """The answer for a column of 1 and 0. Raises HarnessError for any other value."""
    answer = {"1": YES, "0": NO}.get(row[column].strip())
    if answer is None:
        raise HarnessError(f"column {column}: {row[column]!r} is neither 0 nor 1 (in {'; '.join(row.values())[:80]!r})")
    return answer


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
              lambda row: NO if _yes_or_no(row, "is_clean") == YES else YES, "test_sample200.csv",
              judged_by_start=True),
)  # fmt: skip
