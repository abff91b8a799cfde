"""Codes of a request: the same with and without the codec's decoder, and decoded later to the samples that the
pipeline itself made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import pipelines.fish_speech.codec as fish
import pipelines.qwen3_tts.codec as qwen3
import pipelines.spark_tts.bicodec as spark
from pipelines.errors import ErrorCode, InputError, NightjarError
from pipelines.registry import describe, open_decoder, open_pipeline
from pipelines.request import Generation, Message, Output, Pipeline, SynthesisRequest, submit
from pipelines.results import StageDecoder
from tests.support.fish_checkpoint import GOLDEN as FISH
from tests.support.fish_checkpoint import whole as whole_fish
from tests.support.golden_checkpoint import whole
from tests.support.vllm_kit import GOLDEN as SPARK

QWEN3 = Path(__file__).parents[2] / "golden" / "qwen3_tts"
TEXT = Message("user", "text", "Good morning, how are you today?")
WORDS = Generation(temperature=0.0, reference_text="The train to the city leaves at nine.", max_seconds=1)
PLAIN = Generation(temperature=0.0, max_seconds=1)


class Case(NamedTuple):
    folder: Callable[[], Path]
    recording: Path | None
    generation: Generation
    #: The class of the decoder, and whether codes need others before them.
    decoder: tuple[Any, str]
    starts: bool
    codebooks: int


CASES = {
    "qwen3": Case(
        lambda: whole(QWEN3 / "checkpoint-design"), None, PLAIN, (qwen3, "CodecDecoder"), False, 16
    ),
    "qwen3 in context": Case(
        lambda: whole(QWEN3 / "checkpoint-base"),
        QWEN3 / "refs" / "ref_a_24k_mono.wav",
        WORDS,
        (qwen3, "CodecDecoder"),
        True,
        16,
    ),
    "spark created": Case(lambda: whole(SPARK / "checkpoint"), None, PLAIN, (spark, "BiCodec"), True, 1),
    "fish": Case(lambda: whole_fish(), FISH / "wavs" / "ref_a.wav", WORDS, (fish, "CodecDecoder"), False, 10),
}


def request(case: Case, output: Output) -> SynthesisRequest:
    recordings = [] if case.recording is None else [Message("user", "audio", case.recording.read_bytes())]
    return SynthesisRequest(output, (*recordings, TEXT), case.generation, 7, output=output)


def opened(case: Case, **options: Any) -> Pipeline:
    return open_pipeline(str(case.folder()), keep_unfinished=True, max_context=512, **options)


def decoded(
    decoder: StageDecoder, codes: NDArray[np.int16], voice_codes: NDArray[np.int16] | None
) -> NDArray[np.float32]:
    found: list[NDArray[np.float32] | NightjarError] = []
    ended = Event()

    def done(outcome: NDArray[np.float32] | NightjarError) -> None:
        found.append(outcome)
        ended.set()

    decoder.decode(codes, voice_codes, done)
    assert ended.wait(240)
    assert isinstance(found[0], np.ndarray), found
    return found[0]


@pytest.mark.parametrize("name", CASES)
def test_codes_are_the_same_without_the_decoder_and_decode_to_the_same_samples(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    with closing(opened(case)) as pipeline:
        both, audio = (submit(pipeline, request(case, one)).result(240) for one in ("both", "audio"))
        alone = submit(pipeline, request(case, "codes")).result(240)
    assert audio.codes is None
    assert both.codes is not None
    assert both.codes.dtype == np.int16
    assert both.codes.shape[1] == case.codebooks
    assert (both.voice_codes is not None) == case.starts
    np.testing.assert_array_equal(both.samples, audio.samples)
    assert len(audio.samples) == len(both.codes) * both.frame_samples
    assert len(alone.samples) == 0
    assert (alone.sample_count, alone.duration_ms) == (both.sample_count, both.duration_ms)
    # Its identity has the frames of the codes.
    codec = describe(str(case.folder())).codec
    assert codec is not None
    rate = codec().sample_rate
    assert (rate / codec().frame_rate, rate) == (both.frame_samples, both.sample_rate)
    assert len(codec().codebook_sizes) == case.codebooks
    assert (both.codes < codec().codebook_sizes).all()

    with monkeypatch.context() as patch:
        module, kind = case.decoder
        patch.setattr(module, kind, lambda *_, **__: pytest.fail("the decoder was loaded"))
        with closing(opened(case, decodes=False)) as pipeline:
            codes = submit(pipeline, request(case, "codes")).result(240)
            with pytest.raises(InputError, match="without the decoder") as refused:
                submit(pipeline, request(case, "audio"))
        assert refused.value.code is ErrorCode.INPUT_UNSUPPORTED
    for speech in (alone, codes):
        np.testing.assert_array_equal(speech.codes, both.codes)
        assert (speech.voice_codes is None) == (both.voice_codes is None)
        if both.voice_codes is not None:
            np.testing.assert_array_equal(speech.voice_codes, both.voice_codes)

    with closing(open_decoder(str(case.folder()))) as decoder:
        assert decoder.sample_rate == audio.sample_rate
        assert codes.codes is not None
        np.testing.assert_array_equal(decoded(decoder, codes.codes, codes.voice_codes), audio.samples)


def test_a_model_without_a_codec_gives_no_codes() -> None:
    with (
        closing(open_pipeline("hibari")) as pipeline,
        pytest.raises(InputError, match="gives no codes") as refused,
    ):
        submit(pipeline, SynthesisRequest("one", (TEXT,), output="codes"))
    assert refused.value.code is ErrorCode.INPUT_UNSUPPORTED
