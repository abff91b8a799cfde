"""What all families deliver by: speech and streams of an engine that is none, aborts, options, recordings
and keys."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines.audio import NO_SAMPLES
from pipelines.codec.stage import CodecStage, Decoder
from pipelines.errors import ConfigError, ErrorCode, InputError, ModelError, NightjarError, SynthesisError
from pipelines.nn.config_keys import BaseSamplingDefaults, Keys, Size, Sizes, Whole
from pipelines.options import TokenModelOptions, read_options
from pipelines.recording import Reading, read_recording
from pipelines.request import (
    Capabilities,
    EngineInfo,
    EngineStats,
    Generation,
    Message,
    SynthesisRequest,
    stream,
    submit,
)
from pipelines.results import FinishedCodes, RequestInfo, SpeechPipeline, Streamer, no_audio
from pipelines.tokens import (
    TokenPrompt,
    TokenRequest,
    Tokens,
    TokenSampling,
    token_sampling,
)
from pipelines.validation import check_generation, frames_within
from pipelines.vllm_engine.library import ModelSpec

RATE = 100


class Ramp(Decoder):
    """A decoder: each code is four samples of its value. Its states count frames; an empty chunk is
    answered by one sample."""

    def new_state(self) -> list[int]:
        return []

    def decode(self, codes: list[Tensor], states: list[list[int]] | None = None) -> list[Tensor]:
        return [one[:, 0].repeat_interleave(4).float() for one in codes]

    def decode_chunk(self, states: list[list[int]], codes: list[Tensor]) -> list[Tensor]:
        for state, one in zip(states, codes):
            state.append(len(one))
        return [one[:, 0].repeat_interleave(4).float() if len(one) else torch.ones(1) for one in codes]


@dataclass(frozen=True, slots=True)
class Info(RequestInfo):
    state: list[int] = field(default_factory=list)
    #: A stream's state is known once so many tokens came.
    known_after: int = 0

    def read(self, tokens: Tokens) -> FinishedCodes:
        self.check_end(tokens.finish, len(tokens.ids), "tokens")
        if not tokens.ids:
            raise no_audio("Nothing was said.")
        return FinishedCodes(np.array(tokens.ids)[:, None], tokens.finish, text_out="words")


class Chunks(Streamer):
    chunk_frames = (1, 3)
    looks_ahead = True

    def __init__(self, info: Info, *others: Any) -> None:
        super().__init__(info, *others)
        self._said, self._heard = info, 0

    def frames_of(self, ids: list[int], codes: NDArray[np.int64] | None) -> NDArray[np.int64]:
        self._heard += len(ids)
        return np.array(ids, np.int64)[:, None]

    def first_state(self) -> list[int] | None:
        return self._said.state if self._heard >= self._said.known_after else None


class Host:
    """An engine that does what a test tells it: `play` runs in its own thread for each sequence, or before
    it is let in."""

    def __init__(self) -> None:
        self.room = threading.Event()
        self.room.set()
        self.entering = threading.Event()
        self.cancelled: list[TokenRequest] = []
        self.play: Callable[[Any], None] = lambda receiver: None
        self.plays_outside = False
        self.info = EngineInfo()

    def submit(self, request: TokenRequest, receiver: Any) -> None:
        self.entering.set()
        assert self.room.wait(240)
        if self.plays_outside:
            self.play(receiver)
            return
        threading.Thread(target=self.play, args=(receiver,)).start()

    def cancel(self, request: TokenRequest) -> None:
        self.cancelled.append(request)

    def stats(self, audio_seconds: float) -> EngineStats:
        return EngineStats(audio_seconds=audio_seconds)

    def close(self) -> None:
        """Its threads end by themselves."""


class Pipeline(SpeechPipeline[TokenRequest, Info]):
    name, sample_rate = "ramp", RATE
    capabilities = Capabilities(streaming=True)
    request_info = Info("text", RATE, {"engine": "none"}, False)

    def _prepare(self, request: SynthesisRequest) -> tuple[TokenRequest, Info]:
        return TokenRequest(request.request_id, TokenPrompt([1]), TokenSampling(9)), self.request_info


REQUEST = SynthesisRequest("one", (Message("user", "text", "text"),))


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def pipeline(host: Host) -> Iterator[Pipeline]:
    pipeline = Pipeline(host, CodecStage(Ramp()), Chunks)
    yield pipeline
    pipeline.close()


def say(ids: list[int], finish: Any = "stop") -> Callable[[Any], None]:
    """Two ids at a time, as an engine hands them on, then the end."""

    def play(receiver: Any) -> None:
        for start in range(0, len(ids), 2):
            if receiver.streamed:
                receiver.tokens(ids[start : start + 2], None)
        receiver.finished(Tokens(ids, finish))

    return play


def test_tokens_become_speech_with_what_is_known_of_them(host: Host, pipeline: Pipeline) -> None:
    host.play = say([3, 5])
    speech = submit(pipeline, REQUEST).result(240)
    assert speech.samples.tolist() == [3] * 4 + [5] * 4
    assert (speech.text, speech.text_out, speech.sample_rate) == ("text", "words", RATE)
    assert speech.meta == {"engine": "none", "frames": 2, "finish": "stop"}
    assert pipeline.stats().audio_seconds == 8 / RATE


@pytest.mark.parametrize(
    ("measured", "mean", "lowest"),
    [
        ([-1.0], -1.0, -1.0),
        ([-1.0, -2.0], -1.5, -1.5),
        ([*[-1.0] * 12, -13.0], -1.9231, -2.0),
        ([-13.0, *[-1.0] * 20, *[-2.5] * 12, -1.0], -1.8824, -2.5),
    ],
)
def test_log_probabilities_are_kept_as_their_mean_and_the_lowest_window(
    measured: list[float], mean: float, lowest: float
) -> None:
    codes = np.zeros((len(measured), 1), np.int64)
    made: FinishedCodes = FinishedCodes(codes, "stop", log_probabilities=np.array(measured))
    meta = Info("text", RATE, {}, False).speech(NO_SAMPLES, made).meta
    assert (meta["log_probability"], meta["lowest_log_probability"]) == (mean, lowest)


@pytest.mark.parametrize(
    ("ids", "finish", "code"),
    [([1], "length", ErrorCode.SYNTH_NO_EOS), ([], "stop", ErrorCode.SYNTH_NO_AUDIO)],
)
def test_what_is_no_speech_fails_as_a_whole_and_as_a_stream(
    host: Host, pipeline: Pipeline, ids: list[int], finish: str, code: ErrorCode
) -> None:
    host.play = say(ids, finish)
    error = submit(pipeline, REQUEST).exception(240)
    assert isinstance(error, SynthesisError)
    assert error.code is code
    with pytest.raises(SynthesisError) as caught:
        list(stream(pipeline, REQUEST))
    assert caught.value.code is code


@pytest.mark.parametrize("known_after", [0, 5])
def test_a_stream_comes_in_chunks_from_a_state_that_may_come_late(
    host: Host, pipeline: Pipeline, known_after: int
) -> None:
    pipeline.request_info = Info("text", RATE, {}, False, [], known_after)
    host.play = say([1, 2, 3, 4, 5, 6])
    chunks = list(stream(pipeline, REQUEST))
    assert pipeline.request_info.state == [1, 3, 2, 0], "chunks of 1 and 3, the rest, and the end"
    assert np.concatenate([chunk.samples for chunk in chunks]).tolist() == [
        code for code in range(1, 7) for _ in range(4)
    ] + [1]
    assert len(chunks) == 4
    assert not host.cancelled


class NotingStage(CodecStage):
    """A stage that notes the deadlines of chunks."""

    def __init__(self) -> None:
        super().__init__(Ramp())
        self.deadlines: list[float] = []
        decode_chunk = self.decode_chunk

        def noted(codes: Any, done: Any, state: Any, last: bool, deadline: float) -> None:
            self.deadlines.append(deadline)
            decode_chunk(codes, done, state, last, deadline)

        self.decode_chunk = noted


def test_only_the_first_chunk_of_a_stream_is_due_at_once(host: Host) -> None:
    stage = NotingStage()
    pipeline = Pipeline(host, stage, Chunks)
    host.play = say([1, 2, 3, 4, 5, 6])
    list(stream(pipeline, REQUEST))
    first, *later = stage.deadlines
    assert first == 0
    assert len(later) == 3
    assert min(later) > 0
    pipeline.close()


def test_a_stream_that_ends_before_it_was_let_in_is_not_cancelled(host: Host, pipeline: Pipeline) -> None:
    def play(receiver: Any) -> None:
        before = pipeline.stats().audio_seconds
        say([1, 2, 3, 4])(receiver)
        while pipeline.stats().audio_seconds == before:
            time.sleep(0.001)

    host.play, host.plays_outside = play, True
    assert len(list(stream(pipeline, REQUEST))) == 3
    assert submit(pipeline, REQUEST).exception(240) is None
    assert not host.cancelled


def test_what_came_first_settles_a_future(host: Host, pipeline: Pipeline) -> None:
    heard, settled = threading.Event(), threading.Event()

    def play(receiver: Any) -> None:
        receiver.finished(Tokens([1], "stop"))
        settled.wait(240)
        receiver.failed(NightjarError(ErrorCode.SYNTH_ABORTED, "too late"))
        heard.set()

    host.play = play
    assert len(submit(pipeline, REQUEST).result(240).samples) == 4
    settled.set()
    assert heard.wait(240)


def test_options_are_checked_by_name_and_type() -> None:
    assert read_options(TokenModelOptions, {"slots": 3, "dtype": "bfloat16"}).slots == 3
    for given, words in (({"slot": 3}, "'slot'"), ({"slots": "many"}, "slots"), ({"dtype": "int3"}, "dtype")):
        with pytest.raises(ConfigError, match=words):
            read_options(TokenModelOptions, given)
    spec = ModelSpec(Path(), memory_share=0.5, context=8192, max_positions=4096)
    with pytest.raises(ConfigError, match="The engine vllm has no reproducible mode"):
        spec.chosen(TokenModelOptions(reproducible=True))
    assert spec.chosen(TokenModelOptions(memory_share=0.2)) == (0.2, 4096)
    assert spec.chosen(TokenModelOptions(max_context=100)) == (0.5, 100)


def test_no_setting_leaves_the_range_of_an_engine() -> None:
    """A number that float32 or int64 cannot hold would end the engine core, and all requests with it."""
    least = Generation(temperature=1e-300, top_k=0, top_p=1.0, repetition_penalty=1e-300)
    most = Generation(temperature=2.0, top_k=1 << 63, top_p=1.0, repetition_penalty=1e300)
    for asked, temperature, top_k, penalty in ((least, 1e-4, 0, 1e-4), (most, 2.0, 2**31 - 1, 1e4)):
        made = token_sampling(BaseSamplingDefaults(), asked, 10, 5, ())
        assert (made.temperature, made.top_k, made.repetition_penalty) == (temperature, top_k, penalty)
    assert token_sampling(BaseSamplingDefaults(), Generation(temperature=0.0), 10, 5, ()).temperature == 0.0
    with pytest.raises(InputError):
        check_generation(Generation(seed=1 << 63))


def test_seconds_become_frames_whatever_their_size() -> None:
    assert [frames_within(seconds, 12.5, 100) for seconds in (1e-9, 0.08, 0.81, 1e308)] == [1, 1, 11, 100]


def wav(samples: NDArray[np.float32]) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV", subtype="FLOAT")
    return file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "level", "code"),
    [
        (0.4, 0.5, ErrorCode.INPUT_REFERENCE_LENGTH),
        (61, 0.5, ErrorCode.INPUT_REFERENCE_LENGTH),
        (1, 0.0005, ErrorCode.INPUT_REFERENCE_SILENT),
    ],
)
def test_a_recording_that_holds_no_voice_is_refused(seconds: float, level: float, code: ErrorCode) -> None:
    with pytest.raises(InputError) as caught:
        read_recording(wav(np.full(int(16_000 * seconds), level, np.float32)), Reading(16_000))
    assert caught.value.code is code


@pytest.mark.parametrize(
    ("name", "text"),
    [("config.json", '{"part": {"size": 3, "list": [1, 2]}}'), ("c.yaml", "part: {size: 3, list: [1, 2]}")],
)
def test_keys_name_file_section_and_key(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    part = Keys.read(tmp_path / name).section("part")
    assert (
        part.value("size", Size),
        part.value("list", Sizes),
        "size" in part,
        part.value("other", Size, 7),
    ) == (3, (1, 2), True, 7)
    with pytest.raises(
        ModelError,
        match=rf"{name}: part\.list must be a whole number that is not negative\. Download the checkpoint again",
    ):
        part.value("list", Whole)
    (tmp_path / name).write_text("[1, 2")
    with pytest.raises(ModelError, match=f"{name} cannot be read"):
        Keys.read(tmp_path / name)
