"""Ranks over slow links against one node that offloads: latency and throughput per node by generated length.

Source: FlexGen (Sheng et al. 2023), section 6.3, figure 4 and table 13, where Petals is what runs over links.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from harness.api import RankLink
from harness.common.published import published_rows
from harness.common.units import with_unit
from reports import vega
from reports.records import Runs
from reports.summary import CellSummary, metric, summary_rows
from reports.tables import Body, Cell, Column, Table, plain_table
from reports.text import MISSING, TIMES_SIGN, columns_of, finite, grouped, median, number, one_line, positive, quotient
from reports.vega import Datum, Panel, layer

#: The published prompt length that is shown, as suites have it; the paper has three.
_PROMPT = "512"
_ONE_NODE = "one node"
T = TypeVar("T")


@dataclass(frozen=True)
class Section:
    """What a report says of links: `tables`, and charts of the same figures."""

    tables: tuple[Table, ...]
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class _Point:
    """A cell over links beside the fastest one of a single node for the same model and lengths, None where none ran."""

    linked: CellSummary
    alone: CellSummary | None

    @property
    def link(self) -> str:
        return _link_of(self.linked)

    @property
    def generated(self) -> int:
        return self.linked.spec.workload.gen_len


def link_words(link: RankLink) -> str:
    """A link's delay and rate, such as `10 ms, 100 Mbit/s`."""
    rate = finite(link.rate)
    return f"{with_unit(finite(link.delay_s) or 0.0, 's')}, {with_unit(rate, 'bit/s') if rate else 'no limit'}"


def _link_of(row: CellSummary) -> str:
    return "" if row.spec.limits.link is None else link_words(row.spec.limits.link)


def per_node(row: CellSummary) -> float | None:
    """Generated tokens/s over the number of nodes: each rank is one."""
    return quotient(row.median, row.spec.policy.ranks)


def latency(row: CellSummary) -> float | None:
    """Seconds from the start of the job to its last token."""
    return positive(metric(row.ok_records, "total_s"))


def links_section(runs: Runs) -> Section | None:
    """Of each machine's cells that ran over links; None where none did."""
    linked = [records for records in runs.by_machine if any(r.spec.limits.link for r in records)]
    parts = [points for records in linked if (points := _points(summary_rows(records)))]
    if not parts:
        return None
    tables = [table for points in parts for table in (_figures(points), _crossovers(points))]
    return Section((*tables, published()), tuple(panel for points in parts for panel in _panels(points)))


def crossover(ratios: Sequence[tuple[int, float]], first: str, second: str) -> str:
    """In words, which of two is ahead at which length: `ratios` are (generated tokens, how many times as good the first
    one is), by length. Between two lengths the logarithm of the ratio is taken to be a line."""
    ahead = [first if ratio >= 1 else second for _, ratio in ratios]
    if len(set(ahead)) == 1:
        return f"{ahead[0]}, at every length"
    parts = []
    for (low, a), (high, b), winner, after in zip(ratios, ratios[1:], ahead, ahead[1:], strict=False):
        if winner != after:
            share = math.log(a) / (math.log(a) - math.log(b))
            parts.append(f"{winner} to about {number(low + share * (high - low), 0)} tokens")
    return f"{', '.join(parts)}, then {ahead[-1]}"


def published() -> Table:
    """The paper's: OPT models over links by Petals, and by FlexGen on one device."""
    rows = [row for row in published_rows("flexgen_other") if row["table"] in ("3", "13")]
    alone = {
        row["key"].removesuffix(" 1 GPU"): row["value"]
        for row in rows
        if row["field"] == "generation throughput" and row["key"].endswith(" 1 GPU")
    }
    lines = []
    for row in rows:
        lengths, _, sizes = row["field"].partition(": ")
        if lengths == _PROMPT:
            for size, figure in zip(sizes.split("/"), row["value"].split("/"), strict=True):
                link = row["key"].removeprefix("petals per GPU ")
                lines.append((f"opt-{size}", link, figure, alone[f"opt-{size}"]))
    lines.sort(key=lambda line: list(alone).index(line[0]))  # stable: the links stay in the paper's order
    cells = [
        [*map(Cell, (model, link, petals, flexgen)), Cell(number(float(petals) / float(flexgen)))]
        for model, link, petals, flexgen in lines
    ]
    columns = [Column("Model", numeric=False), Column("Link", numeric=False), Column("Petals", "tok/s per GPU"),
               Column("FlexGen", "tok/s per GPU"), Column("Petals", f"{TIMES_SIGN} FlexGen")]  # fmt: skip
    return plain_table(
        f"Published: prompts of {_PROMPT} tokens, 32 generated, on T4s (FlexGen, Sheng et al. 2023, tables 3 and 13)",
        columns, cells,
    )  # fmt: skip


def _points(rows: Sequence[CellSummary]) -> list[_Point]:
    """The cells over links, by link and length, each beside the best of one node."""

    def job(row: CellSummary) -> tuple[object, ...]:
        return row.spec.model, row.spec.workload.prompt_len, row.spec.workload.gen_len, row.kind

    useful = [r for r in rows if r.ok and not r.reference and per_node(r) and latency(r)]
    alone = grouped([r for r in useful if r.spec.policy.ranks == 1], job)
    linked = [r for r in useful if r.spec.limits.link]
    linked.sort(key=lambda r: (_delay(r), -(r.spec.limits.link_rate or math.inf), r.spec.workload.gen_len))
    return [_Point(r, max(alone.get(job(r), ()), key=lambda a: a.median or 0.0, default=None)) for r in linked]


def _delay(row: CellSummary) -> float:
    return finite(row.spec.limits.link_delay_s) or 0.0


def _figures(points: Sequence[_Point]) -> Table:
    """Latency and throughput per node of both, a group of rows a link."""
    kinds: list[tuple[Column, Callable[[_Point], float | None]]] = [
        (Column("Over links", "s"), lambda p: latency(p.linked)),
        (Column("Over links", "tok/s per node"), lambda p: per_node(p.linked)),
        (Column("One node", "s"), lambda p: latency(p.alone) if p.alone else None),
        (Column("One node", "tok/s per node"), lambda p: per_node(p.alone) if p.alone else None),
        (Column("Over links", f"{TIMES_SIGN} one node's tok/s"), _throughput_ratio),
    ]
    texts = list(zip(*(columns_of([get(p) for p in points]) for _, get in kinds), strict=True))
    lines = {
        id(p): (Cell(str(p.generated)), Cell(p.linked.name), *(_cell(text) for text in row))
        for p, row in zip(points, texts, strict=True)
    }
    bodies = [
        Body(tuple(lines[id(p)] for p in group), f"{link}: {_measured(group)}")
        for link, group in grouped(points, lambda p: p.link).items()
    ]
    columns = (Column("Generated tokens"), Column("Cell", numeric=False), *(column for column, _ in kinds))
    caption = "Latency of the whole job and throughput per node, by generated length; each rank is a node"
    return Table(caption, columns, tuple(bodies)).first()


def _cell(text: str) -> Cell:
    return Cell(text, why="no single node ran the same model and lengths" if text == MISSING else "")


def _measured(points: Sequence[_Point]) -> str:
    """What the link gave before the jobs, in words."""
    taken = [m for p in points for r in p.linked.ok_records for m in r.measurements]
    delay, rate = (
        median([finite(v) for m in taken if m.name == name for v in m.samples])
        for name in ("link_delay_s", "link_bit_s")
    )
    if delay is None or rate is None:
        return "not measured"
    ways = ", ".join(dict.fromkeys(one_line(m.note) for m in taken if m.name == "link_delay_s"))
    return f"measured {with_unit(delay, 's')} and {with_unit(rate, 'bit/s')}, {ways}"


def _throughput_ratio(point: _Point) -> float | None:
    return quotient(per_node(point.linked), per_node(point.alone)) if point.alone else None


def _latency_ratio(point: _Point) -> float | None:
    return quotient(latency(point.alone), latency(point.linked)) if point.alone else None


def _curves(items: Iterable[T], cell_of: Callable[[T], CellSummary]) -> list[tuple[str, list[T]]]:
    """Items whose cells differ in nothing but how many tokens they generate, by that number; each such group under the
    names of its cells, without the lengths that a suite adds to them."""

    def setting(item: T) -> tuple[str, str]:
        row = cell_of(item)
        return replace(row.spec, workload=replace(row.spec.workload, gen_len=1)).fingerprint(), row.kind

    def short_name(item: T) -> str:
        row = cell_of(item)
        return row.name.removesuffix(f"-{row.spec.workload.label}")

    def length(item: T) -> int:
        return cell_of(item).spec.workload.gen_len

    groups = [sorted(group, key=length) for group in grouped(items, setting).values()]
    return [(", ".join(dict.fromkeys(map(short_name, group))), group) for group in groups]


def _crossovers(points: Sequence[_Point]) -> Table:
    """For the cells of each link and setting, who has less latency and who more throughput per node, by generated
    length."""
    lines = []
    for name, group in _curves(points, lambda p: p.linked):
        cells = [Cell(group[0].link), Cell(name)]
        for ratio_of in (_latency_ratio, _throughput_ratio):
            ratios = [(p.generated, ratio) for p in group if (ratio := ratio_of(p))]
            cells.append(Cell(crossover(ratios, "ranks over links", _ONE_NODE)) if ratios else _cell(MISSING))
        lines.append(cells)
    columns = [Column("Link", numeric=False), Column("Cells", numeric=False), *(Column(title, numeric=False, wide=True)
               for title in ("Less latency", "More throughput per node"))]  # fmt: skip
    return plain_table("Where ranks over links and one node that offloads cross", columns, lines)


def _panels(points: Sequence[_Point]) -> list[Panel]:
    """Latency and throughput per node against generated length, a curve for each link and setting, and for one node."""
    kinds = (
        ("Latency by generated length", "seconds of the whole job", "s", latency),
        ("Throughput per node by generated length", "generated tok/s per node", "tok/s per node", per_node),
    )
    linked = _curves([p.linked for p in points], lambda row: row)
    several = len({p.link for p in points}) < len(linked)
    alone = _curves({id(p.alone): p.alone for p in points if p.alone}.values(), lambda row: row)
    curves = [(name if several else _link_of(rows[0]), rows) for name, rows in linked]
    curves += [(f"{_ONE_NODE}: {name}" if len(alone) > 1 else _ONE_NODE, rows) for name, rows in alone]
    names = [name for name, _ in curves][-len(vega.COLOURS) :]
    panels = []
    for title, axis, unit, get in kinds:
        data: list[Datum] = [
            {"cell": name, "generated": row.spec.workload.gen_len, "value": value,
             "tooltip": f"{name}, {row.spec.workload.gen_len} tokens: {number(value)} {unit}"}
            for name, rows in curves if name in names for row in rows if (value := get(row))
        ]  # fmt: skip
        by_cell = vega.distinct("cell", names)
        spec = vega.chart(
            300,
            data={"values": data},
            encoding={"x": vega.quantity("generated tokens of each request", "generated"),
                      "y": vega.quantity(axis, type="log"), "color": by_cell["color"]},
            layer=[
                vega.alone_in_legend("cell") | layer({"type": "line", "strokeWidth": 2}),
                layer({"type": "point", "filled": True, "size": 60}, shape=by_cell["shape"], **vega.tooltip()),
            ],
        )  # fmt: skip
        panels.append(Panel(title, "Medians over repeats; FlexGen's figure 4 shows the same.", spec, None))
    return panels
