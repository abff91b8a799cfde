"""`nightjar evaluate` against a running server: every mode, resume after a kill, a server that is busy or away, bad lines."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jobs.cli import main
from jobs.evaluation.client import _read
from tests.support.fake_dialogues import FRAME, DialoguePipeline
from tests.support.serving_kit import PATIENCE_SECONDS, Running, heard, wav

COMMAND = [sys.executable, "-m", "jobs", "evaluate"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    pipeline = DialoguePipeline()
    with Running(pipeline, slots=4, waiting_room=2) as running:
        yield running
    pipeline.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.wav").write_bytes(wav(0.3))
    return tmp_path


def write(folder: Path, *lines: dict[str, Any] | str) -> None:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    (folder / "in.jsonl").write_text(text)


def line(example_id: str, *messages: list[str], **more: Any) -> dict[str, Any]:
    return {"example_id": example_id, "messages": list(messages), **more}


def start(folder: Path, url: str, *words: str) -> subprocess.Popen[str]:
    command = [*COMMAND, "in.jsonl", "--to", "out.jsonl", "--server", url, "--json", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Runner:
    """`nightjar evaluate` in this process: its exit code, its JSON and what it says on stderr."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capfd = capfd
        monkeypatch.chdir(folder)
        for name in ("_CONNECT_SECONDS", "_MODELS_SECONDS"):
            monkeypatch.setattr(f"jobs.evaluation.client.{name}", PATIENCE_SECONDS)

    def __call__(self, url: str, *words: str) -> tuple[int, dict[str, Any], str]:
        self._capfd.readouterr()
        code = main(["evaluate", "in.jsonl", "--to", "out.jsonl", "--server", url, "--json", *words])
        out, err = self._capfd.readouterr()
        return code, json.loads(out) if out else {}, err


@pytest.fixture
def run(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(folder, capfd, monkeypatch)


def records(folder: Path) -> dict[str, dict[str, Any]]:
    head, *lines = (folder / "out.jsonl").read_text().splitlines()
    assert json.loads(head)["schema"] == "nightjar.evaluation/1"
    found = [json.loads(one) for one in lines]
    assert len({one["line"] for one in found}) == len(found)
    return {one["example_id"]: one for one in found}


def test_text_and_understanding_with_the_answers_they_are_compared_with(server: Running, folder: Path, run: Runner) -> None:
    write(
        folder,
        line("text", ["system", "text", "Be brief."], ["user", "text", "Hello?"]),
        line(
            "heard",
            ["user", "audio", "a.wav"],
            ["user", "text", "What?"],
            ["assistant", "text", "user/audio: 9644 bytes  USER/text: what?"],
        ),
        line("turns", ["user", "text", "One."], ["assistant", "text", "Two."], ["user", "text", "Three."], ["assistant", "text", "Four."]),
    )
    code, view, _ = run(server.url)
    assert (code, view["ok"], view["failed"], view["equal"], view["compared"]) == (0, 3, 0, 1, 2)
    found = records(folder)
    assert found["text"]["text"].endswith("system/text: Be brief. user/text: Hello?")
    assert found["turns"]["text"].endswith("user/text: One. assistant/text: Two. user/text: Three.")
    assert (found["heard"]["equal"], found["turns"]["equal"], "equal" in found["text"]) == (True, False, False)
    assert found["text"]["usage"]["total_tokens"] > 0


def test_audio_with_guidance_leaves_the_assistant_out(server: Running, folder: Path, run: Runner) -> None:
    write(
        folder,
        line("bell", ["user", "text", "A bell."], ["assistant", "text", "<think>No.</think>"], ["assistant", "audio", "missing.wav"]),
        line("mute", ["user", "text", "[[no_audio]] Silence."]),
        line("mine", ["user", "text", "Low."], generation={"cfg": 1.5, "seed": 5, "max_tokens": 300}),
    )
    code, view, _ = run(server.url, "--cfg", "3", "--seed", "7")
    assert (code, view["ok"], view["no_audio"], view["codes"]) == (1, 2, 1, {"synth.no_audio": 1})
    found = records(folder)
    samples, rate = heard((folder / found["bell"]["audio"]).read_bytes())
    assert (len(samples), rate) == (8 * FRAME, 16_000)
    assert found["bell"]["text"] == "<think>cfg 3</think> user/text: A bell."
    assert found["mine"]["text"].startswith("<think>cfg 1.5</think>")
    assert (found["mine"]["seed"], found["mute"]["outcome"]) == (5, "no_audio")
    assert "Silence." in found["mute"]["text"]


def test_what_is_asked_for_goes_before_what_published_clients_send(server: Running, folder: Path, run: Runner) -> None:
    pipeline = server.pipeline
    assert isinstance(pipeline, DialoguePipeline)

    def sent(*words: str) -> tuple[float | int | None, ...]:
        (folder / "out.jsonl").unlink(missing_ok=True)
        assert run(server.url, *words)[0] == 0
        made = pipeline.seen[-1].generation
        return made.temperature, made.text_temperature, made.audio_temperature, made.top_k, made.audio_top_k

    write(folder, line("a", ["user", "text", "A bell."]))
    speech = ("--mode", "text_audio")
    assert sent(*speech) == (0.8, 0.6, 0.8, 20, 20)
    assert sent(*speech, "--temperature", "0", "--top-k", "5") == (0.0, 0.0, 0.0, 5, 5)
    assert sent(*speech, "--temperature", "1", "--audio-temperature", "0.5", "--audio-top-k", "7") == (0.5, 1.0, 0.5, 20, 7)
    assert sent() == (0.6, None, None, 20, None)
    assert sent("--temperature", "1") == (1.0, None, None, 20, None)
    assert sent("--text-temperature", "0") == (0.0, None, None, 20, None)


def test_a_dialogue_that_was_put_before_others_takes_nobodys_audio(server: Running, folder: Path, run: Runner) -> None:
    lines = [line(name, ["user", "text", f"The bell {name}."]) for name in ("a", "b", "c")]
    write(folder, *lines[1:])
    assert run(server.url, "--mode", "text_audio")[0] == 0
    before = {name: (folder / one["audio"]).read_bytes() for name, one in records(folder).items()}
    write(folder, *lines)
    code, view, _ = run(server.url, "--mode", "text_audio")
    assert (code, view["ok"], view["skipped"]) == (0, 3, 2)
    found = [json.loads(one) for one in (folder / "out.jsonl").read_text().splitlines()[1:]]
    after = {one["example_id"]: (folder / one["audio"]).read_bytes() for one in found}
    assert {name: after[name] for name in before} == before
    assert len(set(after.values())) == 3


def test_an_answer_that_is_of_no_form_is_a_failure_of_its_line() -> None:
    for message in (None, "text", {"content": ["text"]}, {"content": 3}):
        answer = _read(httpx2.Response(200, json={"choices": [{"message": message}]}), 1)
        assert (answer.completion, answer.message) == (None, "The server's answer is not in OpenAI's format.")
    assert _read(httpx2.Response(200, json={"choices": [{"message": {"content": None}}]}), 1).completion is not None


def test_a_line_that_cannot_be_asked_fails_alone(server: Running, folder: Path, run: Runner) -> None:
    write(
        folder,
        "{",
        line("good", ["user", "text", "Fine."]),
        line("good", ["user", "text", "Again."]),
        line("away", ["user", "audio", "nowhere.wav"]),
        line("out", ["user", "audio", "/etc/passwd"]),
        line("link", ["user", "audio", "http://127.0.0.1/a.wav"]),
        line("cfg", ["user", "text", "Low."], generation={"cfg": -1}),
        line("last", ["assistant", "text", "Nobody asked."]),
        line("broken", ["user", "text", "[[fail:synth.no_eos]]"]),
    )
    code, view, _ = run(server.url)
    assert (code, view["ok"], view["failed"]) == (1, 1, 8)
    expected = {
        "input.bad_json": 1,
        "input.duplicate_id": 1,
        "input.audio_missing": 1,
        "input.audio_forbidden": 2,
        "input.bad_generation": 1,
        "input.empty_text": 1,
        "synth.no_eos": 1,
    }
    assert view["codes"] == expected
    code, view, err = run(server.url)
    assert (code, view["ok"], view["skipped"], view["failed"]) == (1, 1, 1, 8)
    assert "1 answer of an earlier run" in err


def test_a_killed_run_goes_on_and_asks_nothing_twice(server: Running, folder: Path, run: Runner) -> None:
    pipeline = server.pipeline
    assert isinstance(pipeline, DialoguePipeline)
    # The last half is held: however late it is killed, the run is not over.
    write(folder, *(line(f"n{number}", ["user", "text", f"Number {number}. {'[[held]]' * (number >= 30)}"]) for number in range(60)))
    process = start(folder, server.url, "--mode", "text_audio", "--connections", "8")
    server.until(lambda: (folder / "out.jsonl").exists() and len((folder / "out.jsonl").read_text().splitlines()) >= 12)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    server.until_idle()
    with (folder / "out.jsonl").open("ab") as file:
        file.write(b'{"example_id": "half a li')
    kept = {example_id for example_id, one in records_whole(folder).items() if one["outcome"] == "ok"}
    assert 10 <= len(kept) <= 30
    before = len(pipeline.seen)
    pipeline.let_go()
    code, view, _ = run(server.url, "--mode", "text_audio", "--connections", "8")
    assert (code, view["ok"], view["skipped"]) == (0, 60, len(kept))
    asked = {str(request.messages[0].content).split()[1].rstrip(".") for request in pipeline.seen[before:]}
    assert asked == {str(number) for number in range(60)} - {name[1:] for name in kept}
    found = records(folder)
    assert len(found) == 60
    assert all((folder / one["audio"]).is_file() for one in found.values())
    assert sorted(path.name for path in folder.iterdir()) == ["a.wav", "in.jsonl", "out.jsonl", "out.jsonl.audio"]


def records_whole(folder: Path) -> dict[str, dict[str, Any]]:
    lines = (folder / "out.jsonl").read_text().splitlines()[1:-1]
    return {one["example_id"]: one for one in map(json.loads, lines)}


def test_a_file_of_other_settings_is_not_continued(server: Running, folder: Path, run: Runner) -> None:
    write(folder, line("a", ["user", "text", "Fine."]))
    assert run(server.url)[0] == 0
    for words in (["--cfg", "3"], ["--seed", "9"], ["--temperature", "0"]):
        code, _, err = run(server.url, *words)
        assert (code, json.loads(err)["error"]["code"]) == (4, "config.invalid")
        assert "other settings" in err
    (folder / "out.jsonl").write_text("my own notes\n")
    assert run(server.url)[0] == 4
    assert (folder / "out.jsonl").read_text() == "my own notes\n"


def test_a_busy_server_and_an_engine_that_comes_back_cost_nothing(folder: Path) -> None:
    pipeline = DialoguePipeline()
    with Running(pipeline, slots=2, waiting_room=1) as server:
        write(folder, *(line(f"n{number}", ["user", "text", f"Number {number}. [[held]]"]) for number in range(12)))
        process = start(folder, server.url, "--mode", "text_audio", "--connections", "6")

        def answered(status: int) -> bool:
            return server.metrics().get(f"speech_http_requests_total{{route=/v1/chat/completions,status={status}}}", 0) > 0

        server.until(lambda: server.busy()[:3] == (2, 1, 2) and answered(429))
        pipeline.die()
        server.until(lambda: answered(503))
        pipeline.let_go()
        pipeline.state = "ready"
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, json.loads(out)["ok"]) == (0, 12), err
    assert max(one["attempts"] for one in records(folder).values()) > 1
    pipeline.close()


def test_a_server_that_is_away_or_refuses(server: Running, folder: Path, run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, line("a", ["user", "text", "Fine."]))
    code, _, err = run("http://127.0.0.1:9")
    assert (code, json.loads(err)["error"]["code"]) == (5, "server.unreachable")
    for words in (["--model", "gpt-9"], ["--server", "nonsense"]):
        code, _, err = run(server.url, *words)
        assert (code, json.loads(err)["error"]["code"]) == (4, "config.invalid"), err
    assert not (folder / "out.jsonl").exists()
    assert run(server.url, "--mode", "text_only", "--cfg", "3")[0] == 2
    pipeline = DialoguePipeline()
    with Running(pipeline, keys=("hunter2",)) as locked:
        assert run(locked.url)[0] == 4
        monkeypatch.setenv("SPEECH_SERVE__API_KEY", "hunter2")
        code, view, err = run(locked.url)
        assert (code, view["ok"]) == (0, 1)
        assert "hunter2" not in err + (folder / "out.jsonl").read_text()
    pipeline.close()
