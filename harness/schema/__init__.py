"""The JSON Schemas of records and suites, generated from their dataclasses and shipped beside this module."""

from typing import Any


def run_record_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of one line of records.jsonl."""
    from pydantic import TypeAdapter

    from harness.api import SCHEMA_VERSION, RunRecord

    schema = TypeAdapter(RunRecord).json_schema(mode="serialization")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"schema_version {SCHEMA_VERSION}; made by `make schema`",
        **schema,
    }
