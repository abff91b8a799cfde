"""Errors as OpenAI's API has them: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pipelines.errors import ErrorCode, InputError, NightjarError
from pipelines.validation import is_visible

log = logging.getLogger(__name__)

INVALID, KEY, RATE, SERVER = (
    "invalid_request_error",
    "authentication_error",
    "rate_limit_error",
    "server_error",
)
#: What a client may read of an engine's failure; the rest is in the log.
_ENGINE_SENTENCE = "The engine failed while it made this. The request may be tried again."
_RETRY_SECONDS = 5
#: Errors of the engine that the same request would most likely meet again: 422, so that no client repeats
#: them by itself.
_FINAL = frozenset(
    {ErrorCode.SYNTH_NO_EOS, ErrorCode.SYNTH_NO_AUDIO, ErrorCode.SYNTH_SILENT, ErrorCode.SYNTH_NAN}
)
_QUOTED = re.compile(r"`(\w+)`")
_TYPES = {401: KEY, 403: KEY, 429: RATE}


class ApiError(HTTPException):
    """An answer in OpenAI's form that is no result."""

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

    def view(self) -> dict[str, Any]:
        """The body of the answer."""
        return error_view(self.status_code, str(self.detail), self.code, self.param)


def bad_request(message: str, code: str, param: str | None = None) -> ApiError:
    """A 400 with its reason."""
    return ApiError(400, message, code, param)


def unknown_field(name: str) -> ApiError:
    """A 400 for a field that nobody knows."""
    return bad_request(
        f"There is no field `{name[:100]}` here. Remove it; docs/serving.md lists what is known.",
        "unknown_field",
        name[:100],
    )


def empty_text() -> InputError:
    """The error for a text with nothing to speak."""
    return InputError(ErrorCode.INPUT_EMPTY_TEXT, "The text is empty.", "Give a text to speak.")


def check_text(text: str, limit: int, param: str) -> None:
    """Raises `ApiError` (400) for a text that no slot is worth: an empty one, and one of more than `limit`
    characters."""
    if len(text) > limit:
        message = f"The text has {len(text):,} characters; {limit:,} are taken."
        raise as_api_error(InputError(ErrorCode.INPUT_TOO_LONG, message, "Split it."), param)
    if not is_visible(text):
        raise as_api_error(empty_text(), param)


def unavailable(message: str, code: str = "engine_unavailable", seconds: int = _RETRY_SECONDS) -> ApiError:
    """A 503 that says when to come back."""
    return ApiError(503, message, code, headers={"retry-after": str(seconds)})


def as_api_error(error: NightjarError, param: str | None = None) -> ApiError:
    """What a client is told of an error of the pipeline. `param` names the field of the request that is at
    fault."""
    code = error.code
    if code.value.startswith("input."):
        return ApiError(400, str(error), code.value, param)
    if code is ErrorCode.MODEL_UNKNOWN:
        return ApiError(404, str(error), code.value, "model")
    if code in _FINAL:
        return ApiError(422, str(error), code.value)
    if code is ErrorCode.SYNTH_TIMEOUT:
        return ApiError(504, str(error), code.value)
    if code is ErrorCode.SYNTH_ABORTED:
        return unavailable("The request was ended because the engine closed.", code.value)
    log.error("the engine failed: %s", error, exc_info=error.__cause__)
    if code.retryable:
        return unavailable(_ENGINE_SENTENCE, code.value)
    return ApiError(500, _ENGINE_SENTENCE, code.value)


def named_field(error: NightjarError, fields: Mapping[str, str]) -> str | None:
    """The field of the request that an error is about, where it names a setting that is one."""
    return next((fields[name] for name in _QUOTED.findall(str(error)) if name in fields), None)


def error_view(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """`{"error": ...}` of a status."""
    kind = _TYPES.get(status, INVALID if status < 500 else SERVER)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install(app: FastAPI) -> None:
    """Gives every error of the app this form."""
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(NightjarError, _nightjar)
    app.add_exception_handler(Exception, _unexpected)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return JSONResponse(error.view(), error.status_code, error.headers)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = (
        f"There is no {request.method} {request.url.path[:100]} here. GET / lists the routes."
        if code
        else f"{error.detail}."
    )
    return JSONResponse(
        error_view(error.status_code, message, code or "bad_request"), error.status_code, error.headers
    )


async def _nightjar(_request: Request, error: Exception) -> Response:
    assert isinstance(error, NightjarError)
    api_error = as_api_error(error)
    return JSONResponse(api_error.view(), api_error.status_code, api_error.headers)


async def _validation(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first: Mapping[str, Any] = error.errors()[0]
    # The first part is where the field was looked for; others name the variant of a union, which no client
    # wrote.
    place = [part for part in first["loc"][1:] if not str(part).startswith("of:")]
    param = _path(place)
    code = "unknown_field" if first["type"] == "extra_forbidden" else "invalid_value"
    return JSONResponse(error_view(400, _reason(first, param), code, param), 400)


def _reason(first: Mapping[str, Any], param: str | None) -> str:
    if first["type"] == "extra_forbidden":
        return f"There is no field `{param}` here. Remove it; docs/serving.md lists what is known."
    if not param:
        return "The body is not a JSON object. Send one, with `Content-Type: application/json`."
    said = str(first["msg"]).removeprefix("Value error, ").rstrip(".")
    return f"`{param}`: {said}."


def _path(place: list[Any]) -> str | None:
    """`messages[0].content` of a pydantic location."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    return text[:200] or None


async def _unexpected(_request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return JSONResponse(
        error_view(500, "Something broke that should not; the server's log says what.", "internal_error"), 500
    )
