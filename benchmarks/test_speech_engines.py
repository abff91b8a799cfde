"""Models that both engines can run, measured on a CPU from small checkpoints: what is measured of each,
not how fast it is."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import engine_agreement, family_lines, fish_speech
from benchmarks.speech_load import first_chunks, recording, spoken_request
from pipelines.errors import ErrorCode, SynthesisError
from pipelines.request import (
    AudioChunk,
    Done,
    Failed,
    Handle,
    Listener,
    OnEvent,
    PreparedRequest,
    Speech,
    SynthesisRequest,
)


def found_in(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_fish_on_the_native_engine_beside_its_plain_loop(tmp_path: Path) -> None:
    path = tmp_path / "fish.json"
    asked = ["--device", "cpu", "--tiny", "--engines", "native", "--part", "frame,step,lm,speech,loop"]
    assert fish_speech.main([*asked, "--requests", "1,2", "--seconds", "0.2", "--json", str(path)]) == 0
    found = found_in(path)
    assert found["faults"] == {}
    speech = [row for row in found["rows"] if row["part"] == "speech, end to end"]
    assert [(row["engine"], row["slots"]) for row in speech] == [("native", 1), ("native", 2)]
    assert speech[1]["audio_s_per_s"] > 0
    assert {"frame alone", "frame, graph", "LM alone", "plain loop, end to end"} <= {
        row["part"] for row in found["rows"]
    }


def test_a_recording_is_a_wav_file_of_its_length() -> None:
    with wave.open(io.BytesIO(recording(0.5, 16_000, 3))) as file:
        assert (file.getframerate(), file.getnframes(), file.getnchannels()) == (16_000, 8000, 1)
    assert recording(0.5, 16_000, 3) != recording(0.5, 16_000, 4)


class Scripted:
    """Streams of which some have no audio, and some fail."""

    def __init__(self) -> None:
        self.at_once = self.most = 0
        self.kept: list[OnEvent] = []
        self.started: list[int] = []

    def start(
        self, request: SynthesisRequest | PreparedRequest, on_event: OnEvent, stream: bool = False
    ) -> Handle:
        assert isinstance(request, SynthesisRequest)
        self.at_once += 1
        self.started.append(request.seed)
        self.most = max(self.most, self.at_once)
        self.kept.append(on_event)
        if len(self.kept) == 2:
            self.kept, waiting = [], self.kept
            self.at_once -= 2
            for one in waiting:
                self.speak(request, one)
        return Listener(on_event, lambda _done: None)

    def speak(self, request: SynthesisRequest, heard: OnEvent) -> None:
        if request.seed == 3:
            heard(Failed(SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The model wrote no speech tokens.")))
            return
        if request.seed == 7:
            heard(Failed(SynthesisError(ErrorCode.SYNTH_ENGINE, "The engine failed.")))
            return
        heard(AudioChunk(np.zeros(8, np.float32), 16_000))
        heard(Done(Speech(np.zeros(0, np.float32), 16_000)))


def request(index: int) -> SynthesisRequest:
    return spoken_request("stream", index, 1.0, 16_000)


def test_first_chunks_are_waited_for_with_so_many_streams_at_once() -> None:
    streams = Scripted()
    waits = first_chunks(streams, 2, 6, request)
    assert (streams.most, streams.started) == (2, list(range(6)))
    assert len(waits) == 4, "two streams were answered for number 3, without audio"
    with pytest.raises(SynthesisError, match="engine failed"):
        first_chunks(Scripted(), 2, 8, request)


def test_the_executor_of_a_cpu_agrees_with_plain_frames(tmp_path: Path) -> None:
    path = tmp_path / "agreement.json"
    assert (
        engine_agreement.main(
            ["--device", "cpu", "--tiny", "--models", "spark,fish", "--rows", "2", "--json", str(path)]
        )
        == 0
    )
    rows = found_in(path)["rows"]
    assert [row["model"] for row in rows] == ["spark", "fish"]
    for row in rows:
        assert row["verdict"].startswith("ok")
        assert row["error"] == pytest.approx(row["plain_error"]), "the eager executor is the plain frame"


def test_keys_that_are_too_far_from_plain_ones_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = engine_agreement.frame_of
    calls: list[int] = []

    def wrong(*given: Any) -> engine_agreement.Made:
        calls.append(1)
        made = right(*given)
        # In float32 and in bfloat16 op by op, then by the executor.
        return engine_agreement.Made(made.kept + 1, made.codes) if len(calls) == 3 else made

    monkeypatch.setattr(engine_agreement, "frame_of", wrong)
    asked = [
        "--device",
        "cpu",
        "--tiny",
        "--models",
        "spark",
        "--rows",
        "1",
        "--json",
        str(tmp_path / "agreement.json"),
    ]
    assert engine_agreement.main(asked) == 1


SOURCE = '''"""A module."""

import os  # why


def two(
    a: int,
) -> int:
    """Twice."""
    # Why.
    return (
        2 * a
    )
'''


def test_lines_of_code_leave_out_what_only_explains() -> None:
    assert family_lines.code_lines(SOURCE) == 1 + 3 + 3


def test_the_files_of_a_family_exist() -> None:
    for files in family_lines.FILES.values():
        for file in files:
            assert (family_lines.ROOT / file).is_file(), file
