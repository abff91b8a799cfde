"""The object store in an S3 bucket, at any endpoint that honours conditional writes."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Protocol, TypeVar, cast
from urllib.parse import quote, unquote, urlsplit

from jobs.store.base import IDENTITY_KEY, ObjectInfo, PutResult, establish, probe, read_identity, split_key, split_prefix, store_away
from pipelines.errors import ConfigError, ErrorCode, StoreError

if TYPE_CHECKING:
    from botocore.exceptions import ClientError
    from pydantic import SecretStr


_FORBIDDEN = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "AllAccessDisabled"}
_FULL = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "StorageFull", "XMinioAdminBucketQuotaExceeded"}
_ADVICE = {
    ErrorCode.STORE_MISSING: "Check the bucket's name and the key.",
    ErrorCode.STORE_FORBIDDEN: "Check the S3 credentials and the bucket's policy.",
    ErrorCode.STORE_FULL: "Free space or raise the quota; the work continues where it stopped.",
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


def refused_delete(first: Mapping[str, str], count: int, url: str) -> StoreError:
    """The `StoreError` for objects that a request for many did not delete."""
    reason = first.get("Code", "")
    code = ErrorCode.STORE_FORBIDDEN if reason in _FORBIDDEN else ErrorCode.STORE_UNREACHABLE
    return StoreError(code, f"S3 answered {reason or 'with an error'} and did not delete {count} objects of {url}.", _ADVICE[code])


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


CONNECT_TIMEOUT_SECONDS = 5
READ_TIMEOUT_SECONDS = 60
MAX_ATTEMPTS = 5
#: Two writers at one key at the same moment: S3 answers 409 to one, which tries again and then learns who won.
CONFLICT_ATTEMPTS = 6
_CHUNK_BYTES = 1 << 20
_METADATA_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")

Result = TypeVar("Result")


class S3Settings(Protocol):
    """How to reach S3; what is None is left to the usual AWS environment, files and roles."""

    @property
    def endpoint_url(self) -> str | None: ...
    @property
    def region(self) -> str | None: ...
    @property
    def access_key_id(self) -> str | None: ...
    @property
    def secret_access_key(self) -> SecretStr | str | None: ...
    @property
    def addressing_style(self) -> str: ...


class S3Store:
    """Objects under `s3://bucket/prefix`. Made without a request; safe to share between threads."""

    remote: ClassVar[bool] = True

    @classmethod
    def at(cls, address: str, settings: S3Settings | None = None) -> S3Store:
        """The store at `s3://bucket/prefix`. Raises `config.invalid`."""
        return cls(*split_s3_url(address), settings)

    def __init__(self, bucket: str, prefix: str, settings: S3Settings | None = None) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{self.prefix}".rstrip("/")
        self.root: Path | None = None
        self._client = make_client(settings)
        self._identity: str | None = None

    def establish(self, identity: str | None = None) -> str:
        """The store's identity, which is compared from here on. A store without one gets `identity`, or a new one."""
        return establish(self, identity)

    def confirm(self, identity: str | None) -> None:
        """Proves that the store has this identity, with which each later doubt is settled. Raises `store.unreachable`."""
        if identity is None:
            return
        try:
            found = read_identity(self._answer(IDENTITY_KEY, lambda: self._get(IDENTITY_KEY)["Body"].read()))
        except StoreError as error:
            if error.code is not ErrorCode.STORE_MISSING:
                raise
            raise store_away(self.url, None, identity) from error
        if found != identity:
            raise store_away(self.url, found, identity)
        self._identity = identity

    def put(
        self, key: str, data: bytes, *, content_type: str = "application/octet-stream", metadata: Mapping[str, str] | None = None
    ) -> PutResult:
        """Writes once: if the key exists its object stays as it is and is described with `created=False`."""
        return self._put(key, lambda: data, hashlib.sha256(data).digest(), len(data), content_type, metadata or {})

    def put_file(
        self, key: str, path: Path, *, content_type: str = "application/octet-stream", metadata: Mapping[str, str] | None = None
    ) -> PutResult:
        """As `put`, with the content of a local file, streamed; S3 takes a maximum of 5 GiB."""
        with path.open("rb") as file:
            digest, size = hashlib.file_digest(file, "sha256").digest(), file.tell()

            def rewound() -> BinaryIO:
                file.seek(0)
                return file

            return self._put(key, rewound, digest, size, content_type, metadata or {})

    def get(self, key: str) -> bytes:
        """The whole object. Raises `store.missing`."""
        return self._sought(key, lambda: self._get(key)["Body"].read())

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """`length` bytes of an object from `offset` on; fewer where it ends before. Raises `store.missing`."""
        if length == 0:
            # HTTP has no empty range.
            return b""
        return self._sought(key, lambda: self._get_range(key, f"bytes={offset}-{offset + length - 1}"))

    def open(self, key: str) -> BinaryIO:
        """The object as a readable stream. Raises `store.missing`; a connection lost while reading is `store.unreachable`."""
        response = self._sought(key, lambda: self._get(key))
        return cast(BinaryIO, _Body(response["Body"], self.uri(key)))

    def head(self, key: str) -> ObjectInfo | None:
        """The object's facts, or None. Where the server keeps no SHA-256 the object is read to know it."""
        try:
            response = self._sought(key, lambda: self._client.head_object(Bucket=self.bucket, Key=self._name(key), ChecksumMode="ENABLED"))
        except StoreError as error:
            if error.code is ErrorCode.STORE_MISSING:
                return None
            raise
        metadata = {name: unquote(value) for name, value in response.get("Metadata", {}).items()}
        checksum = response.get("ChecksumSHA256", "")
        # A checksum of a multipart upload ends in -PARTS and is not the content's.
        known = base64.b64decode(checksum).hex() if checksum and "-" not in checksum else ""
        return ObjectInfo(key, int(response["ContentLength"]), known or self._read_sha256(key), metadata)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with `prefix`, in key order, a page of 1,000 at a time."""
        split_prefix(prefix)
        token: dict[str, str] = {}
        while True:
            request = {"Bucket": self.bucket, "Prefix": self.prefix + prefix, **token}
            page = self._call(prefix, lambda request=request: self._client.list_objects_v2(**request))
            for entry in page.get("Contents", []):
                yield ObjectInfo(entry["Key"][len(self.prefix) :], int(entry["Size"]), modified_at=entry["LastModified"].timestamp())
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, key: str) -> None:
        """Removes an object; a missing one is no error."""
        self._call(key, lambda: self._client.delete_object(Bucket=self.bucket, Key=self._name(key)))

    def delete_many(self, keys: Sequence[str]) -> None:
        """Removes up to 1,000 objects by one request; missing ones are no error."""
        if not keys:
            return
        wanted = {"Objects": [{"Key": self._name(key)} for key in keys], "Quiet": True}
        answer = self._call(keys[0], lambda: self._client.delete_objects(Bucket=self.bucket, Delete=wanted))
        if refused := answer.get("Errors"):
            raise refused_delete(refused[0], len(refused), self.url)

    def sync(self) -> None:
        """Proves that the bucket is still the one that was confirmed; a put that was answered is durable."""
        self.confirm(self._identity)

    def uri(self, key: str) -> str:
        """The object's `s3://` address."""
        return f"s3://{self.bucket}/{self._name(key)}"

    def check(self) -> None:
        """Proves that the bucket can be written, read and honours `If-None-Match`, with a probe object. Raises `StoreError`."""
        probe(self)

    def _name(self, key: str) -> str:
        split_key(key)
        return self.prefix + key

    def _get(self, key: str) -> Any:
        return self._client.get_object(Bucket=self.bucket, Key=self._name(key))

    def _get_range(self, key: str, asked: str) -> bytes:
        from botocore.exceptions import ClientError

        try:
            return self._client.get_object(Bucket=self.bucket, Key=self._name(key), Range=asked)["Body"].read()
        except ClientError as error:
            if _status(error) == 416:
                # The object ends before the range begins.
                return b""
            raise

    def _put(
        self, key: str, body: Callable[[], Any], digest: bytes, size: int, content_type: str, metadata: Mapping[str, str]
    ) -> PutResult:
        request = {
            "Bucket": self.bucket,
            "Key": self._name(key),
            "IfNoneMatch": "*",
            "ChecksumSHA256": base64.b64encode(digest).decode(),
            "ContentType": content_type,
            "Metadata": {name: quote(value, safe=_METADATA_SAFE) for name, value in metadata.items()},
        }
        for attempt in range(CONFLICT_ATTEMPTS):
            outcome = self._call(key, lambda: self._put_once(body, request))
            if outcome == "created":
                return PutResult(ObjectInfo(key, size, digest.hex(), dict(metadata)), created=True)
            if outcome == "exists" and (info := self.head(key)) is not None:
                return PutResult(info, created=False)
            time.sleep(0.05 * 2**attempt)
        raise StoreError(ErrorCode.STORE_UNREACHABLE, f"Other writers kept {self.uri(key)} busy.", "It is tried again later.")

    def _put_once(self, body: Callable[[], Any], request: dict[str, Any]) -> str:
        from botocore.exceptions import ClientError

        try:
            self._client.put_object(Body=body(), **request)
        except ClientError as error:
            if exists(error):
                return "exists"
            if conflicts(error):
                return "busy"
            raise
        return "created"

    def _read_sha256(self, key: str) -> str:
        digest = hashlib.sha256()
        with self.open(key) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def _sought(self, key: str, request: Callable[[], Result]) -> Result:
        """The answer to a request for an object. That it is missing is believed where the identity is there before and after."""
        try:
            return self._answer(key, request)
        except StoreError as error:
            if error.code is not ErrorCode.STORE_MISSING or self._identity is None:
                raise
        self.confirm(self._identity)
        try:
            return self._answer(key, request)
        except StoreError as error:
            if error.code is ErrorCode.STORE_MISSING:
                self.confirm(self._identity)
            raise

    def _call(self, key: str, request: Callable[[], Result]) -> Result:
        """The answer to a request that needs no object: with 404 it is the bucket that is away."""
        try:
            return self._answer(key, request)
        except StoreError as error:
            if error.code is not ErrorCode.STORE_MISSING:
                raise
            raise StoreError(ErrorCode.STORE_UNREACHABLE, error.message, error.advice) from error

    def _answer(self, key: str, request: Callable[[], Result]) -> Result:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return request()
        except (ClientError, BotoCoreError, OSError) as error:
            raise translated(error, f"s3://{self.bucket}/{self.prefix}{key}") from error


class _Body:
    """A response's body whose broken connections are `StoreError`s."""

    def __init__(self, body: Any, uri: str) -> None:
        self._body = body
        self._uri = uri

    def read(self, size: int = -1) -> bytes:
        from botocore.exceptions import BotoCoreError

        try:
            return self._body.read(None if size < 0 else size)
        except (BotoCoreError, OSError) as error:
            raise translated(error, self._uri) from error

    def close(self) -> None:
        self._body.close()

    def __enter__(self) -> _Body:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_client(settings: S3Settings | None) -> Any:
    """A boto3 S3 client with timeouts and the standard retries.

    Raises `config.missing_library` without boto3, and `config.invalid` when it refuses the settings.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError:
        message, advice = "S3 needs the library boto3.", "Install Nightjar with its extra `s3` (docs/install.md)."
        raise ConfigError(ErrorCode.CONFIG_MISSING_LIBRARY, message, advice) from None
    config = Config(
        signature_version="s3v4",
        connect_timeout=CONNECT_TIMEOUT_SECONDS,
        read_timeout=READ_TIMEOUT_SECONDS,
        retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
        max_pool_connections=64,
        s3={"addressing_style": settings.addressing_style} if settings and settings.addressing_style else None,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    secret = settings.secret_access_key if settings else None
    try:
        return boto3.Session().client(
            "s3",
            endpoint_url=(settings.endpoint_url if settings else None) or None,
            region_name=(settings.region if settings else None) or None,
            aws_access_key_id=(settings.access_key_id if settings else None) or None,
            aws_secret_access_key=(secret if isinstance(secret, str) or secret is None else secret.get_secret_value()) or None,
            config=config,
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"S3 cannot be set up: {error}.", "Check the `s3` settings.") from error


def split_s3_url(url: str) -> tuple[str, str]:
    """Bucket and key (or prefix) of `s3://bucket/key`. Raises `config.invalid`."""
    parts = urlsplit(url, allow_fragments=False)
    if parts.scheme != "s3" or not parts.netloc or parts.query:
        raise ConfigError(ErrorCode.CONFIG_INVALID, f"{url[:200]!r} is no S3 address.", "Write it as s3://BUCKET/KEY.")
    return parts.netloc, parts.path.strip("/")


def open_s3_object(url: str, settings: S3Settings | None) -> BinaryIO:
    """Any object of any bucket as a stream, whatever its key looks like. Raises `StoreError`."""
    bucket, key = split_s3_url(url)
    client = make_client(settings)
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        response = client.get_object(Bucket=bucket, Key=key)
    except (ClientError, BotoCoreError) as error:
        raise translated(error, url) from error
    return cast(BinaryIO, _Body(response["Body"], url))
