"""`harness schema`: the JSON Schema of suites or records."""

import json

import click

from harness.cli.errors import say


@click.command()
@click.argument("what", type=click.Choice(["suites", "records"]))
def schema(what: str) -> None:
    """Print the JSON Schema of suite files, for editors, or of the lines of records.jsonl.

    \b
    Example:
      harness schema suites > suite.schema.json    # and in a suite: # yaml-language-server: $schema=suite.schema.json
    """
    from harness.schema import run_record_schema
    from harness.schema.suites import suite_schema

    say(json.dumps(suite_schema() if what == "suites" else run_record_schema(), indent=1))
