"""A home with its ledger and store is moved or copied: its jobs go on where they are now, and old ledgers with full addresses too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.cli import cli
from jobs.ingest import _idempotency_key, submit
from jobs.ledger import Ledger
from jobs.ledger.location import located, recorded
from jobs.ledger.records import Job, JobSpec
from jobs.ledger.status import find_job, read_with_driver
from jobs.recent_jobs import homes_of, keep_remembered, out_words, remember
from jobs.settings import Settings, sqlite_url
from jobs.store import FolderStore, open_store
from jobs.verify import ObjectCheck
from pipelines.errors import ServiceError
from tests.support.ledger_kit import execute, rows


def submitted(home: Path, store: Path | None = None) -> tuple[Ledger, Job, bool]:
    """The job of one small input in a home, and whether it is new."""
    settings = Settings(home=home)
    ledger = Ledger.open(settings.ledger_url)
    ledger.migrate()
    source = home / "in.jsonl"
    source.write_text(json.dumps({"example_id": "a", "messages": [["user", "text", "Hello."]]}) + "\n")
    result = submit(settings, ledger, FolderStore(store or home), str(source), JobSpec("hibari"))
    return ledger, result.job, result.created


def recorded_as_before(ledger: Ledger, job: Job, url: str) -> None:
    """Writes the job's store and key as versions did that knew full addresses only."""
    key = _idempotency_key(job.input_sha256, job.spec_sha, url, "dialogues")
    execute(ledger, "UPDATE jobs SET store_url = :url, idempotency_key = :key", url=url, key=key)


def check_in(home: Path, job: Job, store: Path) -> None:
    """The job is whole in `home`, its store is `store`, and the same submit finds it."""
    ledger, again, created = submitted(home, store)
    assert (again.id, created) == (job.id, False)
    assert open_store(again.store_url).url == FolderStore(store).url
    assert not list(ObjectCheck(ledger, open_store(again.store_url), again))
    seen = read_with_driver(sqlite_url(home / ".nightjar" / "ledger.sqlite"), lambda reader: find_job(reader, job.id))
    assert seen is not None
    assert seen.store_url == again.store_url
    ledger.close()


@pytest.mark.parametrize("below", ["", "the store"])
@pytest.mark.parametrize("before", [False, True], ids=["now", "full address"])
@pytest.mark.parametrize("how", [shutil.move, shutil.copytree], ids=["moved", "copied"])
def test_a_home_takes_its_jobs_along(tmp_path: Path, below: str, before: bool, how: object) -> None:
    home, there = tmp_path / "home", tmp_path / "other" / "home 2"
    home.mkdir()
    there.parent.mkdir()
    ledger, job, _ = submitted(home, home / below)
    if before:
        recorded_as_before(ledger, job, FolderStore(home / below).url)
    ledger.close()
    check_in(home, job, home / below)
    how(home, there)  # type: ignore[operator]
    check_in(there, job, there / below)


def test_the_ledger_names_no_path_of_its_home(tmp_path: Path) -> None:
    ledger, _, _ = submitted(tmp_path, tmp_path / "a b")
    assert rows(ledger, "SELECT store_url FROM jobs") == [("home:a%20b",)]
    ledger.close()


def test_a_store_elsewhere_stays_where_it_is(tmp_path: Path) -> None:
    home, store, there = tmp_path / "home", tmp_path / "store", tmp_path / "there"
    home.mkdir()
    ledger, job, _ = submitted(home, store)
    ledger.close()
    home.rename(there)
    check_in(there, job, store)


def test_addresses_without_a_place_are_full(tmp_path: Path) -> None:
    url = (tmp_path / "x").as_uri()
    assert recorded(url, None) == located(url, None, "job") == url
    for address in ("s3://bucket/prefix", "file:///elsewhere"):
        assert recorded(address, tmp_path) == located(address, tmp_path, "job") == address
    assert recorded(url, tmp_path / "xy") == url


def test_a_moved_home_is_remembered_anew_and_a_copy_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home, copy, there = tmp_path / "home", tmp_path / "copy", tmp_path / "there"
    home.mkdir()
    ledger, job, _ = submitted(home)
    ledger.close()
    remember(job.id, home)
    shutil.copytree(home, copy)
    keep_remembered(job.id, Settings(home=copy))
    assert homes_of(job.id) == {home}
    home.rename(there)
    keep_remembered(job.id, Settings(home=there))
    assert homes_of(job.id) == {there}


def test_advice_names_the_home_where_the_id_alone_leads_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SPEECH_HOME", raising=False)
    home, copy = tmp_path / "home", tmp_path / "a copy"
    home.mkdir()
    ledger, job, _ = submitted(home)
    ledger.close()
    assert out_words(job.id, home / ".nightjar" / "ledger.sqlite") == f" --out {home}"
    remember(job.id, home)
    assert out_words(job.id, home / ".nightjar" / "ledger.sqlite") == ""
    shutil.copytree(home, copy)
    assert out_words(job.id, copy / ".nightjar" / "ledger.sqlite") == f" --out '{copy}'"
    for key in copy.glob("jobs/*/input/*"):
        key.unlink()
    done = CliRunner().invoke(cli, ["verify", job.id, "--sample", "0", "--out", str(copy)])
    assert f"nightjar verify {job.id} --repair --out '{copy}'" in done.stderr
    monkeypatch.setenv("SPEECH_HOME", str(copy))
    assert out_words(job.id, copy / ".nightjar" / "ledger.sqlite") == ""
    assert out_words(job.id, home / ".nightjar" / "ledger.sqlite") == f" --out {home}"
    assert out_words(job.id, None) == out_words(job.id, tmp_path / "ledger.sqlite") == ""


def test_an_older_ledger_of_a_moved_home_is_named_by_its_path(tmp_path: Path) -> None:
    home, there = tmp_path / "home", tmp_path / "a home"
    home.mkdir()
    ledger, _, _ = submitted(home)
    execute(ledger, "UPDATE alembic_version SET version_num = '0001'")
    ledger.close()
    home.rename(there)
    with pytest.raises(ServiceError) as caught:
        Ledger.of(Settings(home=there)).check_schema()
    assert str(there / ".nightjar" / "ledger.sqlite") in caught.value.message
    assert f"`nightjar db upgrade --out '{there}'`" in caught.value.advice
