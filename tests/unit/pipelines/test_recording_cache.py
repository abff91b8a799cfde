"""What models made of recordings: kept in memory by content, made once, and kept in a folder for later
processes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipelines.errors import ErrorCode, InputError, SynthesisError
from pipelines.qwen3_tts.pipeline import Qwen3TTSPipeline, open_pipeline
from pipelines.qwen3_tts.speaker import PreparedVoice
from pipelines.recording import Recording, RecordingCache, RecordingFiles
from tests.support.golden_checkpoint import whole
from tests.support.qwen3_golden import GOLDEN

REFERENCE = GOLDEN / "refs" / "ref_a_24k_mono.wav"
Arrays = dict[str, NDArray[np.generic]]


def test_recordings_are_kept_by_content_and_variant() -> None:
    cache: RecordingCache[object] = RecordingCache(2, lambda _: 1)
    first = cache.get(Recording(b"a"), 1, object)
    assert cache.get(Recording(b"a"), 2, object) is not first
    assert cache.get(Recording(b"a"), 1, object) is first
    cache.get(Recording(b"b"), 1, object)
    assert cache.get(Recording(b"a"), 1, object) is first, "what was asked for last is kept"
    cache.capacity_bytes = 0

    def no_room() -> object:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(SynthesisError) as caught:
        cache.get(Recording(b"c"), 1, no_room)
    assert caught.value.code is ErrorCode.SYNTH_OOM


def test_a_recording_that_is_asked_for_by_many_is_worked_on_once() -> None:
    cache: RecordingCache[object] = RecordingCache(8, lambda _: 1)
    begun, go = threading.Event(), threading.Event()
    made: list[object] = []

    def make() -> object:
        begun.set()
        assert go.wait(60)
        made.append(object())
        return made[-1]

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(cache.get, Recording(b"a"), 1, make) for _ in range(8)]
        assert begun.wait(60)
        go.set()
        assert {future.result(60) for future in futures} == set(made)
    assert len(made) == 1


def test_a_recording_that_is_worked_on_holds_no_other_back() -> None:
    cache: RecordingCache[str] = RecordingCache(8, lambda _: 1)
    begun, go = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert go.wait(60)
        return "slow"

    assert cache.get(Recording(b"kept"), 1, lambda: "kept") == "kept"
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(cache.get, Recording(b"slow"), 1, slow)
        assert begun.wait(60)
        assert cache.get(Recording(b"other"), 1, lambda: "other") == "other"
        assert cache.get(Recording(b"kept"), 1, lambda: "made again") == "kept"
        go.set()
        assert future.result(60) == "slow"


def test_kept_results_fit_into_the_bytes() -> None:
    cache: RecordingCache[bytes] = RecordingCache(10, len)
    asked: list[int] = []

    def get(number: int, size: int) -> None:
        cache.get(Recording(b"%d" % number), None, lambda: asked.append(number) or bytes(size))

    for number, size in ((1, 4), (2, 4), (1, 4), (3, 5), (1, 4), (2, 4), (4, 11), (4, 11), (5, 10), (5, 10)):
        get(number, size)
    # 2 made room for 3, and 3 for 2; 4 is too large to be kept.
    assert asked == [1, 2, 3, 2, 4, 4, 5]


def test_an_error_is_told_to_all_who_wait_and_not_kept() -> None:
    cache: RecordingCache[str] = RecordingCache(8, lambda _: 1)
    begun, go = threading.Event(), threading.Event()

    def fail() -> str:
        begun.set()
        assert go.wait(60)
        raise InputError(ErrorCode.INPUT_REFERENCE_SILENT, "silent")

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(cache.get, Recording(b"a"), 1, fail)]
        assert begun.wait(60)
        futures.append(pool.submit(cache.get, Recording(b"a"), 1, fail))
        go.set()
        assert all(isinstance(future.exception(60), InputError) for future in futures)
    assert cache.get(Recording(b"a"), 1, lambda: "made") == "made"


class Folder:
    """A folder of kept arrays, and how often they were made."""

    def __init__(self, folder: Path, maximum_bytes: int = 1 << 20, identity: str = "model") -> None:
        self.folder = folder
        self.files = RecordingFiles(folder, maximum_bytes, identity)
        self.made = 0

    def get(self, recording: bytes = b"recording", variant: str = "whole", size: int = 3) -> Arrays:
        return self.files.get(Recording(recording), variant, lambda: self._make(size))

    def _make(self, size: int) -> Arrays:
        self.made += 1
        return {"codes": np.arange(size), "vector": np.ones(4, np.float32)}

    def paths(self) -> list[Path]:
        return sorted(self.folder.iterdir())


def test_arrays_outlive_their_process(tmp_path: Path) -> None:
    first, second = Folder(tmp_path / "voices"), Folder(tmp_path / "voices")
    made, found = first.get(), second.get()
    assert (first.made, second.made) == (1, 0)
    assert made.keys() == found.keys()
    assert all(
        made[name].dtype == found[name].dtype and np.array_equal(made[name], found[name]) for name in made
    )


def test_another_recording_variant_or_model_is_another_file(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.get()
    folder.get(b"other")
    folder.get(variant="vector")
    other = Folder(tmp_path, identity="other model")
    other.get()
    assert (folder.made, other.made, len(folder.paths())) == (3, 1, 4)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "readable by others", "a link"])
def test_what_is_damaged_or_may_be_foreign_is_made_again(tmp_path: Path, damage: str) -> None:
    voices = tmp_path / "voices"
    Folder(voices).get()
    (path,) = Folder(voices).paths()
    data = path.read_bytes()
    if damage == "readable by others":
        path.chmod(0o644)
    elif damage == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes(
            {"cut": data[:-3], "flipped": data[:-1] + bytes([data[-1] ^ 1]), "empty": b""}[damage]
        )
    again, after = Folder(voices), Folder(voices)
    again.get()
    after.get()
    assert (again.made, after.made) == (1, 0)
    assert path.read_bytes() == data
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o077 == 0


def test_the_owner_alone_reads_the_folder(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "deep" / "voices")
    folder.get()
    assert (tmp_path / "deep" / "voices").stat().st_mode & 0o077 == 0
    assert [path.stat().st_mode & 0o777 for path in folder.paths()] == [0o600]


def test_what_was_used_last_stays_within_the_bound(tmp_path: Path) -> None:
    for number in range(6):
        Folder(tmp_path).get(b"%d" % number, size=500)
        for path in Folder(tmp_path).paths():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100))
    used = Folder(tmp_path)
    used.get(b"0", size=500)
    assert used.made == 0
    # Room for three of them; the new one looks.
    Folder(tmp_path, maximum_bytes=14_000).get(b"new", size=500)
    kept = Folder(tmp_path)
    for recording in (b"0", b"new", b"5"):
        kept.get(recording, size=500)
    assert (len(kept.paths()), kept.made) == (3, 0)


def test_a_folder_is_looked_through_once_for_many_voices(tmp_path: Path) -> None:
    folder, looked = Folder(tmp_path), list[int]()

    class Watched(RecordingFiles):
        def shrink(self) -> None:
            looked.append(folder.made)

    folder.files = Watched(tmp_path, 1 << 20, "model")
    for number in range(40):
        folder.get(b"%d" % number, size=200)
    # 16 kB are written between two looks, in files of more than 1.6 kB.
    assert looked == [1, 11, 21, 31]


def test_a_folder_that_cannot_be_used_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    folder = Folder(tmp_path / "file" / "voices")
    with caplog.at_level(logging.WARNING):
        folder.get()
        folder.get(b"other")
    assert folder.made == 2
    assert caplog.text.count("SPEECH_ENGINE__VOICE_CACHE") == 1


def test_arrays_are_kept_whatever_their_order_in_memory(tmp_path: Path) -> None:
    made: Arrays = {"codes": np.arange(6).reshape(2, 3).T}
    for _ in range(2):
        found = RecordingFiles(tmp_path, 1 << 20, "model").get(Recording(b"recording"), "whole", lambda: made)
        assert np.array_equal(found["codes"], made["codes"])


def test_an_error_is_not_kept_on_disk(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "voices")

    def fail() -> Arrays:
        raise InputError(ErrorCode.INPUT_REFERENCE_SILENT, "silent")

    with pytest.raises(InputError):
        folder.files.get(Recording(b"recording"), "whole", fail)
    folder.get()
    assert folder.made == 1


def cloning(folder: Path | None, **options: object) -> Qwen3TTSPipeline:
    sizes = {"slots": 1, "pages": 32, "page_size": 16, "max_context": 256}
    return open_pipeline(
        whole(GOLDEN / "checkpoint-base"), voice_cache=folder and str(folder), **sizes, **options
    )


def prepared(pipeline: Qwen3TTSPipeline, in_context: bool) -> PreparedVoice:
    voices = pipeline.voices
    assert voices is not None
    return voices.prepare(Recording(REFERENCE.read_bytes()), in_context)


def alike(one: PreparedVoice, other: PreparedVoice, pipeline: Qwen3TTSPipeline) -> bool:
    """Whether two voices are equal, and their codecs go on with equal audio."""
    assert one.codes is not None
    assert other.codes is not None
    assert one.codec_state is not None
    assert other.codec_state is not None
    decoder = pipeline.codec.decoder
    codes = torch.from_numpy(one.codes[:5])
    first, second = (
        decoder.decode_chunk([voice.codec_state.copy()], [codes])[0]
        for voice in (one, other)
        if voice.codec_state
    )
    return (
        np.array_equal(one.vector, other.vector)
        and np.array_equal(one.codes, other.codes)
        and torch.equal(first, second)
    )


def test_a_second_start_encodes_no_voice_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cloning(tmp_path / "voices")
    made = prepared(first, True)
    with monkeypatch.context() as patch:
        patch.setattr(type(first.codec.encoder), "encode", lambda *_: pytest.fail("it was encoded again"))
        second = cloning(tmp_path / "voices")
        kept = prepared(second, True)
    assert alike(made, kept, second)
    assert alike(prepared(cloning(None), True), kept, second)
    for pipeline in (first, second):
        pipeline.close()


def test_another_checkpoint_is_another_voice(tmp_path: Path) -> None:
    """One value of an encoder's weights differs."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "checkpoint"
    subprocess.run(["cp", "-rL", str(whole(GOLDEN / "checkpoint-base")), str(folder)], check=True)
    first = open_pipeline(
        folder, slots=1, pages=32, page_size=16, max_context=256, voice_cache=str(tmp_path / "voices")
    )
    prepared(first, False)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name == "speaker_encoder.fc.bias":
                tensors[name] = tensors[name] + 1
        path.unlink()
        save_file(tensors, path, {"format": "pt"})
    second = open_pipeline(
        folder, slots=1, pages=32, page_size=16, max_context=256, voice_cache=str(tmp_path / "voices")
    )
    assert not np.array_equal(prepared(first, False).vector, prepared(second, False).vector)
    assert len(list((tmp_path / "voices").iterdir())) == 2


PROCESS = """
import sys
from tests.unit.pipelines.test_recording_cache import cloning, prepared
from pathlib import Path
pipeline = cloning(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
voice = prepared(pipeline, True)
print(voice.codes.tobytes().hex(), voice.vector.tobytes().hex())
"""


def test_two_processes_at_once_have_the_same_voice(tmp_path: Path) -> None:
    voices = tmp_path / "voices"
    child = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(voices)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    pipeline = cloning(voices)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.stdin.write("go\n")
    child.stdin.flush()
    voice = prepared(pipeline, True)
    said = child.communicate(timeout=300)[0]
    assert child.returncode == 0
    assert voice.codes is not None
    assert said.split() == [voice.codes.tobytes().hex(), voice.vector.tobytes().hex()]
    assert [path.suffix for path in voices.iterdir()] == [".voice"]
