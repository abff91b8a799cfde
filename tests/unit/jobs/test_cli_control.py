"""What people do to jobs and see of them, by the command in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pydantic import SecretStr

from jobs.cli import cli
from jobs.cli.jobs import NO_WORKER, STARTING, exit_code_of, no_worker, until_end
from jobs.console import exit_code
from jobs.ingest import SubmitOptions, submit
from jobs.ledger.records import ItemState, JobSpec, JobState
from jobs.ledger.status import JobStatus
from jobs.progress import Progress
from jobs.settings import load_settings
from jobs.store import open_store
from pipelines.errors import ConfigError, ErrorCode, InputError
from pipelines.registry import describe
from tests.support.cli_kit import LINE
from tests.support.export_kit import run_all
from tests.support.ledger_kit import execute
from tests.support.run_kit import listening_broker
from tests.support.worker_rig import WORKER, Rig


def call(rig: Rig, *words: str) -> Result:
    """Its `return_value` is what `jobs.cli.main` makes the exit code of."""
    done = CliRunner().invoke(cli, [*words, "--out", str(rig.folder)], standalone_mode=False)
    assert done.exception is None, done.exception
    return done


@pytest.mark.parametrize(
    "words",
    [
        *(["status", "j", option, value] for option in ("--out", "--home") for value in ("", " ")),
        ["run", "in.jsonl", "--out", ""],
        ["report", "j", "--to", ""],
        ["export", "j", "--to", ""],
        ["export", "j", "--audio-root", ""],
        ["models", "convert", "a.pt", "--like", "b", "--out", ""],
        ["submit", "in.jsonl", "--qa-config", ""],
    ],
)
def test_a_path_that_is_empty_is_wrong_usage(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, words)
    assert (done.exit_code, "the path is empty" in done.output) == (2, True), done.output
    assert list(tmp_path.iterdir()) == []


def test_an_option_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--out $FOLDER --dry-run` with FOLDER unset would really run, into a folder of that name."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["run", "in.jsonl", "--out", "--dry-run"])
    assert (done.exit_code, "write ./--dry-run for a path of this name" in " ".join(done.output.split())) == (
        2,
        True,
    ), done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["SPEECH_HOME", "SPEECH_STORE_URL"])
def test_a_folder_of_the_environment_that_is_empty_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "")
    with pytest.raises(ConfigError, match=f"environment {name}.*it is empty"):
        load_settings()


@pytest.mark.parametrize(
    "words",
    [
        ["run", "in.jsonl", "--out", "s3://bucket/x"],
        ["submit", "in.jsonl", "--out", "gs:/bucket/x"],
        ["report", "j", "--to", "s3://bucket/report.html"],
    ],
)
def test_an_address_is_no_folder_of_this_host(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a path it would be a folder of that name here, and what is meant for a bucket would lie in it."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(LINE % ("a", "Hello."))
    done = CliRunner().invoke(cli, words)
    said = " ".join(f"{done.output} {done.exception}".split())
    assert done.exit_code != 0
    assert "is an address" in said, said
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_export_goes_to_a_path_or_to_s3(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(LINE % ("a", "Hello."))
    store = open_store(rig.settings.effective_store_url)
    job = submit(rig.settings, rig.ledger, store, "in.jsonl", JobSpec("hibari")).job
    run_all(rig.ledger, store, job.id, 0.1)
    for to in ("gs://bucket/x", "s3:/bucket/x"):
        done = CliRunner().invoke(
            cli, ["export", job.id, "--format", "webdataset", "--to", to, "--out", str(rig.folder)]
        )
        assert isinstance(done.exception, ConfigError), done.output
        assert done.exception.message == f"Exports cannot be written to {to!r}."
    assert not Path("gs:").exists()
    assert not Path("s3:").exists()


@pytest.mark.parametrize(("url", "words"), [("s3:/bucket/x", "two slashes"), ("file:/tmp/x", "two slashes")])
def test_an_address_of_a_store_with_one_slash_is_no_folder(
    url: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEECH_STORE_URL", url)
    with pytest.raises(ConfigError, match=words):
        load_settings()


def test_jobs_are_found_by_their_labels(rig: Rig) -> None:
    labels = [{"corpus": "evening", "by": "anna"}, {"corpus": "evening", "by": 'b"c'}, {"corpus": "noon"}, {}]
    jobs = [
        rig.submit([f"text {n}"], options=SubmitOptions(labels=given)).id for n, given in enumerate(labels)
    ]

    def listed(*words: str) -> list[str]:
        return [json.loads(line)["job"] for line in call(rig, "list", "--json", *words).stdout.splitlines()]

    assert listed("--label", "corpus=evening") == [jobs[1], jobs[0]]
    assert listed("--label", "corpus=evening", "--limit", "1") == [jobs[1]]
    assert listed("--label", "corpus=evening", "--label", 'by=b"c') == [jobs[1]]
    assert listed("--label", "corpus=evening", "--state", "completed") == []
    assert listed("--label", "corpus=") == []
    assert listed() == jobs[::-1]
    assert "by=anna, corpus=evening" in call(rig, "list").stdout
    assert "labels  by=anna, corpus=evening" in call(rig, "status", jobs[0]).stdout
    assert json.loads(call(rig, "status", jobs[0], "--json").stdout)["labels"] == labels[0]
    assert CliRunner().invoke(cli, ["list", "--label", "corpus"]).exit_code == 2


def test_what_is_cancelled_was_not_made(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    job = rig.submit([f"text {n}" for n in range(5)])
    lease = rig.claim_next()
    execute(rig.ledger, "UPDATE items SET state = 1 WHERE idx < 2")
    execute(rig.ledger, "UPDATE shards SET n_done = 2")
    rig.ledger.cancel(lease.job.id)
    with Progress(quiet=False) as progress:
        progress.update(rig.ledger.status(job.id))
    assert capsys.readouterr().err.startswith("cancelled: 2 of 5 items, 3 skipped")


def test_a_job_that_no_live_worker_takes_says_so(rig: Rig) -> None:
    job = rig.submit(["hello"])
    said = "o live worker takes this job"
    assert said not in call(rig, "status", job.id).output
    assert json.loads(call(rig, "status", job.id, "--json").stdout)["workers"] == 1
    rig.ledger.register_worker(WORKER.__class__("worker-2", "host", 1, "", "other", "test", 2))
    rig.ledger.retire_worker(WORKER.id)
    assert json.loads(call(rig, "status", job.id, "--json").stdout)["workers"] == 0
    for words in (["status"], ["wait", "--timeout", "0"]):
        assert said in call(rig, words[0], job.id, *words[1:]).output, words
    rig.ledger.pause(job.id)
    assert said not in call(rig, "status", job.id).output


def test_workers_that_were_killed_with_their_broker_are_dead_at_once(rig: Rig) -> None:
    """Those of another broker that share the ledger live on."""
    job = rig.submit(["hello", "again"])
    rig.claim_next()
    rig.ledger.register_worker(WORKER.__class__("home:worker-2", "host", 1, "", "", "test", 2))

    def seen() -> tuple[int, bool, dict[str, str]]:
        lines = map(json.loads, call(rig, "workers", "--json").stdout.splitlines())
        workers = {line["worker"]: line["state"] for line in lines}
        count = json.loads(call(rig, "status", job.id, "--json").stdout)["workers"]
        return count, "o live worker takes this job" in call(rig, "status", job.id).output, workers

    both = {WORKER.id: "up", "home:worker-2": "up"}
    assert seen() == (2, False, both)
    with listening_broker(rig.folder):
        assert seen() == (2, False, both)
    # Its record is left, as after a kill.
    assert seen() == (1, False, {WORKER.id: "up", "home:worker-2": "lost"})
    rig.ledger.retire_worker(WORKER.id)
    assert seen() == (0, True, {"home:worker-2": "lost"})
    assert rig.ledger.status(job.id).workers == 0


def test_a_watch_says_once_that_no_worker_lives(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    job = rig.submit(["hello"])
    rig.ledger.retire_worker(WORKER.id)
    looks = 0

    def look() -> JobStatus:
        nonlocal looks
        looks += 1
        if looks == 3:
            rig.ledger.cancel(job.id)
        return rig.ledger.status(job.id)

    with Progress(quiet=False) as progress:
        status = until_end(look, progress, rig.settings)
    assert capsys.readouterr().err.count("No live worker takes this job") == 1
    assert exit_code_of(status.job.state) == call(rig, "watch", job.id).return_value == 6


def test_while_a_run_starts_its_worker_nobody_is_told_to_start_one(rig: Rig) -> None:
    job = rig.submit(["hello"])
    rig.ledger.retire_worker(WORKER.id)
    with listening_broker(rig.folder):
        for words in (["status"], ["wait", "--timeout", "0"]):
            output = call(rig, words[0], job.id, *words[1:]).output
            assert "he worker of this folder's `nightjar run`" in output
            assert "o live worker takes this job" not in output
        other = rig.settings.model_copy(update={"database_url": SecretStr("postgresql://host/speech")})
        assert (no_worker(rig.settings), no_worker(other)) == (STARTING, NO_WORKER)


def test_retry_leaves_what_can_never_succeed(rig: Rig) -> None:
    job = rig.submit(
        ["fine", "[[refuse:input.unpronounceable]]", "[[refuse:input.too_long]]", "[[fail:synth.no_eos]]"]
    )
    rig.run_next()
    states = lambda: [row.state for row in rig.items(job)]  # noqa: E731
    done, failed, pending = ItemState.DONE, ItemState.FAILED, ItemState.PENDING
    nothing = json.loads(call(rig, "retry", job.id, "--code", "input.too_long", "--json").stdout)
    assert (nothing["reopened"], nothing["left"], nothing["state"]) == (
        0,
        {"input.too_long": 1},
        "completed_with_errors",
    )
    told = call(rig, "retry", job.id)
    assert told.stdout.startswith(f"Reopened 1 item of {job.id}.")
    assert "1 x input.unpronounceable" in told.stderr
    assert "--force" in told.stderr
    assert states() == [done, failed, failed, pending]
    forced = json.loads(call(rig, "retry", job.id, "--force", "--json").stdout)
    assert (forced["reopened"], forced["left"]) == (2, {})
    assert states() == [done, pending, pending, pending]


def test_codes_that_no_retry_mends_are_those_of_the_line() -> None:
    permanent = {code for code in ErrorCode if code.permanent}
    assert permanent == {code for code in ErrorCode if code.value.startswith("input.")} | {
        ErrorCode.STORE_BAD_KEY
    }
    assert not any(code.retryable for code in permanent)


@pytest.mark.parametrize(("line", "status"), [("", 0), ("broken\n", 1)])
def test_a_dry_run_with_refused_lines_ends_with_1(rig: Rig, line: str, status: int) -> None:
    path = rig.folder / "in.jsonl"
    path.write_text('{"example_id": "a", "messages": [["user", "text", "Hello."]]}\n' + line)
    done = call(rig, "submit", str(path), "--dry-run", "--model", "fake", "--json")
    assert (done.return_value, json.loads(done.stdout)["items"]) == (status, 1)


def test_a_dry_run_of_which_nothing_is_left_counts_what_it_does_not_show(rig: Rig) -> None:
    path = rig.folder / "in.jsonl"
    path.write_text('["user", "video", "x.mp4"]\n' * 34)
    words = ["submit", str(path), "--dry-run", "--model", "fake", "--out", str(rig.folder)]
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    lines = done.stdout.splitlines()
    assert sum(".message " in line for line in lines) == 10
    assert any(line.startswith("rejected.input.") and line.endswith(" 34") for line in lines)
    assert "got `array`" in done.stdout
    assert str(done.exception).startswith("No line of the input can become an item: 34 lines refused.")
    assert isinstance(done.exception, InputError)
    assert exit_code(done.exception) == 4
    path.write_text("")
    assert str(CliRunner().invoke(cli, words, standalone_mode=False).exception).startswith(
        "The input is empty."
    )


def test_abort_refuses_what_an_earlier_submit_left_out(rig: Rig) -> None:
    path = rig.folder / "in.jsonl"
    path.write_text('{"example_id": "a", "messages": [["user", "text", "Hello."]]}\nbroken\n')
    job = rig.submit_file(path)
    assert job.rejected_lines == 1
    with pytest.raises(InputError, match=r"^Line 2: ") as caught:
        rig.submit_file(path, options=SubmitOptions(on_error="abort"))
    assert job.id in str(caught.value)
    assert rig.ledger.job(job.id).state is JobState.READY
    # An ingest that was not ended is taken back.
    execute(rig.ledger, "UPDATE jobs SET state = 'ingesting'")
    with pytest.raises(InputError):
        rig.submit_file(path, options=SubmitOptions(on_error="abort"))
    assert rig.ledger.jobs() == []
    assert not [key for key in rig.store.objects if job.id in key]


def test_items_and_their_errors_name_the_line_of_the_file(rig: Rig) -> None:
    lines = [
        {"example_id": f"item-{n}", "messages": [["user", "text", text]]}
        for n, text in enumerate(("a", "[[fail:synth.nan]]", "b"))
    ]
    path = rig.folder / "in.jsonl"
    path.write_text("broken\n" + "".join(f"\n{json.dumps(line)}\n" for line in lines))
    home = open_store(str(rig.folder))
    rig.store = home  # pyright: ignore[reportAttributeAccessIssue]
    job = rig.submit_file(path)
    rig.run_next()
    views = lambda *words: [json.loads(line) for line in call(rig, *words, "--json").stdout.splitlines()]  # noqa: E731
    assert [(view["kind"], view["line"], view["index"]) for view in views("errors", job.id)] == [
        ("line", 1, None),
        ("item", 5, 1),
    ]
    assert [view["line"] for view in views("items", job.id)] == [3, 5, 7]
    assert [view["line"] for view in views("items", job.id, "--after", "1")] == [7]
    assert "\nline 5\tsynth.nan\titem-1\t" in call(rig, "errors", job.id).stdout
    assert [row.split("\t")[:3] for row in call(rig, "items", job.id).stdout.splitlines()[1:]] == [
        ["0", "3", "done"],
        ["1", "5", "failed"],
        ["2", "7", "done"],
    ]
    (key,) = {key for key, _ in rig.ledger.shard_inputs(job.id).values()}
    home.delete(key)
    gone = call(rig, "errors", job.id)
    assert "\nitem 1\tsynth.nan\t" in gone.stdout
    assert key in gone.stderr
    assert [view["line"] for view in views("items", job.id)] == [None] * 3


def test_text_that_the_voice_cannot_pronounce_is_refused_at_submit(rig: Rig) -> None:
    texts = ["Plain words.", "...", "\u4f60\u597d", "caf\u00e9", "&", "\U0001f600"]
    lines = [
        {"example_id": f"item-{n}", "messages": [["user", "text", text]]} for n, text in enumerate(texts)
    ]
    lines.append(
        {"example_id": "voiced", "messages": [["user", "text", "..."]], "generation": {"voice": "heart"}}
    )
    path = rig.folder / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    view = json.loads(call(rig, "submit", str(path), "--dry-run", "--json").stdout)
    assert (view["items"], view["rejected"]) == (3, {"input.unpronounceable": 4})
    assert [line["line"] for line in view["rejected_lines"]] == [2, 3, 6, 7]


@pytest.mark.parametrize(("kind", "engine"), [("auto", "native"), ("native", "native"), ("vllm", "vllm")])
def test_a_model_is_shown_on_the_engine_that_the_settings_choose(
    kind: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEECH_ENGINE__KIND", kind)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shown = (
        CliRunner().invoke(cli, ["models", str(Path(__file__).parents[2] / "golden/spark/checkpoint")]).stdout
    )
    told = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert (told["engine"], told["engines"]) == (engine, "native, vllm")


def test_a_models_card_as_json_has_no_functions(rig: Rig) -> None:
    (line,) = CliRunner().invoke(cli, ["models", "hibari", "--json"]).stdout.splitlines()
    assert not [name for name in json.loads(line) if name.startswith("check")]
    assert describe("hibari").check_text is not None


def test_the_end_of_a_cancelled_job_is_reported_where_no_worker_would(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEECH_NOTIFY__COMMAND", f"sh -c 'cat >> {rig.folder}/ends'")
    job = rig.submit(["a"])
    call(rig, "cancel", job.id)
    view = json.loads((rig.folder / "ends").read_text())
    assert (view["job"], view["state"]) == (job.id, "cancelled")
    monkeypatch.setenv("SPEECH_NOTIFY__COMMAND", "false")
    other = rig.submit(["b"])
    assert "was not reported: the command ended with status 1" in call(rig, "cancel", other.id).stderr
