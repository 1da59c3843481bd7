"""Errors in OpenAI's form."""

from fastapi.responses import JSONResponse


def error(message: str, status: int, code: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """{"error": {"message", "type", "code"}}, with an HTTP status."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": code}}, status, headers)
