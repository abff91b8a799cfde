"""Qwen3-TTS as a pipeline: what requests become, what is refused, streams, aborts, and seeds."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import soundfile

from pipelines.codec.stage import CodecStage
from pipelines.duration import longest_seconds
from pipelines.errors import ErrorCode, InputError, NightjarError, SynthesisError
from pipelines.qwen3_tts import pipeline as qwen3
from pipelines.qwen3_tts.config import SamplingDefaults
from pipelines.qwen3_tts.pipeline import Qwen3TTSPipeline, open_pipeline, sampling_params
from pipelines.recording import Recording
from pipelines.request import (
    Event,
    Generation,
    Message,
    Modality,
    Role,
    Speech,
    SynthesisRequest,
    stream,
    submit,
)
from tests.support.golden_checkpoint import whole
from tests.support.qwen3_golden import GOLDEN

SECONDS = 240
SIZES: dict[str, Any] = {"slots": 6, "pages": 96, "page_size": 16, "max_context": 512}


@pytest.fixture(scope="module")
def base() -> Iterator[Qwen3TTSPipeline]:
    pipeline = open_pipeline(GOLDEN / "checkpoint-base", keep_unfinished=True, **SIZES)
    yield pipeline
    pipeline.close()


@pytest.fixture(scope="module")
def custom() -> Iterator[Qwen3TTSPipeline]:
    pipeline = open_pipeline(whole(GOLDEN / "checkpoint-custom"), keep_unfinished=True, **SIZES)
    yield pipeline
    pipeline.close()


def reference(name: str = "ref_a_24k_mono.wav") -> bytes:
    return (GOLDEN / "refs" / name).read_bytes()


def wav(samples: np.ndarray, rate: int = 24_000) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


def ask(
    name: str, *messages: tuple[Role, Modality, str | bytes], seed: int = 1, **generation: Any
) -> SynthesisRequest:
    settings = Generation(**{"max_seconds": 0.8, **generation})
    return SynthesisRequest(name, tuple(Message(*message) for message in messages), settings, seed)


def clone(
    name: str, text: str = "Good morning.", audio: bytes | None = None, **generation: Any
) -> SynthesisRequest:
    return ask(name, ("user", "audio", audio or reference()), ("user", "text", text), **generation)


@contextmanager
def held(pipeline: Qwen3TTSPipeline) -> Iterator[None]:
    """The engine of a pipeline ends no turn inside: what is submitted here is not over here."""
    core, may = pipeline.engine.core, threading.Event()
    step = core.step

    def held_step(batch: bool) -> bool:
        assert may.wait(SECONDS)
        return step(batch)

    core.step = held_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        core.step = step  # type: ignore[method-assign]
        may.set()


def test_same_request_same_audio_in_any_company(base: Qwen3TTSPipeline) -> None:
    wanted = clone("one", seed=5, reference_text="It was a bright day.")
    alone = submit(base, wanted).result(SECONDS)
    crowd = [submit(base, clone(f"other {index}", "Something else.", seed=index)) for index in range(4)]
    again = submit(base, replace(wanted, request_id="two")).result(SECONDS)
    for future in crowd:
        future.result(SECONDS)
    np.testing.assert_array_equal(alone.samples, again.samples)
    different = submit(base, replace(wanted, seed=6)).result(SECONDS)
    assert len(different.samples) != len(alone.samples) or (different.samples != alone.samples).any()


def test_speech_says_what_it_is(base: Qwen3TTSPipeline) -> None:
    speech = submit(base, clone("meta", "Hello there.")).result(SECONDS)
    assert speech.text == "Hello there."
    assert speech.samples.dtype == np.float32
    assert len(speech.samples) == int(speech.meta["frames"]) * 1920
    assert speech.meta["finish"] in ("eos", "length")
    assert (speech.meta["engine"], speech.meta["executor"], speech.meta["dtype"]) == (
        "native",
        "eager",
        "float32",
    )


def test_speech_says_which_executor_made_it_where_that_changed(
    base: Qwen3TTSPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base.engine.core.executor, "name", "changed")
    assert submit(base, clone("meta", "Hello there.")).result(SECONDS).meta["executor"] == "changed"


def test_max_seconds_is_the_limit(base: Qwen3TTSPipeline) -> None:
    for seconds in (0.08, 0.4, 0.41):
        speech = submit(base, clone("short", max_seconds=seconds)).result(SECONDS)
        assert speech.duration_ms <= 1000 * seconds + 80
    assert submit(base, clone("one frame", max_seconds=0.08)).result(SECONDS).duration_ms == 80


def test_a_stream_is_the_whole_in_pieces(base: Qwen3TTSPipeline) -> None:
    for text in (None, "It was."):
        wanted = clone("stream", reference_text=text, seed=9, max_seconds=2.0)
        whole = submit(base, wanted).result(SECONDS)
        chunks = list(stream(base, wanted))
        assert len(chunks[0].samples) == 1920
        np.testing.assert_allclose(
            np.concatenate([chunk.samples for chunk in chunks]), whole.samples, atol=1e-4
        )


def test_an_abandoned_stream_ends_its_request(base: Qwen3TTSPipeline) -> None:
    chunks = stream(base, clone("gone", max_seconds=20.0))
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    submit(base, clone("after")).result(SECONDS)
    assert base.stats().running == 0


def test_nothing_is_heard_of_what_is_cancelled(base: Qwen3TTSPipeline) -> None:
    heard: list[Event] = []
    with held(base):
        doomed, other = (
            base.start(clone("doomed", max_seconds=30.0), heard.append),
            submit(base, clone("other")),
        )
        doomed.cancel()
    assert len(other.result(SECONDS).samples)
    assert not heard


def test_the_engine_rests_while_the_codec_is_behind(
    base: Qwen3TTSPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Semaphore(0)

    def behind(_: object) -> bool:
        looked.release()
        return True

    with monkeypatch.context() as patch:
        patch.setattr(CodecStage, "is_backlogged", property(behind))
        future = submit(base, clone("rests"))
        made: list[int] = []
        for _ in range(40):
            assert looked.acquire(timeout=300)
            made.append(base.engine.core.frames_made)
        assert made[20] == made[-1]
        assert not future.done()
    assert len(future.result(300).samples)


def test_no_end_is_an_error_unless_asked_for() -> None:
    pipeline = open_pipeline(GOLDEN / "checkpoint-base", **SIZES)
    try:
        request = clone("endless", max_seconds=0.08)
        assert error_of(submit(pipeline, request)).code is ErrorCode.SYNTH_NO_EOS
        with pytest.raises(SynthesisError) as caught:
            list(stream(pipeline, request))
        assert caught.value.code is ErrorCode.SYNTH_NO_EOS
    finally:
        pipeline.close()


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (ask("x", ("user", "text", "Hi.")), ErrorCode.INPUT_AUDIO_MISSING),
        (ask("x", ("user", "audio", "ref.wav"), ("user", "text", "Hi.")), ErrorCode.INPUT_AUDIO_MISSING),
        (clone("x", audio=b"not audio"), ErrorCode.INPUT_AUDIO_UNREADABLE),
        (clone("x", audio=wav(np.zeros(48_000, np.float32))), ErrorCode.INPUT_REFERENCE_SILENT),
        (clone("x", audio=wav(np.ones(2_000, np.float32) / 2)), ErrorCode.INPUT_REFERENCE_LENGTH),
        (
            clone("x", audio=wav(np.tile(np.linspace(-0.5, 0.5, 80, dtype=np.float32), 8_000), 8_000)),
            ErrorCode.INPUT_REFERENCE_LENGTH,
        ),
        (clone("x", voice="ryan"), ErrorCode.INPUT_UNKNOWN_VOICE),
        (clone("x", language="klingon"), ErrorCode.INPUT_UNKNOWN_LANGUAGE),
        (clone("x", instruct="happy"), ErrorCode.INPUT_UNSUPPORTED),
        (clone("x", text=" "), ErrorCode.INPUT_EMPTY_TEXT),
        (clone("x", text="half \ud800 a pair"), ErrorCode.INPUT_UNPRONOUNCEABLE),
        (clone("x", text="word " * 1100), ErrorCode.INPUT_TOO_LONG),
        (clone("x", temperature=-1.0), ErrorCode.INPUT_BAD_GENERATION),
        (clone("x", cfg=2.0), ErrorCode.INPUT_UNSUPPORTED),
    ],
)
def test_refused_before_any_engine_work(
    base: Qwen3TTSPipeline, request_: SynthesisRequest, code: ErrorCode
) -> None:
    before = base.stats()
    with pytest.raises(InputError) as caught:
        submit(base, request_)
    assert caught.value.code is code
    assert base.stats().requests_done == before.requests_done


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e300},
        {"temperature": 1e-300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"top_k": 10**30},
        {"top_p": 1e-300},
        {"max_seconds": 1e308},
        {"max_seconds": 1e-9},
    ],
)
def test_extreme_settings_speak_and_harm_nobody(base: Qwen3TTSPipeline, settings: dict[str, Any]) -> None:
    neighbour = submit(base, clone("neighbour"))
    assert len(submit(base, clone("extreme", **settings)).result(SECONDS).samples)
    assert len(neighbour.result(SECONDS).samples)


def test_a_seed_out_of_range_is_refused(base: Qwen3TTSPipeline) -> None:
    for seed in (-1, 1 << 63):
        with pytest.raises(InputError) as caught:
            submit(base, clone("x", seed=seed))
        assert caught.value.code is ErrorCode.INPUT_BAD_GENERATION


def test_a_stream_that_nobody_reads_costs_nothing(base: Qwen3TTSPipeline) -> None:
    before = base.stats()
    chunks = stream(base, clone("unread", max_seconds=20.0))
    chunks.close()  # type: ignore[attr-defined]
    submit(base, clone("after")).result(SECONDS)
    assert base.stats().requests_done == before.requests_done + 1
    assert (base.stats().running, base.stats().waiting) == (0, 0)


def test_named_voices_refuse_clones_and_strangers(custom: Qwen3TTSPipeline) -> None:
    for request, code in (
        (clone("x"), ErrorCode.INPUT_UNSUPPORTED),
        (ask("x", ("user", "text", "Hi."), voice="nobody"), ErrorCode.INPUT_UNKNOWN_VOICE),
        (ask("x", ("user", "text", "Hi."), language="beijing_dialect"), ErrorCode.INPUT_UNKNOWN_LANGUAGE),
        (ask("x", ("user", "text", "word " * 950)), ErrorCode.INPUT_TOO_LONG),
    ):
        with pytest.raises(InputError) as caught:
            submit(custom, request)
        assert caught.value.code is code


def test_voice_language_and_instruction_change_the_speech(custom: Qwen3TTSPipeline) -> None:
    plain = ask("a", ("user", "text", "Hello you."), voice="RYAN", temperature=0.0)
    variants = [
        plain,
        replace(
            plain,
            generation=plain.generation.over(Generation()),
            messages=(Message("system", "text", "Whisper."), *plain.messages),
        ),
        ask("b", ("user", "text", "Hello you."), voice="serena", temperature=0.0),
        ask("c", ("user", "text", "Hello you."), voice="ryan", language="german", temperature=0.0),
    ]
    audio = [submit(custom, request).result(SECONDS).samples for request in variants]
    assert len({samples.tobytes() for samples in audio}) == len(variants)
    spoken = ask("d", ("user", "text", "Hello you."), voice="ryan", instruct="Whisper.", temperature=0.0)
    np.testing.assert_array_equal(submit(custom, spoken).result(SECONDS).samples, audio[1])


def test_voices_are_prepared_once(base: Qwen3TTSPipeline) -> None:
    voices = base.voices
    assert voices is not None

    def voice(name: str) -> Recording:
        return Recording(reference(name))

    first = voices.prepare(voice("ref_b_24k_mono.wav"), in_context=True)
    assert voices.prepare(voice("ref_b_24k_mono.wav"), in_context=True) is first
    assert voices.prepare(voice("ref_b_24k_mono.wav"), in_context=False) is not first
    kept = voices._kept
    kept.capacity_bytes, keep = 1, kept.capacity_bytes
    voices.prepare(voice("ref_c_16k_stereo.wav"), in_context=False)
    kept.capacity_bytes = keep
    assert voices.prepare(voice("ref_b_24k_mono.wav"), in_context=True) is not None


def test_submit_blocks_while_the_waiting_room_is_full() -> None:
    pipeline = open_pipeline(
        GOLDEN / "checkpoint-base", keep_unfinished=True, waiting_room=1, **{**SIZES, "slots": 1}
    )
    futures: list[Future[Speech]] = []
    prepared = clone("r", max_seconds=1.0)

    def many() -> None:
        futures.extend(submit(pipeline, replace(prepared, request_id=str(index))) for index in range(5))

    thread = threading.Thread(target=many)
    thread.start()
    most = 0
    while thread.is_alive():
        most = max(most, pipeline.stats().waiting)
        thread.join(0.002)
    assert most <= 2
    for future in futures:
        assert len(future.result(SECONDS).samples)
    pipeline.close()


def test_close_aborts_what_runs_and_may_be_repeated() -> None:
    pipeline = open_pipeline(GOLDEN / "checkpoint-base", **SIZES)
    with held(pipeline):
        future = submit(pipeline, clone("late", max_seconds=60.0))
        closes = threading.Thread(target=pipeline.close)
        closes.start()
        while not pipeline.engine.closing:
            time.sleep(0.001)
    closes.join()
    pipeline.close()
    assert error_of(future).code is ErrorCode.SYNTH_ABORTED
    with pytest.raises(SynthesisError) as caught:
        submit(pipeline, clone("later"))
    assert caught.value.code is ErrorCode.SYNTH_ABORTED


def test_settings_of_a_request_go_over_the_checkpoint() -> None:
    defaults = SamplingDefaults()
    assert sampling_params(defaults, Generation()).temperature == 0.9
    mine = sampling_params(defaults, Generation(temperature=0.5, top_k=7, top_p=0.8, repetition_penalty=1.2))
    assert (mine.temperature, mine.top_k, mine.top_p, mine.repetition_penalty) == (0.5, 7, 0.8, 1.2)
    assert (mine.residual_temperature, mine.residual_top_k, mine.residual_top_p) == (0.9, 50, 1.0)
    greedy = sampling_params(defaults, Generation(temperature=0.0))
    assert (greedy.temperature, greedy.residual_temperature) == (0.0, 0.0)
    assert sampling_params(replace(defaults, do_sample=False), Generation()).temperature == 0.0


def error_of(future: Future[Speech]) -> NightjarError:
    error = future.exception(SECONDS)
    assert isinstance(error, NightjarError)
    return error


@pytest.mark.parametrize("streams", [0, 1])
def test_the_codecs_stage_is_told_of_streams(streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    open_stage = qwen3.open_stage
    monkeypatch.setattr(
        qwen3,
        "open_stage",
        lambda *rest, streams: (told.append(streams), open_stage(*rest, streams=streams))[1],
    )
    open_pipeline(GOLDEN / "checkpoint-base", **{**SIZES, "slots": 1}, streams=streams).close()
    assert told == [bool(streams)], "with one slot too, which no stream has to itself"


def test_streams_keep_slots_free_and_a_first_word_can_be_said() -> None:
    pipeline = open_pipeline(GOLDEN / "checkpoint-base", **SIZES, streams=99)
    try:
        assert pipeline.engine.core.options.stream_slots == 3
        assert pipeline.engine.core.options.frame_seconds == 0.08
        assert pipeline.stats().requests_done == 0, "on a CPU nothing has to be made ready"
        pipeline.warm_up()
        assert (pipeline.stats().requests_done, pipeline.stats().frames) == (2, 56)
        assert (pipeline.stats().running, pipeline.stats().waiting) == (0, 0)
    finally:
        pipeline.close()


def test_the_codec_gets_chunks_as_the_engine_cuts_them_with_their_deadlines(
    base: Qwen3TTSPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool, float]] = []
    stage = base._stage
    decode = stage.decode_chunk

    def keep(codes: Any, done: Any, state: Any, last: bool = False, deadline: float = 0.0) -> None:
        asked.append((len(codes), last, deadline))
        decode(codes, done, state, last, deadline)

    monkeypatch.setattr(stage, "decode_chunk", keep)
    chunks = list(stream(base, clone("cut", max_seconds=1.6, seed=3)))
    assert sum(size for size, _, _ in asked) == sum(len(chunk.samples) for chunk in chunks) // 1920
    assert [last for _, last, _ in asked] == [False] * (len(asked) - 1) + [True]
    assert {size for size, last, _ in asked if not last} <= {1, 2, 4, 8, 12}
    assert asked[0][2] == 0.0
    deadlines = [deadline for _, _, deadline in asked[1:]]
    np.testing.assert_allclose(np.diff(deadlines), [0.08 * size for size, _, _ in asked[1:-1]], atol=1e-6)


def test_speech_longer_than_its_text_is_ended_unless_unfinished_speech_is_kept(
    base: Qwen3TTSPipeline,
) -> None:
    slow = clone("slow", "Hi.", temperature=0.0, repetition_penalty=1.0, max_seconds=13.0)
    kept = submit(base, slow).result(SECONDS)
    assert len(kept.samples) / kept.sample_rate > longest_seconds("Hi.")
    with closing(open_pipeline(GOLDEN / "checkpoint-base", **SIZES)) as pipeline:
        assert error_of(submit(pipeline, slow)).code is ErrorCode.SYNTH_RUNAWAY
