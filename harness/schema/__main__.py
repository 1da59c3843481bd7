"""`python -m harness.schema` writes the JSON Schemas beside this module."""

import json
from pathlib import Path

from harness.schema import run_record_schema
from harness.schema.suites import suite_schema

for name, schema in (("run_record", run_record_schema()), ("suite", suite_schema())):
    Path(__file__).with_name(f"{name}.json").write_text(json.dumps(schema, indent=1) + "\n")
