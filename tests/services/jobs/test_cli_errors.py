"""The `nightjar` command as a process: what careless or hostile use gets."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.cli_kit import CLOSED_PORT, JOBS, LINE, call, error_code


def test_a_job_that_is_not_there(submitted: tuple[Path, str, str]) -> None:
    folder = submitted[0]
    commands = ("status", "items", "errors", "retry", "cancel", "wait", "export")
    names = ("zzz", "../../x", "'; DROP TABLE jobs; --", "%", "_", "\x01", "é" * 500)
    for command, job in [
        *((command, "zzz") for command in commands),
        *(("status", name) for name in names[1:]),
    ]:
        done = call(folder, command, job, "--json")
        assert (done.returncode, error_code(done)) == (3, "ledger.not_found"), (command, job)
    assert call(folder, "status", "").returncode == 2
    other = call(
        folder, "submit", "in.jsonl", "-q", "--seed", "1", SPEECH_BROKER_URL=submitted[1]
    ).stdout.strip()
    common = next(other[:length] for length in range(26, 0, -1) if submitted[2].startswith(other[:length]))
    ambiguous = call(folder, "status", common, "--json")
    assert (ambiguous.returncode, error_code(ambiguous)) == (3, "ledger.not_found")


def test_a_dry_run_refuses_what_the_submit_would(folder: Path) -> None:
    done = call(folder, "submit", "in.jsonl", "--dry-run", "--on-error", "abort", "--json")
    assert (done.returncode, error_code(done)) == (4, "input.bad_json")
    assert done.stdout == ""
    assert "Line 3" in done.stderr


def test_an_error_on_a_terminal_has_colour_unless_no_color(folder: Path) -> None:
    for value, coloured in (("", True), ("1", False)):
        environment = os.environ | {
            "NO_COLOR": value,
            "TERM": "xterm",
            "XDG_STATE_HOME": str(folder / "state"),
        }
        reader, terminal = os.openpty()
        subprocess.run(
            [*JOBS, "status", "x"], cwd=folder, env=environment, stderr=terminal, timeout=240, check=False
        )
        os.close(terminal)
        said = b""
        with suppress(OSError):  # that nobody has the other end, once all is read
            while chunk := os.read(reader, 10_000):
                said += chunk
        os.close(reader)
        assert b"ledger.not_found" in said
        assert (b"\x1b[" in said) == coloured


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("missing.jsonl", "input.unreadable"),
        ("folder", "input.unreadable"),
        ("/dev/zero", "input.unreadable"),
        ("damaged.jsonl.gz", "input.unreadable"),
        ("damaged.jsonl.zst", "input.unreadable"),
        ("empty.jsonl", "input.no_items"),
        ("binary.jsonl", "input.wrong_format"),
        ("blank.jsonl", "input.no_items"),
    ],
)
@pytest.mark.parametrize("command", ["run", "submit"])
def test_input_that_is_none(folder: Path, valkey_url: str, command: str, name: str, code: str) -> None:
    (folder / "folder").mkdir()
    (folder / "damaged.jsonl.gz").write_bytes(b"\x1f\x8b\x08garbage")
    (folder / "damaged.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfdgarbage")
    (folder / "empty.jsonl").touch()
    (folder / "binary.jsonl").write_bytes(bytes(range(256)) * 40)
    (folder / "blank.jsonl").write_text("\n\n  \n")
    environment = {} if command == "run" else {"SPEECH_BROKER_URL": valkey_url}
    done = call(folder, command, name, "--json", **environment)
    assert (done.returncode, error_code(done)) == (4, code), done.stderr
    if name in {"missing.jsonl", "folder", "/dev/zero"}:
        assert not (folder / "out").exists()
    if name in {"empty.jsonl", "blank.jsonl"}:
        assert "The input is empty." in done.stderr


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--model", "hibary"], "model.unknown"),
        (["--model", "../.."], "model.bad_checkpoint"),
        (["--voice", "nobody"], "input.unknown_voice"),
        (["--language", "klingon"], "input.unknown_language"),
    ],
)
def test_a_spec_that_cannot_be_writes_nothing(folder: Path, options: list[str], code: str) -> None:
    done = call(folder, "run", "in.jsonl", "--json", *options)
    assert (done.returncode, error_code(done)) == (4, code), done.stderr
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "in.jsonl", "--format", "mp4"],
        ["run", "in.jsonl", "--seed", "-1"],
        ["submit", "in.jsonl", "--label", "x"],
        ["submit", "in.jsonl", "--idempotency-key", " "],
        ["statsu"],
        ["items", "x", "--state", "odd"],
        ["retry", "x", "--code", "odd"],
        ["--nope"],
    ],
)
def test_wrong_usage_is_2(folder: Path, words: list[str]) -> None:
    done = call(folder, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert not (folder / "out").exists()


def test_services_that_are_away_are_5_and_nothing_is_written(folder: Path, valkey_url: str) -> None:
    away = f"127.0.0.1:{CLOSED_PORT}"
    cases = {
        "broker.unreachable": {"SPEECH_BROKER_URL": f"redis://:hunter2@{away}/0"},
        "ledger.unreachable": {
            "SPEECH_DATABASE_URL": f"postgresql://me:hunter2@{away}/x",
            "SPEECH_BROKER_URL": valkey_url,
        },
        "store.unreachable": {
            "SPEECH_STORE_URL": "s3://bucket/x",
            "SPEECH_S3__ENDPOINT_URL": f"http://{away}",
            "SPEECH_S3__ACCESS_KEY_ID": "me",
            "SPEECH_S3__SECRET_ACCESS_KEY": "hunter2",
            "SPEECH_BROKER_URL": valkey_url,
        },
    }
    for code, environment in cases.items():
        done = call(folder, "submit", "in.jsonl", "--json", **environment)
        assert (done.returncode, error_code(done)) == (5, code), done.stderr
        assert "hunter2" not in done.stderr + done.stdout
        assert call(folder, "list", "--json").stdout == ""


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    (folder / "file").write_text("x")
    for home in ("file", "file/below", "/proc/nightjar"):
        done = call(folder, "run", "in.jsonl", "--out", home, "--json")
        assert done.returncode == 5, done.stderr
        assert error_code(done) in {"store.forbidden", "ledger.unreachable"}
    assert (folder / "file").read_text() == "x"


def test_a_ledger_that_is_none(folder: Path) -> None:
    state = folder / "out/.nightjar"
    state.mkdir(parents=True)
    (state / "ledger.sqlite").write_bytes(b"this is no database" * 100)
    for words in (["list"], ["status", "x"], ["run", "in.jsonl"]):
        done = call(folder, *words, "--json")
        assert (done.returncode, error_code(done)) == (5, "ledger.unreachable"), words
    (state / "ledger.sqlite").write_bytes(b"")
    done = call(folder, "status", "x", "--json")
    assert (done.returncode, error_code(done)) == (5, "ledger.schema")


def test_wrong_settings_are_one_sentence(folder: Path) -> None:
    for variable in ("SPEECH_WORKER__THREADS", "SPEECH_NONSENSE", "SPEECH_STORE_URL"):
        value = "gopher://x" if variable == "SPEECH_STORE_URL" else "x"
        done = call(folder, "submit", "in.jsonl", "--json", **{variable: value})
        assert (done.returncode, error_code(done)) == (4, "config.invalid")


def test_a_reader_that_leaves_is_no_error(submitted: tuple[Path, str, str]) -> None:
    folder, _, job = submitted
    with (folder / "many.jsonl").open("w") as file:
        file.writelines(LINE % (f"n{number}", "Hello.") for number in range(20_000))
    job = call(folder, "submit", "many.jsonl", "-q", SPEECH_BROKER_URL=submitted[1]).stdout.strip()
    for options in ("", "--json"):
        command = f"{sys.executable} -m jobs items {job} {options} | head -n 2; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=240, check=False
        )
        assert len(done.stdout.splitlines()) == 2
        assert (done.returncode, done.stderr) == (141, "")


def test_a_reader_of_notes_that_leaves_is_no_error(submitted: tuple[Path, str, str]) -> None:
    folder, _, job = submitted
    reader, writer = os.pipe()
    os.close(reader)
    # As a person has it: what is written waits in a buffer.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    buffered["PYTHONPATH"] = str(Path(__file__).parents[3])
    command = [*JOBS, "wait", job, "--timeout", "0"]
    done = subprocess.run(
        command, cwd=folder, env=buffered, stdout=writer, stderr=writer, timeout=240, check=False
    )
    os.close(writer)
    assert done.returncode == 141


def test_closed_streams_are_no_bug(folder: Path) -> None:
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        command = f"{sys.executable} -m jobs models {closed}"
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=240, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
    full = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m jobs models > /dev/full"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert full.returncode == 1
    assert "No space left" in full.stderr
