"""Where `nightjar run` writes and reads: its folder, a store, a bucket, a folder that was moved, and
nowhere else."""

from __future__ import annotations

import json
import shutil
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

import pytest

from jobs.store.base import IDENTITY_KEY
from tests.support.run_kit import SLOW, Shell, until, write_input
from tests.support.services import MotoS3


def test_names_cannot_leave_the_folder_and_its_job_is_found(shell: Shell) -> None:
    ids = [
        "../../x",
        "/etc/passwd",
        "a" * 300,
        "naïve 日本 🎵",
        "line\nbreak",
        "'; DROP TABLE items; --",
        "$(touch pwned)",
        "..",
        ".",
        "CON",
        "\x1b[31m",
    ]
    lines = [
        json.dumps({"example_id": example_id, "messages": [["user", "text", "Hello there."]]})
        for example_id in ids
    ]
    (shell.folder / "in.jsonl").write_text("\n".join(lines))
    odd = "else where%20?#&é"
    run = shell.run("run", "in.jsonl", "--json", "--out", odd)
    assert run.returncode in (0, 1), run.stderr
    job = json.loads(run.stdout)["job"]
    rows = shell.items(odd)
    for row in rows.values():
        path = (shell.folder / odd / str(row["key"])).resolve()
        assert path.is_relative_to((shell.folder / odd).resolve())
        assert path.is_file()
    assert {"../../x", "naïve 日本 🎵", "'; DROP TABLE items; --"} <= set(rows)
    assert sorted(path.name for path in shell.folder.iterdir()) == [odd, "in.jsonl", "state"]
    listed = shell.run("items", job)
    assert "\x1b" not in listed.stdout
    assert len(listed.stdout.splitlines()) == len(rows) + 1
    status = shell.run("status", job[:12], "--json")
    assert json.loads(status.stdout)["job"] == job, "it is found without options"
    assert shell.run("status", job, "--out", "out").returncode == 3


def test_a_run_into_a_bucket(shell: Shell, moto: MotoS3) -> None:
    write_input(shell.folder / "in.jsonl", 2)
    url = f"s3://{moto.create_bucket(f'run-{uuid.uuid4().hex[:12]}')}/prefix"
    shell.environment |= {
        "SPEECH_STORE_URL": url,
        "SPEECH_S3__ENDPOINT_URL": moto.endpoint,
        "SPEECH_S3__ACCESS_KEY_ID": moto.access_key,
        "SPEECH_S3__SECRET_ACCESS_KEY": moto.secret_key,
        "SPEECH_S3__REGION": "us-east-1",
    }
    run = shell.run("run", "in.jsonl")
    assert run.returncode == 0, run.stderr
    job = run.stdout.split()[0]
    assert f"files   {url}/jobs/{job}/audio" in run.stdout
    assert f"list    {url}/jobs/{job}/manifest.jsonl" in run.stdout
    # The ledger and what belongs to this machine stay in the folder.
    assert sorted(path.name for path in (shell.folder / "out").iterdir()) == [".nightjar", "reports"]
    assert shell.run("verify", job, "--sample", "1").returncode == 0


def test_a_run_uses_the_store_that_is_set(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 2)
    run = shell.run(
        "run", "in.jsonl", "--json", SPEECH_STORE_URL="the store", SPEECH_BROKER_URL="redis://127.0.0.1:9/0"
    )
    assert run.returncode == 0, run.stderr
    view = json.loads(run.stdout)
    assert "set by store_url (environment)" in run.stderr
    assert "broker_url (environment) is not used" in run.stderr
    store = shell.folder / "the store"
    assert view["audio"] == f"{store}/jobs/{view['job']}/audio"
    assert len(list(store.glob("jobs/*/audio/*/*.wav"))) == 2
    assert not (shell.folder / "out" / "jobs").exists()
    assert shell.run("verify", view["job"], "--sample", "0").returncode == 0
    again = shell.run("run", "in.jsonl", "--json", SPEECH_STORE_URL="the store")
    assert json.loads(again.stdout)["job"] == view["job"]


def test_a_run_without_the_store_of_the_job_that_was_begun_says_so(shell: Shell) -> None:
    """As in another terminal, where the variable was forgotten."""
    write_input(shell.folder / "in.jsonl", 2)
    store = shell.folder / "store"
    begun = json.loads(shell.run("run", "in.jsonl", "--json", SPEECH_STORE_URL=str(store)).stdout)["job"]
    with closing(sqlite3.connect(shell.folder / "out" / ".nightjar" / "ledger.sqlite")) as ledger, ledger:
        ledger.execute("UPDATE jobs SET state = 'running'")
    run = shell.run("run", "in.jsonl")
    assert run.returncode == 0, run.stderr
    said = f"Job {begun} of the same input and options was started in the store file://{store}. SPEECH_STORE_URL=file://{store} continues it."
    assert said in run.stderr
    assert said not in shell.run("run", "in.jsonl").stderr, "it is no new job any more"
    again = shell.run("run", "in.jsonl", "--json", SPEECH_STORE_URL=f"file://{store}")
    assert json.loads(again.stdout)["job"] == begun


@pytest.mark.parametrize("url", ["postgresql://me:hunter2@127.0.0.1:9/x", "sqlite:///elsewhere.sqlite"])
def test_a_ledger_elsewhere_is_refused_before_anything_is_written(shell: Shell, url: str) -> None:
    write_input(shell.folder / "in.jsonl", 1)
    run = shell.run("run", "in.jsonl", SPEECH_DATABASE_URL=url)
    assert run.returncode == 4
    assert "config.invalid" in run.stderr
    assert "database_url (environment)" in run.stderr
    assert "nightjar submit" in run.stderr
    assert "hunter2" not in run.stderr
    assert not (shell.folder / "out").exists()


def test_a_run_writes_only_where_it_says(shell: Shell, tmp_path: Path) -> None:
    """An empty home of the user: nothing but the pointer to the job is left there, and nothing in the
    folder of temporary files."""
    write_input(shell.folder / "in.jsonl", 2)
    user, temporary = tmp_path / "user", tmp_path / "temporary"
    user.mkdir()
    temporary.mkdir()
    # What the session says of caches and of telemetry does not count.
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "ORT_DISABLE_TELEMETRY"):
        shell.environment.pop(name, None)
    run = shell.run("run", "in.jsonl", "--quiet", HOME=str(user), TMPDIR=str(temporary))
    assert run.returncode == 0, run.stderr
    assert [path.relative_to(user).as_posix() for path in user.rglob("*") if path.is_file()] == [
        f".local/state/nightjar/jobs/{run.stdout.strip()}"
    ]
    assert not list(temporary.iterdir())


def test_a_run_whose_folder_is_renamed_says_where_it_looked_and_goes_on_there(slow: Shell) -> None:
    total, (here, moved) = 40, (slow.folder / name for name in ("out", "moved"))
    write_input(slow.folder / "in.jsonl", total)
    slow.hold("line-0")
    run = slow.start(*SLOW)
    until(lambda: slow.done() >= 10, "no item was made")
    here.rename(moved)
    slow.let_go()
    said = run.communicate(timeout=240)[1]
    assert run.returncode == 5, said
    assert f"The folder of this run is no longer at {here}" in said
    assert not here.exists()
    again = slow.run(*SLOW, "--out", "moved")
    assert again.returncode == 0, again.stderr
    assert slow.done("moved") == total
    assert slow.run("verify", again.stdout.split()[0], "--sample", "1", "--out", "moved").returncode == 0


def test_a_run_waits_for_a_store_that_is_away(slow: Shell) -> None:
    total, (store, away) = 30, (slow.folder / name for name in ("store", "away"))
    slow.environment["SPEECH_STORE_URL"] = str(store)
    write_input(slow.folder / "in.jsonl", total)
    slow.hold("line-0")
    run = slow.start(*SLOW)
    until(lambda: slow.done("store") >= 10, "no item was made")
    store.rename(away)
    store.mkdir()
    log = slow.folder / "out" / ".nightjar" / "worker.log"
    until(lambda: "is not available" in log.read_text(), "the worker does not wait")
    slow.let_go()
    left = list(store.iterdir())
    store.rmdir()
    away.rename(store)
    said = run.communicate(timeout=240)[1]
    assert (run.returncode, left) == (0, []), said
    assert slow.done("store") == total


def test_another_folder_in_the_place_of_a_store_is_refused(shell: Shell) -> None:
    store, away = (shell.folder / name for name in ("store", "away"))
    shell.environment["SPEECH_STORE_URL"] = str(store)
    write_input(shell.folder / "in.jsonl", 2)
    job = shell.run("run", "in.jsonl", "-q").stdout.strip()
    store.rename(away)
    commands = (
        ("run", "in.jsonl"),
        ("verify", job),
        ("export", job, "--to", "x.jsonl"),
        ("delete", job, "--yes"),
        ("report", job),
    )
    for missing in (True, False):
        for command in commands if missing else commands[:2]:
            refused = shell.run(*command)
            assert "store.unreachable" in refused.stderr, command
            assert str(store) in refused.stderr, command
        if missing:
            assert not store.exists()
            store.mkdir()
    assert list(store.iterdir()) == []
    store.rmdir()
    away.rename(store)
    assert shell.run("verify", job, "--sample", "0").returncode == 0


def test_a_folder_that_lost_its_files_or_is_anothers(shell: Shell) -> None:
    """Beside its ledger: what was removed is made again, and another store that was copied over is refused."""
    write_input(shell.folder / "in.jsonl", 2)
    job = shell.run("run", "in.jsonl", "-q").stdout.strip()
    file = shell.folder / "out" / IDENTITY_KEY
    own = file.read_text()
    file.write_text("7" * 32)
    refused = shell.run("run", "in.jsonl")
    assert (refused.returncode, "store.unreachable" in refused.stderr, own in refused.stderr) == (
        5,
        True,
        True,
    ), refused.stderr
    for path in (shell.folder / "out").iterdir():
        if path.name != ".nightjar":
            path.unlink() if path.is_file() else shutil.rmtree(path)
    again = shell.run("run", "in.jsonl")
    assert again.returncode == 0, again.stderr
    assert shell.run("verify", job, "--sample", "0").returncode == 0


def test_a_moved_folder_goes_on(shell: Shell) -> None:
    write_input(shell.folder / "in.jsonl", 3)
    job = shell.run("run", "in.jsonl", "-q").stdout.strip()
    here, moved, copy = (shell.folder / name for name in ("out", "moved", "copy"))
    here.rename(moved)
    shutil.copytree(moved, copy)
    for home in (copy, moved):
        again = shell.run("run", "in.jsonl", "--json", "--out", home.name)
        assert json.loads(again.stdout)["job"] == job, again.stderr
        assert json.loads(again.stdout)["audio"] == f"{home}/jobs/{job}/audio"
        assert "already done" in again.stderr
    assert shell.run("verify", job, "--sample", "1", "--out", "moved").returncode == 0
    assert shell.run("report", job, "--out", "moved").stdout.strip() == str(moved / "reports" / f"{job}.html")
    assert len(shell.items("moved")) == 3
    assert not here.exists()
    # Without a folder: the first command that named the one it was moved to has noted it.
    assert json.loads(shell.run("status", job, "--json").stdout)["store"] in (copy.as_uri(), moved.as_uri())
