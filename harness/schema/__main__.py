"""`python -m harness.schema` prints the JSON Schema."""

from harness.schema import main

main()
