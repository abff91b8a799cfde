"""Errors in OpenAI's format: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pipelines.errors import ErrorCode, NightjarError
from pipelines.validation import is_visible

log = logging.getLogger(__name__)

#: An object that is sent as JSON.
JsonObject = dict[str, Any]

#: The message for clients if the engine fails; details are in the log.
_ENGINE_SENTENCE = "The engine failed. The request may be tried again."
_RETRY_SECONDS = 5
_QUOTED = re.compile(r"`(\w+)`")
_TYPES = {401: "authentication_error", 403: "authentication_error", 429: "rate_limit_error"}
#: The HTTP statuses of the pipeline's errors. For others it is 400 (`input.*`), or 500 or 503 (a failed
#: engine).
_STATUSES = {
    ErrorCode.MODEL_UNKNOWN: 404,
    # The same request would most likely fail again, and clients do not repeat a 422.
    **dict.fromkeys(
        (
            ErrorCode.SYNTH_NO_EOS,
            ErrorCode.SYNTH_RUNAWAY,
            ErrorCode.SYNTH_NO_AUDIO,
            ErrorCode.SYNTH_SILENT,
            ErrorCode.SYNTH_NAN,
        ),
        422,
    ),
    ErrorCode.SYNTH_TIMEOUT: 504,
    # The folder of voices cannot be written.
    ErrorCode.CONFIG_INVALID: 500,
}


class ApiError(HTTPException):
    """An error that is answered in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code = code
        self.param = param

    def view(self) -> JsonObject:
        """The body of the answer."""
        status = self.status_code
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self, **headers: str) -> Response:
        """The answer, with additional headers."""
        return JSONResponse(self.view(), self.status_code, {**(self.headers or {}), **headers})


def bad_request(message: str, code: str, param: str | None = None) -> ApiError:
    """The error of a wrong request (400)."""
    return ApiError(400, message, code, param)


def empty_text(param: str) -> ApiError:
    """The error for a text with nothing to speak."""
    return bad_request("The text is empty. Give a text to speak.", ErrorCode.INPUT_EMPTY_TEXT, param)


def check_text(text: str, limit: int, param: str) -> None:
    """Raises `ApiError` (400) for an empty text, and for one of more than `limit` characters."""
    if len(text) > limit:
        raise bad_request(
            f"The text has {len(text):,} characters; the maximum is {limit:,}. Split it.",
            ErrorCode.INPUT_TOO_LONG,
            param,
        )
    if not is_visible(text):
        raise empty_text(param)


def unavailable(message: str, code: str) -> ApiError:
    """The error of a server that is not ready (503), with `Retry-After`."""
    return ApiError(503, message, code, headers={"retry-after": str(_RETRY_SECONDS)})


def as_api_error(error: Exception, param: str | None = None) -> ApiError:
    """The answer to any error; unexpected errors are logged. `param`: the field of the request that is
    wrong."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (RequestValidationError, ValidationError)):
        first: Mapping[str, Any] = error.errors()[0]
        # FastAPI's location begins with the part of the request, such as `body`.
        place = first["loc"][isinstance(error, RequestValidationError) :]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
        field = path.lstrip(".")[:200] or None
        if field is None:
            return bad_request(
                "The body is not a JSON object. Send one, with `Content-Type: application/json`.",
                "invalid_value",
            )
        if first["type"] == "extra_forbidden":
            return bad_request(
                f"There is no field `{field}` here. Remove it; docs/serving.md lists the fields.",
                "unknown_field",
                field,
            )
        reason = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
        return bad_request(f"`{field}`: {reason}.", "invalid_value", field)
    if not isinstance(error, NightjarError):
        log.error("a request failed", exc_info=error)
        return ApiError(500, "An unexpected error occurred; see the server's log.", "internal_error")
    code = error.code
    if code.value.startswith("input."):
        return ApiError(400, str(error), code, param)
    if status := _STATUSES.get(code):
        return ApiError(status, str(error), code, "model" if status == 404 else None)
    if code is ErrorCode.SYNTH_ABORTED:
        return unavailable("The request was ended because the engine closed.", code)
    log.error("the engine failed: %s", error, exc_info=error.__cause__)
    return unavailable(_ENGINE_SENTENCE, code) if code.retryable else ApiError(500, _ENGINE_SENTENCE, code)


def named_field(error: NightjarError, fields: Mapping[str, str]) -> str | None:
    """The field of the request for the first setting that the error's message names; None if it names none.
    `fields`: setting -> field."""
    return next((fields[name] for name in _QUOTED.findall(str(error)) if name in fields), None)


def install(app: FastAPI) -> None:
    """Makes the app answer every error in this format."""
    for kind in (HTTPException, RequestValidationError, NightjarError, Exception):
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and not isinstance(error, ApiError):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        message = f"There is no {request.method} {request.url.path[:100]} here. GET / lists the routes."
        error = ApiError(
            error.status_code,
            message if code else f"{error.detail}.",
            code or "bad_request",
            headers=error.headers,
        )
    return as_api_error(error).response()
