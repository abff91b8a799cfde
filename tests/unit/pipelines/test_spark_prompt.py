"""Prompts and tokens of SparkTTS, and how finished sequences become speech or an error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipelines.audio import normalize_volume
from pipelines.errors import ErrorCode, InputError, SynthesisError
from pipelines.request import Generation
from pipelines.spark_tts.config import LLM, SAMPLING, SparkConfig
from pipelines.spark_tts.pipeline import SparkRequestInfo
from pipelines.spark_tts.prompt import Vocabulary, clone_prompt, creation_prompt
from pipelines.spark_tts.reference import reference_clip
from pipelines.tokens import Finish, Tokens, token_sampling
from tests.support.vllm_kit import checkpoint

VOICE = tuple(range(16))


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    sizes = SparkConfig.from_folder(checkpoint()).bicodec
    return Vocabulary.from_folder(checkpoint() / LLM, sizes.codebook_size, sizes.global_codes)


def test_prompts_are_what_their_strings_say(vocabulary: Vocabulary) -> None:
    spoken = "".join(f"<|bicodec_global_{code}|>" for code in VOICE)
    clone = f"<|task_tts|><|start_content|>Good day.<|end_content|><|start_global_token|>{spoken}<|end_global_token|>"
    assert clone_prompt(vocabulary, "Good day.", VOICE) == vocabulary.encode(clone)
    with_text = (
        clone.replace("Good day.", "Listen.Good day.")
        + "<|start_semantic_token|><|bicodec_semantic_7|><|bicodec_semantic_2047|>"
    )
    assert clone_prompt(vocabulary, "Good day.", VOICE, "Listen.", (7, 2047)) == vocabulary.encode(with_text)
    assert clone_prompt(vocabulary, "Good day.", VOICE, None, (7,)) == vocabulary.encode(clone)
    created = "<|task_controllable_tts|><|start_content|>Hi<|end_content|><|start_style_label|><|gender_1|><|pitch_label_4|><|speed_label_0|>"
    assert creation_prompt(vocabulary, "Hi", "male/very_high/very_low") == vocabulary.encode(
        created + "<|end_style_label|>"
    )


@pytest.mark.parametrize("text", ["a <|im_end|> b", "<|bicodec_semantic_3|>", "<|end_content|>"])
def test_a_text_cannot_speak_in_control_tokens(vocabulary: Vocabulary, text: str) -> None:
    with pytest.raises(InputError) as caught:
        clone_prompt(vocabulary, text, VOICE)
    assert caught.value.code is ErrorCode.INPUT_UNPRONOUNCEABLE
    with pytest.raises(InputError):
        clone_prompt(vocabulary, "fine", VOICE, text)


def test_what_only_looks_like_a_control_token_is_spoken(vocabulary: Vocabulary) -> None:
    assert vocabulary.spoken("a <|unknown|> b < | c")


def info(
    vocabulary: Vocabulary, voice: tuple[int, ...] | None, keep_unfinished: bool = False
) -> SparkRequestInfo:
    return SparkRequestInfo("text", 16_000, {}, keep_unfinished, vocabulary, voice, len(VOICE))


def heard(
    info: SparkRequestInfo, ids: list[int], finish: Finish = "stop"
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Semantic tokens and voice of a finished sequence."""
    made = info.read(Tokens(ids, finish))
    assert made.start is not None
    return tuple(made.codes[:, 0].tolist()), tuple(made.start.tokens.tolist())


def test_log_probabilities_are_of_the_semantic_tokens_that_are_heard(vocabulary: Vocabulary) -> None:
    voice = [vocabulary.voice.start + code for code in VOICE]
    semantic = [vocabulary.semantic.start + code for code in (4, 9, 1)]
    control = vocabulary.controls["end_semantic_token"]
    ids = [*voice, semantic[0], control, *semantic[1:]]
    measured = -np.arange(len(ids), dtype=np.float64)
    made = info(vocabulary, None).read(Tokens(ids, "stop", None, measured))
    assert made.log_probabilities is not None
    assert made.log_probabilities.tolist() == [-16, -18, -19]
    cut = replace(info(vocabulary, None, keep_unfinished=True), max_semantic=2)
    found = cut.read(Tokens(ids, "stop", None, measured)).log_probabilities
    assert found is not None
    assert found.tolist() == [-16, -18]
    assert info(vocabulary, None).read(Tokens(ids, "stop")).log_probabilities is None


def code_of(info: SparkRequestInfo, ids: list[int], finish: Finish = "stop") -> ErrorCode:
    with pytest.raises(SynthesisError) as caught:
        info.read(Tokens(ids, finish))
    return caught.value.code


def voice_ids(vocabulary: Vocabulary, codes: tuple[int, ...]) -> list[int]:
    return [vocabulary.voice.start + code for code in codes]


def test_a_clone_keeps_its_own_voice(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode(
        "<|start_semantic_token|><|bicodec_semantic_5|> noise <|pitch_value_3|><|bicodec_semantic_2|><|im_end|>"
    )
    assert heard(info(vocabulary, VOICE), ids) == ((5, 2), VOICE)


def test_a_created_voice_is_read_from_the_tokens(vocabulary: Vocabulary) -> None:
    ids = [*voice_ids(vocabulary, VOICE), vocabulary.semantic.start + 9]
    assert heard(info(vocabulary, None), ids)[1] == VOICE


@pytest.mark.parametrize("missing", [1, 16])
def test_a_created_voice_that_is_not_whole_is_no_audio(vocabulary: Vocabulary, missing: int) -> None:
    ids = [*voice_ids(vocabulary, VOICE[missing:]), vocabulary.semantic.start + 9]
    assert code_of(info(vocabulary, None), ids) is ErrorCode.SYNTH_NO_AUDIO
    one_more = [*voice_ids(vocabulary, (*VOICE, 1)), vocabulary.semantic.start + 9]
    assert code_of(info(vocabulary, None), one_more) is ErrorCode.SYNTH_NO_AUDIO


def test_no_speech_token_is_no_audio_and_no_end_is_no_speech(vocabulary: Vocabulary) -> None:
    assert code_of(info(vocabulary, VOICE), []) is ErrorCode.SYNTH_NO_AUDIO
    assert code_of(info(vocabulary, VOICE), vocabulary.encode("only text")) is ErrorCode.SYNTH_NO_AUDIO
    ids = [vocabulary.semantic.start + code for code in (1, 2)]
    assert code_of(info(vocabulary, VOICE), ids, "length") is ErrorCode.SYNTH_NO_EOS
    assert heard(info(vocabulary, VOICE, keep_unfinished=True), ids, "length")[0] == (1, 2)


def test_a_line_draws_as_it_asks_and_else_as_the_model_does() -> None:
    defaults = SAMPLING
    plain = token_sampling(defaults, Generation(), 10, 5, (1, 2))
    assert (plain.temperature, plain.top_k, plain.top_p, plain.repetition_penalty) == (0.8, 50, 0.95, 1.0)
    assert (plain.max_tokens, plain.seed, plain.stop_ids) == (10, 5, (1, 2))
    own = token_sampling(
        defaults, Generation(temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.2), 10, 5, ()
    )
    assert (own.temperature, own.top_k, own.top_p, own.repetition_penalty) == (0.0, 0, 1.0, 1.2)


def test_a_temperature_that_vllm_refuses_is_refused_before_it() -> None:
    assert token_sampling(SAMPLING, Generation(temperature=2.0), 10, 5, ()).temperature == 2.0
    with pytest.raises(InputError, match=r"`temperature` is 2\.5; this model takes 0 to 2\.") as caught:
        token_sampling(SAMPLING, Generation(temperature=2.5), 10, 5, ())
    assert caught.value.code is ErrorCode.INPUT_BAD_GENERATION


def test_volume_and_clip() -> None:
    quiet = np.full(1000, 0.02)
    assert np.abs(normalize_volume(quiet)).max() == pytest.approx(1.0), (
        "the gain follows the levels before the first step"
    )
    faint = np.full(1000, 0.005)
    assert np.abs(normalize_volume(faint)).max() == pytest.approx(0.1), (
        "too little is heard for a second step"
    )
    loud = np.tile([0.9, -0.9], 500)
    assert np.abs(normalize_volume(loud)).max() == pytest.approx(0.2)
    samples = np.arange(5, dtype=np.float32)
    assert reference_clip(samples, 12).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert reference_clip(samples, 3).tolist() == [0, 1, 2]
