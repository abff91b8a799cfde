"""Reports the ends of jobs to the operator: a command gets the job's view on its standard input, an address by POST.

Both come from the settings of the installation and never from a job. Each end is reported at least once, by one sender at a time: it is
claimed in the ledger first, and noted there after the hook has taken it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import msgspec

from jobs import installed_version
from jobs.child_process import signal_group
from jobs.formatting import redact
from jobs.ledger.notification import JobEnd
from jobs.ledger.states import backoff_seconds
from jobs.ledger.status import status_and_errors
from jobs.status import status_view
from pipelines.errors import NotFoundError

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.settings import Settings
    from jobs.settings_groups import NotifySettings

#: Over the time that both hooks may take, before another sender counts this one as dead.
_CLAIM_SLACK_SECONDS = 30.0
FIRST_PAUSE_SECONDS = 5.0
_SHOWN_BYTES = 400
_SECRET_VARIABLE = "SPEECH_NOTIFY__SECRET"  # noqa: S105 - the name of a variable
SIGNATURE = "X-Nightjar-Signature"


class HookError(Exception):
    """A hook did not take an end; its message says why, without secrets."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What became of one try to report an end."""

    job_id: str
    attempt: int
    #: Why the hook did not take it; empty: it did.
    reason: str = ""
    #: Seconds to the next try; None: there is none.
    again_seconds: float | None = None


def planned_pause(attempt: int) -> float:
    """Seconds to wait after a try that failed: they double, up to 300."""
    return backoff_seconds(attempt - 1, random.random(), FIRST_PAUSE_SECONDS)


def report_ends(ledger: Ledger, settings: Settings, pause: Callable[[int], float] = planned_pause) -> list[Reported]:
    """Reports the ends that are due, if the settings name a hook. Raises `ServiceError` where the ledger cannot be reached."""
    notify = settings.notify
    if not notify.enabled:
        return []
    found = (_report(ledger, settings, end, pause) for end in ledger.unreported_ends())
    return [one for one in found if one is not None]


def report_ends_with_retries(ledger: Ledger, settings: Settings, tries: int, pause_seconds: float) -> list[Reported]:
    """Reports the ends that are due, and tries those again that the hook did not take: the last try of each that it never took."""
    failed: dict[str, Reported] = {}
    for number in range(tries):
        if number:
            time.sleep(pause_seconds)
        # They stay due: by the ledger's clock the same pause could be a little longer, and a try would find nothing.
        for one in report_ends(ledger, settings, lambda _: 0.0):
            failed.pop(one.job_id, None)
            if one.reason:
                failed[one.job_id] = one
        if not failed:
            break
    return list(failed.values())


def _report(ledger: Ledger, settings: Settings, end: JobEnd, pause: Callable[[int], float]) -> Reported | None:
    notify = settings.notify
    attempt = ledger.claim_end(end, 2 * notify.timeout_seconds + _CLAIM_SLACK_SECONDS)
    if attempt is None:
        return None
    view = _view(ledger, settings, end)
    if view is None:
        return None
    try:
        send(notify, view, attempt)
    except HookError as error:
        if attempt >= notify.attempts:
            ledger.note_reported(end)
            return Reported(end.job_id, attempt, str(error))
        again_seconds = pause(attempt)
        ledger.put_off(end, again_seconds)
        return Reported(end.job_id, attempt, str(error), again_seconds)
    ledger.note_reported(end)
    return Reported(end.job_id, attempt)


def _view(ledger: Ledger, settings: Settings, end: JobEnd) -> dict[str, Any] | None:
    """What `nightjar status --json` prints of the job, and `end`, which is the same for each try to report this end. None: the job was
    deleted or is retried meanwhile, and its next end is another one."""
    try:
        status, errors = ledger.read(lambda reader: status_and_errors(reader, end.job_id))
    except NotFoundError:
        return None
    if status.job.finished_at != end.finished_at:
        return None
    return {**status_view(status, settings.price_per_gpu_hour, errors), "end": f"{end.job_id}/{end.finished_at:.3f}"}


def send(notify: NotifySettings, view: Mapping[str, Any], attempt: int = 1) -> None:
    """Hands a view to the command and to the address. Raises `HookError` where one of them does not take it."""
    body = msgspec.json.encode(view)
    if notify.command:
        _run_command(notify, view, body)
    if notify.url is not None:
        _post(notify, view, body, attempt)


def _run_command(notify: NotifySettings, view: Mapping[str, Any], body: bytes) -> None:
    variables = {"NIGHTJAR_JOB": view["job"], "NIGHTJAR_STATE": view["state"], "NIGHTJAR_END": view["end"]}
    environment = {name: value for name, value in os.environ.items() if name.upper() != _SECRET_VARIABLE} | variables
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as given:
        given.write(body)
        given.seek(0)
        try:
            process = subprocess.Popen(
                notify.command, stdin=given, stdout=subprocess.DEVNULL, stderr=said, env=environment, start_new_session=True
            )
        except OSError as error:
            raise HookError(f"the command {notify.command[0]!r} cannot be started: {error.strerror}") from error
        try:
            status = process.wait(notify.timeout_seconds)
        except subprocess.TimeoutExpired:
            # Also what the command itself started.
            signal_group(process, signal.SIGKILL)
            process.wait()
            raise HookError(f"the command did not end within {notify.timeout_seconds:g} s") from None
        if status:
            said.seek(max(0, said.seek(0, os.SEEK_END) - _SHOWN_BYTES))
            words = redact(said.read().decode(errors="replace").strip())
            raise HookError(f"the command ended with status {status}{f': {words}' if words else ''}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An address that points elsewhere is an answer like any other: the signed view goes where the operator said."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


def _post(notify: NotifySettings, view: Mapping[str, Any], body: bytes, attempt: int) -> None:
    assert notify.url is not None
    parts = urlsplit(notify.url.get_secret_value())
    userinfo, _, host = parts.netloc.rpartition("@")
    url = parts._replace(netloc=host).geturl()
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"nightjar/{installed_version()}",
        "X-Nightjar-End": view["end"],
        "X-Nightjar-Attempt": str(attempt),
    }
    if userinfo:
        user, _, password = (unquote(part) for part in userinfo.partition(":"))
        headers["Authorization"] = f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"
    if notify.secret is not None:
        headers[SIGNATURE] = signature(notify.secret.get_secret_value(), body)
    # Only http and https pass the settings.
    request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310
    tried: Future[None] = Future()
    # In a thread that nothing waits for: the timeout of a socket begins again with each byte that a slow server sends.
    threading.Thread(target=_try_request, args=(request, notify.timeout_seconds, tried), name="notify", daemon=True).start()
    try:
        tried.result(notify.timeout_seconds)
    except TimeoutError:
        raise HookError(f"{parts.hostname} did not answer within {notify.timeout_seconds:g} s") from None


def _try_request(request: urllib.request.Request, timeout_seconds: float, tried: Future[None]) -> None:
    """Sends a request; `tried` gets its end, a `HookError` where it was not taken."""
    try:
        _request(request, timeout_seconds)
    except BaseException as error:  # noqa: BLE001 - raised by who waits
        tried.set_exception(error)
    else:
        tried.set_result(None)


def _request(request: urllib.request.Request, timeout_seconds: float) -> None:
    where = urlsplit(request.full_url).hostname
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout_seconds) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        error.close()
        raise HookError(f"{where} answered {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise HookError(f"{where} cannot be reached: {type(reason).__name__}") from None


def signature(secret: str, body: bytes) -> str:
    """`sha256=` and the HMAC-SHA256 of a body in hex (RFC 2104)."""
    return f"sha256={hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()}"
