"""Reference audio comes from allowed folders and from the store, never from anywhere else."""

from __future__ import annotations

import io
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile

from jobs.references import MAX_REFERENCE_BYTES, ReferenceReader, load_reference, put_reference
from jobs.store import FolderStore
from pipelines.errors import ErrorCode, InputError
from pipelines.registry import describe


def sound(format: str = "WAV", frames: int = 1600) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros(frames, np.float32), 16_000, format=format)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An input's folder with a voice, beside a folder it must not reach."""
    made = tmp_path / "data"
    (made / "voices").mkdir(parents=True)
    (made / "voices" / "a.wav").write_bytes(sound())
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "b.wav").write_bytes(sound())
    return made


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    (tmp_path / "store").mkdir()
    return FolderStore(tmp_path / "store")


@pytest.fixture
def reader(folder: Path, store: FolderStore) -> ReferenceReader:
    return ReferenceReader(folder, (), store)


@pytest.mark.parametrize(
    ("format", "ext"), [("WAV", "wav"), ("WAVEX", "wav"), ("FLAC", "flac"), ("OGG", "ogg"), ("MP3", "mp3")]
)
def test_formats_are_known_by_content(folder: Path, reader: ReferenceReader, format: str, ext: str) -> None:
    (folder / "x.bin").write_bytes(sound(format))
    assert reader.read("x.bin").ext == ext


def test_relative_and_absolute_paths_below_the_folder(folder: Path, reader: ReferenceReader) -> None:
    (folder / "link.wav").symlink_to("voices/a.wav")
    for content in ("voices/a.wav", "./voices/../voices/a.wav", str(folder / "voices" / "a.wav"), "link.wav"):
        assert reader.read(content).data == sound()


def test_an_audio_root_takes_the_place_of_the_folder(folder: Path, store: FolderStore) -> None:
    reader = ReferenceReader(folder, (folder.parent / "secret",), store)
    assert reader.read("../secret/b.wav").data == sound()
    with pytest.raises(InputError):
        reader.read("voices/a.wav")


def test_an_address_in_the_store(reader: ReferenceReader, store: FolderStore) -> None:
    store.put("voices/c.wav", sound())
    assert reader.read(f"{store.url}/voices/c.wav").data == sound()


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("../secret/b.wav", ErrorCode.INPUT_AUDIO_FORBIDDEN),
        ("/etc/passwd", ErrorCode.INPUT_AUDIO_FORBIDDEN),
        ("/proc/self/environ", ErrorCode.INPUT_AUDIO_FORBIDDEN),
        ("escape.wav", ErrorCode.INPUT_AUDIO_FORBIDDEN),
        ("http://127.0.0.1/a.wav", ErrorCode.INPUT_AUDIO_FORBIDDEN),
        ("file:///etc/passwd", ErrorCode.INPUT_AUDIO_FORBIDDEN),
        ("s3://bucket/a.wav", ErrorCode.INPUT_AUDIO_FORBIDDEN),
        ("data:audio/wav;base64,AAAA", ErrorCode.INPUT_AUDIO_FORBIDDEN),
        ("STORE/../secret/b.wav", ErrorCode.INPUT_AUDIO_MISSING),
        ("STORE/none.wav", ErrorCode.INPUT_AUDIO_MISSING),
        ("missing.wav", ErrorCode.INPUT_AUDIO_MISSING),
        ("voices/a.wav/below", ErrorCode.INPUT_AUDIO_MISSING),
        ("a\0b", ErrorCode.INPUT_AUDIO_MISSING),
        ("x" * 5000, ErrorCode.INPUT_AUDIO_UNREADABLE),
        ("", ErrorCode.INPUT_AUDIO_UNREADABLE),
        ("voices", ErrorCode.INPUT_AUDIO_UNREADABLE),
        ("pipe", ErrorCode.INPUT_AUDIO_UNREADABLE),
        ("text.wav", ErrorCode.INPUT_AUDIO_UNREADABLE),
        ("none.wav", ErrorCode.INPUT_AUDIO_UNREADABLE),
        ("huge.wav", ErrorCode.INPUT_AUDIO_UNREADABLE),
    ],
)
def test_what_is_refused(
    folder: Path, reader: ReferenceReader, store: FolderStore, content: str, code: ErrorCode
) -> None:
    (folder / "escape.wav").symlink_to("../secret/b.wav")
    os.mkfifo(folder / "pipe")
    (folder / "text.wav").write_text("no audio")
    (folder / "none.wav").write_bytes(sound(frames=0))
    with (folder / "huge.wav").open("wb") as file:
        file.write(sound())
        file.truncate(MAX_REFERENCE_BYTES + 1)
    with pytest.raises(InputError) as caught:
        reader.read(content.replace("STORE", store.url))
    assert caught.value.code is code
    assert len(str(caught.value)) < 600


def test_a_voice_of_many_lines_is_put_once(folder: Path, reader: ReferenceReader, store: FolderStore) -> None:
    (folder / "same.wav").write_bytes(sound())
    key_of = reader.keys(partial(put_reference, store, "01J"))
    keys = {key_of(content) for content in ("voices/a.wav", "voices/a.wav", "same.wav")}
    assert [info.key for info in store.list("jobs/01J/references/")] == sorted(keys)
    (folder / "voices" / "a.wav").unlink()
    assert {key_of("voices/a.wav")} == keys
    assert load_reference(store, "01J", keys.pop()) == sound()


def test_a_worker_reads_only_references_of_its_job(store: FolderStore) -> None:
    store.put("jobs/02K/references/x.wav", sound())
    store.put("jobs/01J/input/000000.jsonl.zst", b"")
    for content in ("jobs/02K/references/x.wav", "jobs/01J/input/000000.jsonl.zst", "/etc/passwd"):
        with pytest.raises(InputError) as caught:
            load_reference(store, "01J", content)
        assert caught.value.code is ErrorCode.INPUT_AUDIO_FORBIDDEN
    for content in ("jobs/01J/references/../../02K/references/x.wav", "jobs/01J/references/gone.wav"):
        with pytest.raises(InputError) as caught:
            load_reference(store, "01J", content)
        assert caught.value.code is ErrorCode.INPUT_AUDIO_MISSING


def voice(seconds: float, level: float = 0.3) -> bytes:
    buffer = io.BytesIO()
    samples = level * np.sin(np.arange(int(seconds * 16_000)) / 9)
    soundfile.write(buffer, samples.astype(np.float32), 16_000, format="FLAC")
    return buffer.getvalue()


@pytest.mark.parametrize("family", ["qwen3_tts/checkpoint-base", "spark/checkpoint", "fish/checkpoint"])
def test_a_reference_that_the_model_would_refuse_is_refused_before(
    folder: Path, store: FolderStore, golden: Path, family: str
) -> None:
    check = describe(str(golden / family)).check_reference
    whole = voice(2.0)
    files = {
        "good.flac": whole,
        "short.flac": voice(0.3),
        "long.flac": voice(61.0),
        "silent.flac": voice(2.0, level=0.0),
        "damaged.flac": whole[: len(whole) // 2] + bytes(len(whole) // 2),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    reader = ReferenceReader(folder, (), store, check)
    assert reader.read("good.flac").data == whole
    codes = {
        "short.flac": ErrorCode.INPUT_REFERENCE_LENGTH,
        "long.flac": ErrorCode.INPUT_REFERENCE_LENGTH,
        "silent.flac": ErrorCode.INPUT_REFERENCE_SILENT,
        "damaged.flac": ErrorCode.INPUT_AUDIO_UNREADABLE,
    }
    for name, code in codes.items():
        with pytest.raises(InputError, match=name) as caught:
            reader.read(name)
        assert caught.value.code is code


def test_each_audio_is_checked_once(folder: Path, store: FolderStore) -> None:
    checked: list[bytes] = []
    reader = ReferenceReader(folder, (), store, checked.append)
    key_of = reader.keys(lambda audio: audio.sha256)
    assert key_of("voices/a.wav") == key_of("voices/a.wav")
    assert checked == [sound()]


@pytest.mark.parametrize(
    ("seconds", "rate", "channels", "code"),
    [
        (600, 1_000, 1, None),
        (601, 1_000, 1, ErrorCode.INPUT_TOO_LONG),
        (0.01, 192_001, 1, ErrorCode.INPUT_AUDIO_UNREADABLE),
        (0.01, 16_000, 9, ErrorCode.INPUT_AUDIO_UNREADABLE),
    ],
)
def test_what_a_reference_claims_is_bounded(
    folder: Path, reader: ReferenceReader, seconds: float, rate: int, channels: int, code: ErrorCode | None
) -> None:
    soundfile.write(
        folder / "x.wav", np.zeros((round(seconds * rate), channels), np.float32), rate, subtype="PCM_U8"
    )
    if code is None:
        assert reader.read("x.wav").ext == "wav"
        return
    with pytest.raises(InputError, match=r"The audio 'x\.wav' cannot be used") as caught:
        reader.read("x.wav")
    assert caught.value.code is code
