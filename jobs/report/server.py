"""A job's report on this machine, whose reader listens to items and accepts or refuses them.

The address has a random key. A page of another site neither knows the key nor sends this server's name as `Origin`; a
name of another site that leads to this machine is not the name in `Host`.
"""

from __future__ import annotations

import io
import secrets
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import msgspec

from jobs.job_options import user_name
from jobs.ledger.records import QUARANTINE, Decision
from jobs.packs import read_artifact
from jobs.recent_jobs import FoundJob
from jobs.report import write_report
from pipelines.errors import NightjarError

ADDRESS = "127.0.0.1"
#: Maximum size of a decision as JSON.
MAX_BYTES = 65536
#: Seconds without data after which a connection is closed.
IDLE_SECONDS = 30
_Index = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
#: Index of an item, whether it is accepted, SHA-256 of the audio that the page played (empty: none), and the reason.
_read = msgspec.json.Decoder(tuple[_Index, bool, str, str]).decode


class ReportServer(ThreadingHTTPServer):
    """Serves the report of one job until `shutdown`."""

    daemon_threads = True

    def __init__(self, found: FoundJob, **report: Any) -> None:
        """`report`: options of `write_report`."""
        super().__init__((ADDRESS, 0), _Handler)
        self.ledger = found.ledger
        self.store = found.store
        self.job_id = found.id
        self.report = report
        self.key = secrets.token_urlsafe(32)
        self.origin = f"http://{ADDRESS}:{self.server_port}"

    def answer(self, place: str, sent: bytes) -> bytes:
        """The page, the audio of an item (`audio/INDEX`), or a decision as text after it is recorded (`decisions`).
        Raises `ValueError` and `NightjarError`."""
        ledger = self.ledger
        job_id = self.job_id
        made = io.BytesIO()
        if not place:
            write_report(
                ledger,
                self.store,
                job_id,
                Path(),
                served=True,
                open_file=lambda _: nullcontext(made),
                **self.report,
            )
            return made.getvalue()
        decision = heard = None
        if place == "decisions":
            index, accepted, heard, reason = _read(sent)
            decision = Decision(accepted, user_name(), reason)
        else:
            index = msgspec.convert(place.removeprefix("audio/"), _Index, strict=False)
        row = next(ledger.items(job_id, after=index - 1, limit=1), None)
        if row is None or row.index != index:
            raise ValueError("There is no such item.")
        if decision:
            ledger.decide(job_id, [row.id], decision, heard)
            return str(decision).encode()
        audio = row.artifact or ledger.artifacts_of(job_id, QUARANTINE, [index]).get(index)
        if audio is None:
            raise ValueError("The item has no audio.")
        return read_artifact(self.store, audio)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        server = self.server
        headers = self.headers
        posts = self.command == "POST"
        key, _, place = self.path[1:].partition("/")
        known = secrets.compare_digest(key.encode(), server.key.encode())
        names = [f"http://{name}" for name in headers.get_all("Host", [""])]
        names += headers.get_all("Origin", [""]) if posts else []
        status = 403
        kind = "text/plain"
        body = b"This address is of no report."
        if known and {*names} == {server.origin}:
            try:
                size = min(abs(int(headers["Content-Length"])), MAX_BYTES) if posts else 0
                body = server.answer(place, self.rfile.read(size))
                status = 200
                kind = "application/octet-stream" if place else "text/html"
            except (NightjarError, ValueError, TypeError) as error:
                status = 409
                body = str(error).encode()
        about = {"Cache-Control": "no-store", "Content-Type": kind, "Content-Length": str(len(body))}
        with suppress(OSError):
            self.send_response(status)
            for header in about.items():
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - named by the library

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing, because requests contain the key."""
