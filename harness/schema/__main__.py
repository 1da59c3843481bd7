"""`python -m harness.schema` prints the JSON Schema."""

import json
import sys

from harness.schema import run_record_schema

sys.stdout.write(json.dumps(run_record_schema(), indent=1) + "\n")
