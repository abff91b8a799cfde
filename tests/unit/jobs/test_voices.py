"""What the names of voices stand for in a job, `nightjar voices`, and stored voices of an open model in
Python."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import nightjar
from jobs.cli import main
from jobs.ledger.records import JobSpec, Reading
from jobs.spec import resolve, spec_sha
from jobs.voices import JobVoices, voice_folder
from pipelines.errors import ErrorCode, InputError
from pipelines.registry import ModelCard, register_pipeline
from pipelines.request import Capabilities, Generation, Message, Speech, SynthesisRequest
from pipelines.stored_voices import VoiceFolder
from tests.support.fake_worker import fake_card
from tests.support.fakes import FakePipeline
from tests.support.serving_kit import wav

ANNA = wav(1.0)
CLONES = replace(fake_card("clones"), capabilities=Capabilities(voices=("Heart",), cloning=True))


class Cloner(FakePipeline):
    """A fake that clones and keeps its last request."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = CLONES.capabilities
        self.last: SynthesisRequest | None = None

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        self.last = request
        return super().submit(request)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VoiceFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPEECH_SERVE__VOICES_FOLDER", str(tmp_path / "kept"))
    folder = VoiceFolder(tmp_path / "kept", 20, 1 << 20)
    folder.add("anna", ANNA, "Anna speaks.")
    folder.add("heart", ANNA, "")
    return folder


@pytest.fixture
def cloner() -> Iterator[Cloner]:
    pipeline = Cloner()
    forget = register_pipeline("clones", CLONES, lambda **_: pipeline)
    yield pipeline
    forget()


def refused(voices: JobVoices, name: str) -> InputError:
    with pytest.raises(InputError) as caught:
        voices.check(name)
    return caught.value


@pytest.mark.parametrize(
    ("card", "frozen"),
    [
        (CLONES, ["anna"]),
        (replace(CLONES, capabilities=Capabilities(cloning=True)), ["anna", "heart"]),
        (replace(CLONES, capabilities=Capabilities(voices=("Heart",))), []),
        (replace(CLONES, capabilities=Capabilities(cloning=True, multi_turn=True)), []),
    ],
)
def test_a_name_is_the_models_where_it_has_it(
    folder: VoiceFolder, card: ModelCard, frozen: list[str]
) -> None:
    assert (
        list(JobVoices(card, folder).with_names(["anna", "heart", "HEART", "nobody", None]).frozen) == frozen
    )
    assert JobVoices(card).with_names(["anna"]).frozen == {}


def test_a_refusal_names_the_nearest_voices(folder: VoiceFolder) -> None:
    assert str(refused(JobVoices(CLONES, folder), "ana")).endswith(
        "has no voice 'ana'. It has: Heart. Did you mean 'anna'? `nightjar voices list` shows the stored voices."
    )
    plain = JobVoices(replace(CLONES, capabilities=Capabilities()), folder)
    assert refused(plain, "anna").code is ErrorCode.INPUT_UNSUPPORTED
    assert refused(plain, "ana").message.endswith("has no voice 'ana'.")


def test_a_recording_that_the_model_cannot_use_is_one_sentence(folder: VoiceFolder) -> None:
    def check(_: bytes) -> None:
        raise InputError(ErrorCode.INPUT_REFERENCE_LENGTH, "It is too short.", "Give a longer one.")

    voices = JobVoices(replace(CLONES, check_reference=check), folder).with_names(["anna"])
    error = refused(voices, "anna")
    assert (error.code, str(error)) == (
        ErrorCode.INPUT_REFERENCE_LENGTH,
        "The stored voice 'anna' cannot be used: It is too short. Give a longer one.",
    )
    assert refused(voices, "anna") is error


def test_paths_are_no_names(folder: VoiceFolder, tmp_path: Path) -> None:
    (tmp_path / "secret.voice").write_bytes((folder.path / "anna.voice").read_bytes())
    names = [
        "../secret",
        "../kept/anna",
        "anna.voice",
        "./anna",
        "anna\0",
        str(tmp_path / "secret"),
        "",
        "Anna",
        "anna/",
    ]
    assert JobVoices(CLONES, folder).with_names(names).frozen == {}
    for name in names:
        assert (folder.has(name), folder.get(name), folder.delete(name)) == (False, None, False)
        with pytest.raises(InputError):
            folder.add(name, ANNA, "")
    assert sorted(path.name for path in tmp_path.rglob("*.voice")) == [
        "anna.voice",
        "heart.voice",
        "secret.voice",
    ]


def test_a_spec_without_stored_voices_is_what_it_was(folder: VoiceFolder, cloner: Cloner) -> None:
    bare = resolve(JobSpec("clones", generation=Generation(voice="Heart")), stored=folder).spec
    assert b"stored_voices" not in nightjar_json(bare)
    assert spec_sha(bare) == spec_sha(resolve(JobSpec("clones", generation=Generation(voice="Heart"))).spec)
    table = resolve(JobSpec("clones", reading=Reading(voices={"*": "anna"})), "csv", folder).spec
    roles = resolve(
        JobSpec("clones", generation=Generation(roles={"user": Generation(voice="anna")})), stored=folder
    ).spec
    assert table.stored_voices == roles.stored_voices != bare.stored_voices


def nightjar_json(spec: JobSpec) -> bytes:
    import msgspec

    return msgspec.json.encode(spec)


def test_the_command_adds_lists_and_deletes(
    folder: VoiceFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ben.wav").write_bytes(wav(1.1))
    (tmp_path / "short.wav").write_bytes(wav(0.1))
    (tmp_path / "text.wav").write_text("no audio")
    assert main(["voices", "add", "ben", "ben.wav", "--text", " Ben speaks. "]) == 0
    found = folder.get("ben")
    assert found is not None
    assert (found.text, found.recording) == ("Ben speaks.", wav(1.1))
    capsys.readouterr()
    refusals = [
        (["ben", "ben.wav"], "input.bad_generation"),
        (["nova", "ben.wav"], "input.bad_generation"),
        (["../ben", "ben.wav"], "input.bad_generation"),
        (["other", "short.wav"], "input.reference_length"),
        (["other", "text.wav"], "input.audio_unreadable"),
        (["other", "none.wav"], "input.audio_missing"),
        (["other", "ben.wav", "--text", "x" * 5001], "input.too_long"),
    ]
    for words, code in refusals:
        assert main(["voices", "add", *words, "--json"]) == 4
        assert json.loads(capsys.readouterr().err)["error"]["code"] == code
    assert main(["voices", "add", "ben", "ben.wav", "--replace"]) == 0
    (folder.path / "broken.voice").write_bytes(b"half")
    capsys.readouterr()
    assert main(["voices", "list", "--json"]) == 0
    said = capsys.readouterr()
    assert [json.loads(row)["voice"] for row in said.out.splitlines()] == ["anna", "ben", "heart"]
    assert "'broken' cannot be read" in said.err
    assert main(["voices", "list"]) == 0
    assert "Anna speaks." in capsys.readouterr().out
    for name in ("ben", "broken", "heart", "anna"):
        assert main(["voices", "delete", name]) == 0
    assert main(["voices", "delete", "../anna", "--json"]) == 3
    assert folder.names() == []


def test_the_folder_is_that_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jobs.settings import load_settings

    monkeypatch.delenv("SPEECH_SERVE__VOICES_FOLDER", raising=False)
    assert voice_folder(load_settings(home=str(tmp_path))).path == tmp_path / "voices"
    monkeypatch.setenv("SPEECH_SERVE__VOICES_FOLDER", "/elsewhere")
    assert voice_folder(load_settings(home=str(tmp_path))).path == Path("/elsewhere")


@pytest.mark.parametrize("command", ["run", "submit"])
def test_the_command_line_and_python_find_the_folder(
    folder: VoiceFolder, cloner: Cloner, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "in.csv").write_text("text,voice,speaker\nHello.,anna,x\nHello.,,x\n")
    words = [command, "in.csv", "--model", "clones", "--dry-run"]
    assert main([*words, "--voice-for", "*=anna", "--voice", "anna", "--voice-of", "assistant=anna"]) == 0
    assert re.search(r"(?m)^items +2$", capsys.readouterr().out)
    for options in (["--voice", "ana"], ["--voice-of", "user=ana"], ["--voice-for", "*=ana"]):
        assert main([*words, *options]) == 4
        assert "Did you mean 'anna'?" in capsys.readouterr().err
    with pytest.raises(InputError, match="Did you mean 'anna'"):
        getattr(nightjar, command)(["Hello."], out=tmp_path / "out", model="clones", voice="ana", quiet=True)


def test_an_open_model_speaks_in_a_stored_voice(folder: VoiceFolder, cloner: Cloner) -> None:
    with nightjar.open_model("clones") as voice:
        assert len(voice.speak("Hello.", voice="anna").samples)
        assert cloner.last is not None
        assert cloner.last.messages == (Message("user", "audio", ANNA), Message("user", "text", "Hello."))
        assert cloner.last.generation == Generation(reference_text="Anna speaks.")
        voice.speak("Hello.", voice="heart")
        assert cloner.last.generation == Generation(voice="heart")
        for asked in ({"voice": "nobody"}, {"voice": "../anna"}, {"voice": "anna", "reference": ANNA}):
            with pytest.raises(InputError):
                voice.speak("Hello.", **asked)


DIES_IN_ITS_WRITE = """
import os, signal, sys
from pathlib import Path
os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
from pipelines.stored_voices import VoiceFolder
VoiceFolder(Path(sys.argv[1]), 9, 10**7).add("anna", Path(sys.argv[2]).read_bytes(), "")
"""


def test_the_next_write_removes_the_draft_of_a_killed_process(tmp_path: Path) -> None:
    folder = VoiceFolder(tmp_path / "kept", 9, 10**7)
    (tmp_path / "anna.wav").write_bytes(ANNA)
    killed = subprocess.run(
        [sys.executable, "-c", DIES_IN_ITS_WRITE, folder.path, tmp_path / "anna.wav"], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(list(folder.path.iterdir())) == 1
    assert folder.names() == []
    folder.add("ben", ANNA, "")
    assert [path.name for path in folder.path.iterdir()] == ["ben.voice"]


@pytest.mark.parametrize("folders", [1, 8], ids=["of one server", "of several"])
def test_voices_added_side_by_side_are_bounded(tmp_path: Path, folders: int) -> None:
    kept = [VoiceFolder(tmp_path / "kept", 3, 10**7) for _ in range(folders)]
    together = threading.Barrier(8)

    def add(number: int) -> str | None:
        together.wait(240)
        try:
            kept[number % folders].add(f"voice{number}", ANNA, "")
        except InputError as error:
            return error.message
        return None

    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(add, range(8)))
    assert sorted(said, key=str) == [None] * 3 + ["There are 3 voices; that is the maximum."] * 5
    assert len(list((tmp_path / "kept").iterdir())) == 3
