"""Remembers the folders of embedded jobs, so that commands find a job without options. There is one small
file per job, a note, under XDG_STATE_HOME."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jobs.own_files import STATE_FOLDER, embedded_broker_url, home_of, open_own, read_own
from jobs.settings import Settings, load_settings, sqlite_path
from pipelines.errors import ErrorCode, NotFoundError, StoreError, invalid

if TYPE_CHECKING:
    from jobs.ledger import Ledger
    from jobs.ledger.records import Job
    from jobs.store import ObjectStore, StoredJob

#: Maximum number of notes; the oldest are removed first.
MAX_NOTES = 1000
#: Maximum number of jobs of a ledger that are searched by name, schedule and dates.
MAX_JOBS = 1_000_000
_JOB_ID = re.compile(r"[0-9A-Za-z-]{1,64}")


#: Errors of reading or writing a note, which are ignored.
_IGNORED = (OSError, RuntimeError, StoreError, UnicodeDecodeError)


def _folder(kind: str) -> Path:
    """The folder for notes of one kind: `jobs`, or `dev` with a note for each running `nightjar dev`. Raises
    `RuntimeError` if the user has no home folder."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    root = base if base.is_absolute() else Path.home() / ".local" / "state"
    return root / "nightjar" / kind


def _note(kind: str, name: str, home: Path | None) -> None:
    """Writes a note with a home, or removes it."""
    with suppress(*_IGNORED):
        note = _folder(kind) / name
        if home is None:
            note.unlink(missing_ok=True)
            return
        with os.fdopen(open_own(note, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, make_folders=True), "w") as file:
            file.write(str(home.absolute()))


def remember(job_id: str, home: Path) -> None:
    """Notes that a job is in `home`."""
    _note("jobs", job_id, home)
    with suppress(*_IGNORED):
        newest = sorted(_folder("jobs").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for stale in newest[MAX_NOTES:]:
            stale.unlink(missing_ok=True)


def remember_if_embedded(job_id: str, settings: Settings) -> None:
    """Notes the home of a submitted job, if its ledger is in a home."""
    if settings.database_url is None:
        remember(job_id, settings.home)


@contextmanager
def registered_dev(home: Path) -> Iterator[None]:
    """Notes, during the block, that a `nightjar dev` is running in `home`. Jobs that are submitted
    from any folder go to it."""
    name = hashlib.sha256(str(home.absolute()).encode()).hexdigest()[:16]
    _note("dev", name, home)
    try:
        yield
    finally:
        _note("dev", name, None)


def settings_for_new_job(home: str | None) -> Settings:
    """The settings for `nightjar submit`: the given ones. If they set neither ledger, broker nor home, the
    job goes to a running `nightjar dev`: the one in the default home, else the newest one."""
    settings = load_settings(home=home)
    if (
        settings.database_url is not None
        or settings.broker_url is not None
        or settings.origin("home") != "default"
    ):
        return settings
    noted: list[str] = []
    with suppress(*_IGNORED):
        notes = sorted(_folder("dev").iterdir(), key=lambda note: note.stat().st_mtime)
        noted = [read_own(note) for note in notes]
    # A killed `nightjar dev` has left its note, but has no broker.
    homes = [home for home in noted if embedded_broker_url(Path(home) / STATE_FOLDER) is not None]
    return settings if not homes or str(settings.home.absolute()) in homes else load_settings(home=homes[-1])


def forget(job_id: str) -> None:
    """Removes the note of a deleted job."""
    if _JOB_ID.fullmatch(job_id):
        _note("jobs", job_id, None)


def remember_moved(job_id: str, settings: Settings) -> None:
    """Notes the new home of a job whose home was moved. A copy of a home does not replace the original."""
    if settings.database_url is None and _JOB_ID.fullmatch(job_id) and not homes_of(job_id):
        remember(job_id, settings.home)


def homes_of(prefix: str) -> set[Path]:
    """The homes of remembered jobs whose id starts with `prefix`, if their ledger still exists."""
    prefix = prefix.strip().lower()
    homes = set[Path]()
    if not prefix or _JOB_ID.fullmatch(prefix):
        with suppress(*_IGNORED):
            for note in _folder("jobs").glob(f"{prefix}*"):
                # A note that cannot be read, or was just removed, is skipped.
                with suppress(*_IGNORED):
                    homes.add(Path(read_own(note)))
    return {home for home in homes if (home / STATE_FOLDER / "ledger.sqlite").is_file()}


def settings_of_places(prefix: str, home: str | None) -> list[Settings]:
    """The settings of all places that may have jobs whose id starts with `prefix`: the given place, if a
    ledger or home is set; otherwise every remembered home, and the default home if it has a ledger or no home
    is remembered."""
    settings = load_settings(home=home)
    if settings.database_url is not None or settings.origin("home") != "default":
        return [settings]
    homes = homes_of(prefix)
    places = [load_settings(home=str(place)) for place in sorted(homes)]
    has_own = (settings.state_folder / "ledger.sqlite").is_file() and settings.home.absolute() not in homes
    return [settings, *places] if has_own or not places else places


def settings_for_job(prefix: str, home: str | None) -> Settings:
    """The settings of the place of a job: a set or remembered place, or else the default home.

    Raises `ledger.not_found` if several homes are remembered.
    """
    places = settings_of_places(prefix, home)
    remembered = [settings for settings in places if settings.origin("home") != "default"]
    if len(remembered) > 1:
        raise NotFoundError(
            ErrorCode.LEDGER_NOT_FOUND,
            f"Jobs of several folders begin with {prefix[:64]!r}.",
            "Give a longer id, or the folder with --out.",
        )
    return (remembered or places)[0]


@contextmanager
def reading_ledger(settings: Settings) -> Iterator[Ledger]:
    """Opens the ledger without creating anything. Raises `ledger.not_found` if it does not exist, and
    `ledger.schema`."""
    path = sqlite_path(settings.ledger_url)
    if path is not None and not path.exists():
        raise NotFoundError(
            ErrorCode.LEDGER_NOT_FOUND,
            f"There is no ledger at {path}.",
            "Give the folder of the job with --out, or set SPEECH_DATABASE_URL.",
        )
    from jobs.ledger import Ledger

    with closing(Ledger.of(settings)) as ledger:
        ledger.check_schema()
        yield ledger


class JobChoice(NamedTuple):
    """Which jobs are meant, if not by their ids; None: any. Failed, cancelled and unfinished submissions are
    never meant."""

    #: A name, or a pattern such as `books-*`.
    name: str | None = None
    #: The schedule of nightly jobs.
    schedule: str | None = None
    #: The first and the last day, YYYY-MM-DD: of the night, or of the submission in UTC.
    since: str | None = None
    until: str | None = None

    def has(self, job: Job) -> bool:
        """Whether a job is meant. Raises `config.invalid` for a day that is none."""
        day = job.labels.get("night") or datetime.fromtimestamp(job.created_at, UTC).date().isoformat()
        return (
            job.state.value not in ("ingesting", "failed", "cancelling", "cancelled")
            and fnmatchcase(job.name, self.name or "*")
            and self.schedule in (None, job.labels.get("schedule"))
            and _day(self.since or day) <= day <= _day(self.until or day)
        )


def _day(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise invalid(f"{text[:40]!r} is not a date.", "Write it as YYYY-MM-DD.") from None


_ANY = JobChoice()


class FoundJob(NamedTuple):
    """A job with its ledger and the settings of its place."""

    settings: Settings
    ledger: Ledger
    job: Job

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def store(self) -> ObjectStore:
        """The store of the job, with its identity confirmed. Raises the errors of `store_of`."""
        from jobs.store import store_of

        return store_of(self.job, self.settings.s3)

    @property
    def stored(self) -> StoredJob:
        """The job with its ledger and its store. Raises the errors of `store_of`."""
        from jobs.store import StoredJob

        return StoredJob(self.ledger, self.store, self.job)

    def renew_manifest(self) -> None:
        """See `jobs.export.manifest.renew_manifest`."""
        from jobs.export.manifest import renew_manifest

        renew_manifest(self.ledger, self.store, self.id)


@contextmanager
def chosen_jobs(ids: Sequence[str], home: str | None, choice: JobChoice = _ANY) -> Iterator[list[FoundJob]]:
    """Finds jobs by their ids, or else by a choice in all places that may have some, the oldest first. Their
    ledgers are closed at the end. Raises `ledger.not_found`."""
    found: dict[str, FoundJob] = {}
    with ExitStack() as opened:
        opening = cache(lambda url: opened.enter_context(reading_ledger(settings)))
        for prefix in ids:
            settings = settings_for_job(prefix, home)
            ledger = opening(settings.ledger_url)
            job = ledger.find_job(prefix)
            remember_moved(job.id, settings)
            found[job.id] = FoundJob(settings, ledger, job)
        for settings in () if ids else settings_of_places("", home):
            ledger = opening(settings.ledger_url)
            for job in filter(choice.has, ledger.jobs(limit=MAX_JOBS)):
                # A copied folder has the same jobs; the original takes precedence.
                if job.id not in found or settings.home in homes_of(job.id):
                    found[job.id] = FoundJob(settings, ledger, job)
        if not found:
            raise NotFoundError(
                ErrorCode.LEDGER_NOT_FOUND,
                "No job has this name, schedule and dates.",
                "See the jobs with: nightjar list.",
            )
        yield sorted(found.values(), key=lambda one: (one.job.created_at, one.id))


def out_option(job_id: str, ledger: Path | None) -> str:
    """The option ` --out HOME` for a command about a job in this SQLite ledger; empty if the command finds
    the job by its id alone."""
    home = home_of(ledger)
    if ledger is None or home is None:
        return ""
    found = settings_for_job(job_id, None)
    named = found.database_url is not None or found.origin("home") != "default"
    if named and sqlite_path(found.ledger_url) == ledger.absolute():
        return ""
    return f" --out {shlex.quote(str(home))}"
