"""What an S3 server's refusals mean in the closed codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipelines.errors import ErrorCode, StoreError

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

_FORBIDDEN = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AllAccessDisabled"}
_FULL = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "StorageFull", "XMinioAdminBucketQuotaExceeded"}
_ADVICE = {
    ErrorCode.STORE_MISSING: "Check the bucket's name and the key.",
    ErrorCode.STORE_FORBIDDEN: "Check the S3 credentials and the bucket's policy.",
    ErrorCode.STORE_FULL: "Free space or raise the quota; the work goes on where it stopped.",
    ErrorCode.STORE_BAD_KEY: "Use a shorter name.",
    ErrorCode.STORE_UNREACHABLE: "Check the endpoint, the network and the server.",
}


def translated(error: Exception, uri: str) -> StoreError:
    """The `StoreError` for what boto3 raised; credentials never enter its message."""
    from botocore.exceptions import ClientError, NoCredentialsError, PartialCredentialsError

    if isinstance(error, ClientError):
        code, reason = _code_of(error), f"S3 answered {_name(error) or _status(error)}"
    elif isinstance(error, NoCredentialsError | PartialCredentialsError):
        code, reason = ErrorCode.STORE_FORBIDDEN, "No S3 credentials are set"
    else:
        code, reason = ErrorCode.STORE_UNREACHABLE, f"S3 could not be reached ({type(error).__name__})"
    return StoreError(code, f"{reason} for {uri[:300]}.", _ADVICE[code])


def exists(error: ClientError) -> bool:
    """The key was there (412)."""
    return _status(error) == 412 or _name(error) == "PreconditionFailed"


def conflicts(error: ClientError) -> bool:
    """Another conditional write to the key is under way (409)."""
    return _status(error) == 409 or _name(error) == "ConditionalRequestConflict"


def _code_of(error: ClientError) -> ErrorCode:
    name, status = _name(error), _status(error)
    if name in _FULL or status == 507:
        return ErrorCode.STORE_FULL
    if name in _FORBIDDEN or status in (401, 403):
        return ErrorCode.STORE_FORBIDDEN
    if status == 404:
        return ErrorCode.STORE_MISSING
    if name == "KeyTooLongError":
        return ErrorCode.STORE_BAD_KEY
    return ErrorCode.STORE_UNREACHABLE


def _name(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
