"""What /openapi.json says of bodies and answers, which the server reads and writes itself."""

from collections.abc import Mapping
from typing import Any

from harness.batch.format import body_schema

_ERROR = {
    "type": "object",
    "properties": {"error": {
        "type": "object",
        "properties": {name: {"type": "string"} for name in ("message", "type", "code")},
        "required": ["message", "type", "code"],
    }},
    "required": ["error"],
}  # fmt: skip
#: Of every path: what is wrong, in OpenAI's form.
ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "What is wrong", "content": {"application/json": {"schema": _ERROR}}}
}
_STREAM = {
    "stream": {"type": ["boolean", "null"]},
    "stream_options": {
        "type": ["object", "null"], "additionalProperties": False,
        "properties": {name: {"type": "boolean"} for name in ("include_usage", "continuous_usage_stats")},
    },
}  # fmt: skip
_PROMPTS = {
    "type": "array", "minItems": 1,
    "items": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
}  # fmt: skip


def generation(chat: bool) -> dict[str, Any]:
    """Of a path that generates: its body, a line of a batch with a stream's settings and several prompts beside it, and
    that an answer may be a stream."""
    schema = body_schema(chat)
    properties = schema["properties"] | _STREAM
    if not chat:
        properties["prompt"] = {"anyOf": [*properties["prompt"]["anyOf"], _PROMPTS]}
    stream = {"description": "The answer, or with `stream` its events", "content": {"text/event-stream": {}}}
    return {"openapi_extra": json_body({**schema, "properties": properties}), "responses": {200: stream}}


def json_body(schema: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAPI's entry for a JSON body of a schema."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def form_body(schema: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAPI's entry for a multipart form of a schema."""
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def content_of(kind: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's entry for an answer of a media type."""
    return {200: {"description": "The content", "content": {kind: {}}}}
