"""Stored voices: kept over a restart, used by name on every route, bounded, and their names are no paths."""

from __future__ import annotations

import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import InputError
from pipelines.request import Message
from pipelines.stored_voices import StoredVoice, VoiceFolder
from tests.support.fakes import spoken_text
from tests.support.serving_kit import Running, b64, error_of, wav
from tests.support.stream_voice import StreamVoice
from tests.support.websocket_kit import talk

VOICES = "/v1/audio/voices"
RECORDING = wav(1.0)


def cloning(folder: Path, **options: Any) -> tuple[StreamVoice, Running]:
    voice = StreamVoice(cloning=True)
    return voice, Running(voice, voices_folder=folder / "voices", **options)


def post(server: Running, name: str = "anna", **fields: Any) -> Any:
    return server.http.post(
        VOICES, json={"name": name, "recording": b64(RECORDING), "text": "A sine.", **fields}
    )


def test_a_stored_voice_outlives_the_server_and_speaks_on_every_route(tmp_path: Path) -> None:
    _, first = cloning(tmp_path)
    with first as server:
        assert post(server).json()["id"] == "anna"
    file = tmp_path / "voices" / "anna.voice"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    voice, second = cloning(tmp_path)
    with second as server:
        listed = server.http.get(VOICES).json()
        assert listed["voices"] == ["ada", "bob", "anna"]
        assert listed["data"][-1] == {"id": "anna", "object": "voice", "kind": "stored"}
        assert server.speak("Hello.", voice="anna").status_code == 200
        by_bytes = {"transcript": "Hello.", "voice": {"mode": "id", "id": "anna"}}
        assert server.http.post("/tts/bytes", json=by_bytes).status_code == 200
        with talk(server.url) as client:
            client.say("a", "Hello.", voice={"mode": "id", "id": "anna"})
            client.hear("a")
        for request in voice.requests:
            assert request.messages[0] == Message("user", "audio", RECORDING)
            assert (request.generation.voice, request.generation.reference_text, spoken_text(request)) == (
                None,
                "A sine.",
                "Hello.",
            )
        assert len(voice.requests) == 3
        both = server.speak("Hello.", voice="anna", reference_audio=b64(RECORDING))
        assert error_of(both)["code"] == "input.unsupported"
        assert server.http.delete(f"{VOICES}/anna").json() == {
            "id": "anna",
            "object": "voice",
            "deleted": True,
        }
        assert error_of(server.speak("Hello.", voice="anna"))["code"] == "input.unknown_voice"
        assert server.http.delete(f"{VOICES}/anna").status_code == 404
    assert list(file.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"name": "../anna"}, 400, "input.bad_generation"),
        ({"name": "/etc/passwd"}, 400, "input.bad_generation"),
        ({"name": "Anna"}, 400, "input.bad_generation"),
        ({"name": "anna.voice"}, 400, "input.bad_generation"),
        ({"name": "anna\n"}, 400, "input.bad_generation"),
        ({"name": "anna\x00"}, 400, "input.bad_generation"),
        ({"name": ""}, 400, "input.bad_generation"),
        ({"name": "a" * 65}, 400, "input.bad_generation"),
        ({"name": 5}, 400, "invalid_value"),
        ({"name": "ada"}, 409, "voice_exists"),
        ({"name": "nova"}, 409, "voice_exists"),
        ({"name": "default"}, 409, "voice_exists"),
        ({"recording": "%%%"}, 400, "input.audio_unreadable"),
        ({"recording": b64(b"no audio")}, 400, "input.audio_unreadable"),
        ({"recording": b64(wav(0.1))}, 400, "input.reference_length"),
        ({"recording": b64(wav(70.0))}, 400, "input.too_long"),
        ({"recording": b64(wav(1.0).replace(b"\x01", b"\x00")[:44] + bytes(32_000))}, 400, None),
        ({"recording": "http://127.0.0.1/a.wav"}, 400, "input.audio_forbidden"),
        ({"recording": "/etc/passwd"}, 400, "input.audio_unreadable"),
        ({"text": "x" * 5001}, 400, "invalid_value"),
        ({"colour": "red"}, 400, "unknown_field"),
    ],
)
def test_what_is_no_voice_is_refused(
    tmp_path: Path, fields: dict[str, Any], status: int, code: str | None
) -> None:
    _, running = cloning(tmp_path)
    with running as server:
        answer = post(server, **fields)
        assert answer.status_code == status
        assert code is None or error_of(answer)["code"] == code
        assert server.http.get(VOICES).json()["voices"] == ["ada", "bob"]
    assert not list(tmp_path.rglob("*.voice"))


def test_paths_are_no_names_where_a_voice_is_asked_for_or_deleted(tmp_path: Path) -> None:
    outside = VoiceFolder(tmp_path, 10, 1 << 20)
    outside.add("secret", RECORDING, "")
    _, running = cloning(tmp_path)
    with running as server:
        post(server)
        for name in ("../secret", "..%2Fsecret", "%2e%2e%2fsecret", "secret.voice", "../secret.voice"):
            assert error_of(server.speak("Hello.", voice=name))["code"] == "input.unknown_voice"
            assert server.http.delete(f"{VOICES}/{name}").status_code in (404, 405)
    assert outside.names() == ["secret"]


def test_voices_are_bounded_in_count_and_bytes_and_replaced_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = partial(VoiceFolder, max_voices=2, max_bytes=len(RECORDING))
    monkeypatch.setattr("pipelines.serving.voices.VoiceFolder", small)
    _, running = cloning(tmp_path)
    with running as server:
        assert [post(server, name).status_code for name in ("a", "b", "c")] == [200, 200, 400]
        assert post(server, "a").status_code == 409
        assert post(server, "a", replace=True, text="Another.").status_code == 200
        assert (
            error_of(post(server, "a", replace=True, recording=b64(wav(1.1))))["code"]
            == "input.reference_length"
        )
    folder = VoiceFolder(tmp_path / "voices", 2, 1)
    assert folder.names() == ["a", "b"]
    found = folder.get("a")
    assert found is not None
    assert (found.text, found.recording) == ("Another.", RECORDING)
    (tmp_path / "voices" / "b.voice").write_bytes(b"half")
    with pytest.raises(InputError, match="its file is damaged"):
        folder.get("b")


def test_of_voices_of_one_name_that_come_side_by_side_one_is_kept(tmp_path: Path) -> None:
    _, running = cloning(tmp_path)
    with running as server, ThreadPoolExecutor(8) as threads:
        for name in ("a", "b", "c", "d"):
            said = list(threads.map(lambda text: post(server, name, text=text).status_code, "12345678"))  # noqa: B023  # waited for
            assert sorted(said) == [200] + [409] * 7
            found = VoiceFolder(tmp_path / "voices", 9, 1).get(name)
            assert found is not None
            assert found.text == "12345678"[said.index(200)]


def test_a_folder_that_cannot_be_changed_is_no_missing_voice(tmp_path: Path) -> None:
    (tmp_path / "voices" / "stuck.voice").mkdir(parents=True)
    _, running = cloning(tmp_path)
    with running as server:
        for answer in (server.http.delete(f"{VOICES}/stuck"), post(server, "stuck", replace=True)):
            assert (answer.status_code, error_of(answer)["code"]) == (500, "config.invalid")
            assert "folder of voices cannot be written" in error_of(answer)["message"]


def test_a_recording_is_read_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    read = VoiceFolder.get

    def noted(folder: VoiceFolder, name: str) -> StoredVoice | None:
        threads.append(threading.current_thread().name)
        return read(folder, name)

    monkeypatch.setattr(VoiceFolder, "get", noted)
    _, running = cloning(tmp_path)
    with running as server:
        post(server)
        assert server.speak("Hello.", voice="anna").status_code == 200
        with talk(server.url) as client:
            client.say("a", "Hello.", voice={"mode": "id", "id": "anna"})
            client.hear("a")
    assert [name.partition("_")[0] for name in threads] == ["asyncio", "asyncio"]


@pytest.mark.parametrize("voices", [(), ("Anna", "bob")])
def test_an_unknown_name_is_answered_with_those_that_there_are(
    tmp_path: Path, voices: tuple[str, ...]
) -> None:
    voice = StreamVoice(cloning=True, voices=voices, needs_reference=not voices)
    with Running(voice, voices_folder=tmp_path) as server:
        unknown = error_of(server.speak("Hello.", voice="carl"))
        assert (unknown["code"], unknown["param"], "No voice is stored" in unknown["message"]) == (
            "input.unknown_voice",
            "voice",
            not voices,
        )
        assert post(server, "carla").status_code == 200
        for answer in (
            server.speak("Hello.", voice="carl"),
            server.http.post("/tts/bytes", json={"transcript": "Hi.", "voice": {"id": "carl"}}),
        ):
            assert error_of(answer)["code"] == "input.unknown_voice"
            assert f"Choose one of: {', '.join([*voices, 'carla'])}." in error_of(answer)["message"]


def test_a_voice_of_the_model_goes_before_a_stored_one_however_it_is_written(tmp_path: Path) -> None:
    VoiceFolder(tmp_path, 8, 1 << 20).add("anna", RECORDING, "")
    voice = StreamVoice(cloning=True, voices=("Anna",))
    with Running(voice, voices_folder=tmp_path) as server:
        assert server.speak("Hello.", voice="anna").status_code == 200
    assert [message.modality for message in voice.requests[0].messages] == ["text"]


def test_a_model_that_cannot_clone_keeps_no_voices(tmp_path: Path) -> None:
    with Running(StreamVoice(), voices_folder=tmp_path) as server:
        assert error_of(post(server))["code"] == "input.unsupported"
    with Running(StreamVoice(cloning=True)) as server:
        assert error_of(post(server))["code"] == "input.unsupported"


def test_voices_need_the_key(tmp_path: Path) -> None:
    _, running = cloning(tmp_path, keys=("secret",))
    with running as server:
        assert [
            server.http.get(VOICES).status_code,
            post(server).status_code,
            server.http.delete(f"{VOICES}/a").status_code,
        ] == [401] * 3
