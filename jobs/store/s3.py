"""The object store in an S3 bucket, at any endpoint with conditional writes."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import quote, urlsplit

from jobs.settings import S3Settings
from jobs.store.base import (
    IDENTITY_KEY,
    Metadata,
    ObjectInfo,
    ObjectStore,
    missing_allowed,
    sha256_of,
    split_key,
    split_prefix,
)
from pipelines.audio_format import CONTENT_TYPES as AUDIO_TYPES
from pipelines.errors import ErrorCode, StoreError, invalid, missing_library

#: Content types by the extension of the key.
CONTENT_TYPES = {
    **AUDIO_TYPES,
    "ogg": "audio/ogg",
    "txt": "text/plain; charset=utf-8",
    "json": "application/json",
    "jsonl": "application/x-ndjson",
    "tar": "application/x-tar",
    "zst": "application/zstd",
}
#: Error codes by the name of an S3 error or its status.
_CODES = {
    ErrorCode.STORE_FULL: {
        "InsufficientStorage",
        "QuotaExceeded",
        "XMinioStorageFull",
        "StorageFull",
        "XMinioAdminBucketQuotaExceeded",
        507,
    },
    ErrorCode.STORE_FORBIDDEN: {
        "AccessDenied",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
        "AllAccessDisabled",
        401,
        403,
    },
    ErrorCode.STORE_MISSING: {404},
    ErrorCode.STORE_BAD_KEY: {"KeyTooLongError"},
}
_ADVICE = {
    ErrorCode.STORE_MISSING: "Check the bucket's name and the key.",
    ErrorCode.STORE_FORBIDDEN: "Check the S3 credentials and the bucket's policy.",
    ErrorCode.STORE_FULL: "Free space or raise the quota; the work then continues.",
    ErrorCode.STORE_BAD_KEY: "Use a shorter name.",
    ErrorCode.STORE_UNREACHABLE: "Check the endpoint, the network and the server.",
}
#: Answers to a put: the key exists, or another conditional write to it is in progress.
_CONFLICTS = {"PreconditionFailed", 412, "ConditionalRequestConflict", 409}
#: The answer for a range behind the end of an object.
_BEHIND_END = {"InvalidRange", 416}


def _answered(error: BaseException | None) -> tuple[str, int]:
    """The name and the HTTP status of an error that S3 answered; empty and 0 for other errors."""
    response = getattr(error, "response", {})
    name = str(response.get("Error", {}).get("Code", ""))
    return name, int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@contextmanager
def _errors(uri: str, missing: ErrorCode = ErrorCode.STORE_MISSING) -> Generator[None]:
    """Raises errors of boto3 as `StoreError`, without credentials in its message. `missing`: the code for
    status 404."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

    try:
        yield
    except (ClientError, BotoCoreError, OSError) as error:
        if isinstance(error, ClientError):
            name, status = _answered(error)
            code = _code_of({name, status})
            reason = f"S3 answered {name or status}"
        elif isinstance(error, NoCredentialsError | PartialCredentialsError):
            code = ErrorCode.STORE_FORBIDDEN
            reason = "No S3 credentials are set"
        else:
            code = ErrorCode.STORE_UNREACHABLE
            reason = f"S3 could not be reached ({type(error).__name__})"
        advice = _ADVICE[code]
        code = missing if code is ErrorCode.STORE_MISSING else code
        raise StoreError(code, f"{reason} for {uri[:300]}.", advice) from error


def _code_of(identifiers: set[str | int]) -> ErrorCode:
    return next((code for code, known in _CODES.items() if known & identifiers), ErrorCode.STORE_UNREACHABLE)


CONNECT_TIMEOUT_SECONDS = 5
READ_TIMEOUT_SECONDS = 60
MAX_ATTEMPTS = 5
#: If two writers put the same key at once, S3 answers 409 to one of them, which retries.
CONFLICT_ATTEMPTS = 6
_METADATA_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")

Result = TypeVar("Result")


class S3Store(ObjectStore):
    """Objects under `s3://bucket/prefix`. Creating it sends no request; thread-safe."""

    remote = True

    def __init__(self, bucket: str, prefix: str, settings: S3Settings | None = None) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{self.prefix}".rstrip("/")
        self._client = make_client(settings)

    def confirm(self, identity: str | None) -> None:
        """Checks that the store has this identity, and keeps it for later checks. Raises
        `store.unreachable`."""
        if identity is None:
            return
        found: bytes | None = None
        with missing_allowed():
            found = self._answer(IDENTITY_KEY, lambda: self._get(self._name(IDENTITY_KEY))["Body"].read())
        self._compare(found, identity)
        self._identity = identity

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Up to `length` bytes of an object, from `offset`; fewer if it ends earlier. Raises
        `store.missing`."""
        if not length:
            # HTTP has no empty range.
            return b""
        wanted = f"bytes={offset}-{offset + length - 1}"
        try:
            return self._object(key, lambda: self._get(self._name(key), Range=wanted)["Body"].read())
        except StoreError as error:
            if _BEHIND_END.intersection(_answered(error.__cause__)):
                return b""
            raise

    def open(self, key: str) -> BinaryIO:
        """The object as a readable stream. Raises `store.missing`. Reading from the stream may also raise
        `store.unreachable`."""
        return self.opened(key, self._name(key))

    def opened(self, key: str, name: str) -> BinaryIO:
        """As `open`, for any full object name, which may be outside the prefix."""
        response = self._object(key, lambda: self._get(name))
        return cast(BinaryIO, _Body(response["Body"], f"s3://{self.bucket}/{name}"))

    def _facts(self, key: str) -> ObjectInfo:
        response = self._object(
            key,
            lambda: self._client.head_object(Bucket=self.bucket, Key=self._name(key), ChecksumMode="ENABLED"),
        )
        checksum = response.get("ChecksumSHA256", "")
        # The checksum of a multipart upload ends in -PARTS and is not that of the content.
        if checksum and "-" not in checksum:
            sha256 = base64.b64decode(checksum).hex()
        else:
            with self.open(key) as stream:
                sha256 = sha256_of(stream)
        return ObjectInfo(key, int(response["ContentLength"]), sha256)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in key order, a page of 1,000 at a time."""
        split_prefix(prefix)
        paginator = self._client.get_paginator("list_objects_v2")
        pages = iter(paginator.paginate(Bucket=self.bucket, Prefix=self.prefix + prefix))
        while (page := self._call(prefix, lambda: next(pages, None))) is not None:
            for entry in page.get("Contents", []):
                key = entry["Key"][len(self.prefix) :]
                yield ObjectInfo(key, int(entry["Size"]), modified_at=entry["LastModified"].timestamp())

    def delete(self, key: str) -> None:
        """Deletes an object; a missing one is not an error."""
        self._call(key, lambda: self._client.delete_object(Bucket=self.bucket, Key=self._name(key)))

    def delete_many(self, keys: Sequence[str]) -> None:
        """Deletes up to 1,000 objects by one request; missing ones are not an error."""
        if not keys:
            return
        wanted = {"Objects": [{"Key": self._name(key)} for key in keys], "Quiet": True}
        answer = self._call(keys[0], lambda: self._client.delete_objects(Bucket=self.bucket, Delete=wanted))
        if refused := answer.get("Errors"):
            reason = refused[0].get("Code", "")
            code = _code_of({reason})
            raise StoreError(
                code,
                f"S3 answered {reason or 'with an error'} and did not delete {len(refused)} objects of {self.url}.",
                _ADVICE[code],
            )

    def sync(self) -> None:
        """Checks that the bucket is still the confirmed one. Objects need no sync, because S3 answers a put
        only when the object is durable."""
        self.confirm(self._identity)

    def uri(self, key: str) -> str:
        """The object's `s3://` address."""
        return f"s3://{self.bucket}/{self._name(key)}"

    def _name(self, key: str) -> str:
        split_key(key)
        return self.prefix + key

    def _get(self, name: str, **options: str) -> Any:
        return self._client.get_object(Bucket=self.bucket, Key=name, **options)

    def put(self, key: str, data: bytes | BinaryIO, metadata: Metadata = None) -> ObjectInfo:
        sha256 = sha256_of(data)
        size = len(data) if isinstance(data, bytes) else data.tell()
        request = {
            "Bucket": self.bucket,
            "Key": self._name(key),
            "IfNoneMatch": "*",
            "ChecksumSHA256": base64.b64encode(bytes.fromhex(sha256)).decode(),
            "ContentType": CONTENT_TYPES.get(key.rpartition(".")[2], "application/octet-stream"),
            "Metadata": {name: quote(value, safe=_METADATA_SAFE) for name, value in (metadata or {}).items()},
        }
        for attempt in range(CONFLICT_ATTEMPTS):
            if not isinstance(data, bytes):
                data.seek(0)
            try:
                self._call(key, lambda: self._client.put_object(Body=data, **request))
                return ObjectInfo(key, size, sha256, created=True)
            except StoreError as error:
                if not _CONFLICTS.intersection(_answered(error.__cause__)):
                    raise
            if (info := self.head(key)) is not None:
                return info
            time.sleep(0.05 * 2**attempt)
        raise StoreError(
            ErrorCode.STORE_UNREACHABLE,
            f"Other writers are putting {self.uri(key)} at the same time.",
            "The work is retried later.",
        )

    def _object(self, key: str, request: Callable[[], Result]) -> Result:
        """The answer to a request for an object. Raises `store.missing` only if the store's identity is
        confirmed before and after a second request."""
        if self._identity is not None:
            with missing_allowed():
                return self._answer(key, request)
            self.confirm(self._identity)
        try:
            return self._answer(key, request)
        except StoreError as error:
            if error.code is ErrorCode.STORE_MISSING:
                self.confirm(self._identity)
            raise

    def _call(self, key: str, request: Callable[[], Result]) -> Result:
        """The answer to a request for which no object needs to exist, so status 404 means that the bucket is
        missing."""
        return self._answer(key, request, ErrorCode.STORE_UNREACHABLE)

    def _answer(
        self, key: str, request: Callable[[], Result], missing: ErrorCode = ErrorCode.STORE_MISSING
    ) -> Result:
        with _errors(f"s3://{self.bucket}/{self.prefix}{key}", missing):
            return request()


class _Body(io.RawIOBase):
    """The body of a response, with connection errors as `StoreError`."""

    def __init__(self, body: Any, uri: str) -> None:
        self._body = body
        self._uri = uri

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        with _errors(self._uri):
            return self._body.read(None if size < 0 else size)

    def readinto(self, buffer: Any, /) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._body.close()
        super().close()


def make_client(settings: S3Settings | None) -> Any:
    """A boto3 S3 client with timeouts and standard retries.

    Raises `config.missing_library` without boto3, and `config.invalid` if it refuses the settings.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        raise missing_library("S3", "boto3", "s3") from None
    settings = settings or S3Settings()
    secret = settings.secret_access_key
    config = Config(
        signature_version="s3v4",
        connect_timeout=CONNECT_TIMEOUT_SECONDS,
        read_timeout=READ_TIMEOUT_SECONDS,
        retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
        max_pool_connections=64,
        s3={"addressing_style": settings.addressing_style},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        return boto3.Session().client(
            "s3",
            config=config,
            endpoint_url=settings.endpoint_url or None,
            region_name=settings.region or None,
            aws_access_key_id=settings.access_key_id or None,
            aws_secret_access_key=secret.get_secret_value() if secret else None,
        )
    except (BotoCoreError, ValueError) as error:
        raise invalid(f"S3 cannot be set up: {error}.", "Check the `s3` settings.") from error


def split_s3_url(url: str) -> tuple[str, str]:
    """Bucket and key (or prefix) of `s3://bucket/key`. Raises `config.invalid`."""
    parts = urlsplit(url, allow_fragments=False)
    if parts.scheme != "s3" or not parts.netloc or parts.query:
        raise invalid(f"{url[:200]!r} is not an S3 address.", "Write it as s3://BUCKET/KEY.")
    return parts.netloc, parts.path.strip("/")


def open_s3_object(url: str, settings: S3Settings | None) -> BinaryIO:
    """Opens an object of any bucket as a stream; its key is not checked. Raises `StoreError`."""
    bucket, key = split_s3_url(url)
    return S3Store(bucket, "", settings).opened(key, key)
