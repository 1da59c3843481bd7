"""The page of engines' options names exactly those that there are."""

import ast
import re
from pathlib import Path

from harness.builtin import ENGINES

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (?:`(\w+)` )?\| ([^|]*) \|", re.M)


def classes():
    """The classes of engines' files by name: their bases, and the keywords of their __init__ or None."""
    found = {}
    for file in (*ROOT.glob("engines/adapters/*.py"), ROOT / "engines/offload/engine.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                inits = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
                keywords = {a.arg for f in inits for a in f.args.kwonlyargs} if inits else None
                found[node.name] = [b.id for b in node.bases if isinstance(b, ast.Name)], keywords
    return found


def options_of(name, known):
    bases, keywords = known.get(name, ([], None))
    return keywords if keywords is not None else set().union(*(options_of(base, known) for base in bases))


def test_every_option_is_in_the_table_and_no_other():
    known = classes()
    there = {name: options_of(entry.target.partition(":")[2], known) for name, entry in ENGINES.items()}
    page, engine, told = (ROOT / "docs/reference/engines.md").read_text(), "", {}
    for name, options in ROW.findall(page):
        engine = name or engine
        if engine:
            told.setdefault(engine, set()).update(re.findall(r"`(\w+)`", options))
    without = set(re.findall(r"`(\w+)`", page.splitlines()[-1]))
    assert told == {name: options for name, options in there.items() if options}
    assert without == {name for name, options in there.items() if not options} - {"fake"}
