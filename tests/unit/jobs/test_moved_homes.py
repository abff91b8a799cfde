"""A home with its ledger and store is moved or copied: its jobs go on where they are now, and old ledgers
with full addresses too."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs.cli import cli
from jobs.ingest import submit
from jobs.ledger import Ledger
from jobs.ledger.records import Job, JobSpec
from jobs.ledger.status import find_job
from jobs.ledger.transaction import read_with_driver
from jobs.own_files import located, recorded
from jobs.recent_jobs import (
    homes_of,
    out_option,
    registered_dev,
    remember,
    remember_moved,
    settings_for_job,
    settings_for_new_job,
)
from jobs.settings import Settings, sqlite_url
from jobs.store import FolderStore, open_store
from jobs.verify import ObjectCheck
from pipelines.errors import NotFoundError, ServiceError
from tests.support.ledger_kit import execute, rows
from tests.support.run_kit import listening_broker


def submitted(home: Path, store: Path | None = None) -> tuple[Ledger, Job, bool]:
    """The job of one small input in a home, and whether it is new."""
    settings = Settings(home=home)
    ledger = Ledger(settings.ledger_url)
    ledger.migrate()
    source = home / "in.jsonl"
    source.write_text(json.dumps({"example_id": "a", "messages": [["user", "text", "Hello."]]}) + "\n")
    result = submit(settings, ledger, FolderStore(store or home), str(source), JobSpec("hibari"))
    return ledger, result.job, result.created


def check_in(home: Path, job: Job, store: Path) -> None:
    """The job is whole in `home`, its store is `store`, and the same submit finds it."""
    ledger, again, created = submitted(home, store)
    assert (again.id, created) == (job.id, False)
    assert open_store(again.store_url).url == FolderStore(store).url
    assert not list(ObjectCheck(ledger, open_store(again.store_url), again))
    seen = read_with_driver(
        sqlite_url(home / ".nightjar" / "ledger.sqlite"), lambda reader: find_job(reader, job.id)
    )
    assert seen is not None
    assert seen.store_url == again.store_url
    ledger.close()


@pytest.mark.parametrize("below", ["", "the store"])
@pytest.mark.parametrize("how", [shutil.move, shutil.copytree], ids=["moved", "copied"])
def test_a_home_takes_its_jobs_along(tmp_path: Path, below: str, how: object) -> None:
    home, there = tmp_path / "home", tmp_path / "other" / "home 2"
    home.mkdir()
    there.parent.mkdir()
    ledger, job, _ = submitted(home, home / below)
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
    assert recorded(url, None) == located(url, None) == url
    for address in ("s3://bucket/prefix", "file:///elsewhere"):
        assert recorded(address, tmp_path) == located(address, tmp_path) == address
    assert recorded(url, tmp_path / "xy") == url


def test_a_moved_home_is_remembered_anew_and_a_copy_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    home, copy, there = tmp_path / "home", tmp_path / "copy", tmp_path / "there"
    home.mkdir()
    ledger, job, _ = submitted(home)
    ledger.close()
    remember(job.id, home)
    shutil.copytree(home, copy)
    remember_moved(job.id, Settings(home=copy))
    assert homes_of(job.id) == {home}
    home.rename(there)
    remember_moved(job.id, Settings(home=there))
    assert homes_of(job.id) == {there}


def test_advice_names_the_home_where_the_id_alone_leads_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SPEECH_HOME", raising=False)
    home, copy = tmp_path / "home", tmp_path / "a copy"
    home.mkdir()
    ledger, job, _ = submitted(home)
    ledger.close()
    assert out_option(job.id, home / ".nightjar" / "ledger.sqlite") == f" --out {home}"
    remember(job.id, home)
    assert out_option(job.id, home / ".nightjar" / "ledger.sqlite") == ""
    shutil.copytree(home, copy)
    assert out_option(job.id, copy / ".nightjar" / "ledger.sqlite") == f" --out '{copy}'"
    for key in copy.glob("jobs/*/input/*"):
        key.unlink()
    done = CliRunner().invoke(cli, ["verify", job.id, "--sample", "0", "--out", str(copy)])
    assert f"nightjar verify {job.id} --repair --out '{copy}'" in done.stderr
    monkeypatch.setenv("SPEECH_HOME", str(copy))
    assert out_option(job.id, copy / ".nightjar" / "ledger.sqlite") == ""
    assert out_option(job.id, home / ".nightjar" / "ledger.sqlite") == f" --out {home}"
    assert out_option(job.id, None) == out_option(job.id, tmp_path / "ledger.sqlite") == ""


def test_an_older_ledger_of_a_moved_home_is_named_by_its_path(tmp_path: Path) -> None:
    home, there = tmp_path / "home", tmp_path / "a home"
    home.mkdir()
    ledger, _, _ = submitted(home)
    execute(ledger, "UPDATE alembic_version SET version_num = '0000'")
    ledger.close()
    home.rename(there)
    with pytest.raises(ServiceError) as caught:
        Ledger.of(Settings(home=there)).check_schema()
    assert str(there / ".nightjar" / "ledger.sqlite") in caught.value.message
    assert f"`nightjar db upgrade --out '{there}'`" in caught.value.advice


def test_list_and_status_know_the_same_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    here = tmp_path / "here"
    homes = [tmp_path / "a home", tmp_path / "another", here / "out"]
    jobs: list[str] = []
    for home in homes:
        home.mkdir(parents=True)
        ledger, job, _ = submitted(home)
        execute(ledger, "UPDATE jobs SET created_at = :at", at=len(jobs))
        ledger.close()
        jobs.append(job.id)
    for job_id, home in zip(jobs[:2], homes):
        remember(job_id, home)
    # A copy has the same job, which is listed once.
    shutil.copytree(homes[0], tmp_path / "copy")
    remember("a-job-that-is-only-there", tmp_path / "copy")
    monkeypatch.chdir(here)

    def listed(*words: str) -> list[str]:
        done = CliRunner().invoke(cli, ["list", "--json", *words])
        return [json.loads(line)["job"] for line in done.stdout.splitlines()]

    assert listed() == jobs[::-1]
    assert listed("--limit", "2") == jobs[:0:-1]
    assert listed("--out", str(homes[0])) == jobs[:1]
    assert all(CliRunner().invoke(cli, ["status", job_id]).exit_code == 0 for job_id in jobs)
    table = CliRunner().invoke(cli, ["list"]).stdout
    assert all(str(home) in line for home, line in zip(("out", homes[1], homes[0]), table.splitlines()[1:]))
    ledger = Ledger(Settings(home=homes[1]).ledger_url)
    execute(ledger, "UPDATE alembic_version SET version_num = '0000'")
    ledger.close()
    assert listed() == [jobs[2], jobs[0]]
    assert f"The jobs of {homes[1]} cannot be listed" in CliRunner().invoke(cli, ["list"]).stderr


def test_the_beginning_of_jobs_in_several_folders_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        ledger, _, _ = submitted(tmp_path / name)
        ledger.close()
        remember(f"01m8-{name}", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError, match="Jobs of several folders begin with '01m8'"):
        settings_for_job("01m8", None)
    assert settings_for_job("01m8-t", None).home == tmp_path / "two"
    assert settings_for_job("01m8", "one").home == Path("one")


def test_a_new_job_goes_to_the_dev_that_runs_unless_a_place_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    own, one, two, killed = (tmp_path / name for name in ("out", "one", "two", "killed"))
    with ExitStack() as running:
        assert settings_for_new_job(None).home == Path("out")
        for age, home in enumerate((two, one)):
            running.enter_context(listening_broker(home))
            running.enter_context(registered_dev(home))
            (note,) = [
                note for note in (tmp_path / "state/nightjar/dev").iterdir() if note.read_text() == str(home)
            ]
            os.utime(note, (age, age))
        # What is left of one that was killed counts for nothing.
        running.enter_context(registered_dev(killed))
        assert settings_for_new_job(None).home == one
        assert settings_for_new_job("two").home == Path("two")
        for name in ("BROKER_URL", "DATABASE_URL", "HOME"):
            with monkeypatch.context() as changed:
                changed.setenv(f"SPEECH_{name}", {"HOME": "elsewhere"}.get(name, "redis://host/0"))
                assert settings_for_new_job(None).home == Path({"HOME": "elsewhere"}.get(name, "out"))
        running.enter_context(listening_broker(own))
        running.enter_context(registered_dev(own))
        assert settings_for_new_job(None).home == Path("out")
    assert list((tmp_path / "state/nightjar/dev").iterdir()) == []
    assert settings_for_new_job(None).home == Path("out")
