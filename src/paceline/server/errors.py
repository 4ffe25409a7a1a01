"""Everything refused or failed, in OpenAI's envelope: ``{"error": {"message", "type", "param", "code"}}``.

Messages are written for the client. What went wrong inside is logged and never sent.
"""

from __future__ import annotations

import logging
import re
import sys
import uuid
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from paceline.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)

MAX_MESSAGE_LEN = 1000
"""Characters of an error message. A client that sends megabytes must not get them back."""


class HTTPError(Exception):
    """A refusal with its own HTTP status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response; NaN and infinity, which JSON lacks, must not be in it."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_content(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and envelope of an exception."""
    if isinstance(error, HTTPError):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return error.status, _envelope(error.message, kind, error.param, error.code)
    if isinstance(error, RequestError):
        return 400, _envelope(error.message, "invalid_request_error", error.param, error.code)
    if isinstance(error, EngineDeadError):
        # Why it stopped is for the operator, who finds it in the log; it may quote the engine's own
        # exception.
        message = "The engine is down and the request was not completed. Send it again in a while."
        return 503, _envelope(message, "server_error", None, "engine_dead")
    reference = uuid.uuid4().hex[:12]
    logger.error("Internal error %s", reference, exc_info=error)
    message = f"Internal server error. The server's log has the details under {reference}."
    return 500, _envelope(message, "server_error", None, "internal_error")


def error_response(error: Exception) -> Response:
    """The response for an exception."""
    status, content = error_content(error)
    return json_response(content, status)


def _envelope(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    if len(message) > MAX_MESSAGE_LEN:
        message = message[: MAX_MESSAGE_LEN - 3] + "..."
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def from_validation(error: msgspec.ValidationError) -> RequestError:
    """Names the field in a schema violation: msgspec says ``... - at `$.field[0]` ``, or ``... - at `key` in
    ...``. A refusal of the schema's own says everything itself.
    """
    if isinstance(error.__cause__, RequestError):
        return error.__cause__
    text = str(error)
    unknown = re.search(r"unknown field `(.*?)`", text)
    path = re.search(r" - at (?:`key` in )?`\$\.?(.*?)`$", text)
    param = path[1] if path else None
    if unknown is not None:
        name = unknown[1][:100]
        param = f"{param}.{name}" if param else name
        return RequestError(
            f"Unknown field {param!r}: this server does not know it and will not ignore it. Remove it.",
            param=param,
            code="unknown_field",
        )
    missing = re.search(r"missing required field `(.*?)`", text)
    if missing is not None:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return RequestError(f"Field {param!r} is required.", param=param, code="missing_field")
    what = text.split(" - at ")[0]
    what = what[0].lower() + what[1:]
    if what.endswith("out of range"):
        what += f"; numbers are at most {sys.float_info.max:.1e}, integers have at most 4300 digits"
    return RequestError(f"{param or 'The body'}: {what}.", param=param)


def install(app: FastAPI) -> None:
    """Answer every exception of ``app`` with the envelope."""

    async def known(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        # The path is the client's own text; it is cut like every message.
        where = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            refusal = HTTPError(404, f"There is no route {where}.", code="not_found")
        elif error.status_code == 405:
            refusal = HTTPError(405, f"{where}: this route has another method.", code="method_not_allowed")
        else:
            refusal = HTTPError(error.status_code, str(error.detail))
        response = error_response(refusal)
        response.headers.update(error.headers or {})
        return response

    async def left(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # while it sent its body; nobody reads this but the access log

    app.add_exception_handler(HTTPError, known)
    app.add_exception_handler(RequestError, known)
    app.add_exception_handler(EngineDeadError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, left)
    app.add_exception_handler(Exception, known)
