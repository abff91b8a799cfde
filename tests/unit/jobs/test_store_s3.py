"""What a store makes of the answers of an S3 server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import SecretStr

from jobs.settings import S3Settings
from jobs.store import open_store
from jobs.store.base import ObjectStore
from pipelines.errors import ErrorCode, StoreError

KEY = "jobs/one/audio/a.wav"


@contextmanager
def answering(status: int, name: str) -> Iterator[ObjectStore]:
    """A store whose server gives this answer to every request."""
    body = f"<Error><Code>{name}</Code></Error>".encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_DELETE = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        settings = S3Settings(
            endpoint_url=endpoint, region="x", access_key_id="a", secret_access_key=SecretStr("b")
        )
        yield open_store("s3://bucket", settings)
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "name"), [(409, "OperationAborted"), (412, "PreconditionFailed"), (416, "InvalidRange")]
)
def test_a_conflict_that_is_not_a_puts_passes(status: int, name: str) -> None:
    with answering(status, name) as store:
        for call in (lambda: store.get(KEY), lambda: store.delete(KEY)):
            with pytest.raises(StoreError) as caught:
                call()
            assert caught.value.code is ErrorCode.STORE_UNREACHABLE
        if status != 416:
            with pytest.raises(StoreError):
                store.get_range(KEY, 0, 9)


def test_a_range_behind_the_end_is_empty() -> None:
    with answering(416, "InvalidRange") as store:
        assert store.get_range(KEY, 100, 9) == b""
