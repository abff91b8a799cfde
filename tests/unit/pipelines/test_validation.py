"""The rules between a dialogue and a speech task."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipelines.errors import ErrorCode, InputError
from pipelines.request import Capabilities, Generation, Message
from pipelines.validation import SpeechTask, is_visible, speech_task

PLAIN = Capabilities()
CLONER = Capabilities(cloning=True)
TWO_VOICES = Capabilities(cloning=True, references=2, needs_reference_text=True)
RICH = Capabilities(
    voices=("Vivian", "Uncle_Fu"),
    languages=("English", "Chinese"),
    instruct=True,
    cloning=True,
    guidance=True,
)
CHAT = Capabilities(multi_turn=True, audio_in=True, instruct=True)


def dialogue(*messages: tuple[str, str, str | bytes]) -> tuple[Message, ...]:
    return tuple(Message(*message) for message in messages)  # type: ignore[arg-type]


def task(
    *messages: tuple[str, str, str | bytes], capabilities: Capabilities = PLAIN, **settings: object
) -> SpeechTask:
    return speech_task(dialogue(*messages), Generation(**settings), capabilities)  # type: ignore[arg-type]


HELLO = ("user", "text", "Hello.")


def test_user_text_is_spoken_and_assistant_skipped() -> None:
    assert task(HELLO, ("assistant", "audio", "truth.wav"), ("assistant", "text", "Hi")) == SpeechTask(
        "Hello."
    )


def test_assistant_may_speak_first() -> None:
    assert task(("assistant", "image", "x.png"), HELLO).text == "Hello."


def test_white_space_around_text_is_not_spoken() -> None:
    assert task(("user", "text", " \n Hello. \t")).text == "Hello."


@pytest.mark.parametrize("audio", ["ref.wav", b"RIFF"])
def test_user_audio_is_the_reference_in_either_order(audio: str | bytes) -> None:
    expected = SpeechTask("Hello.", reference_audio=(audio,), reference_text="Words.")
    assert task(HELLO, ("user", "audio", audio), capabilities=CLONER, reference_text="Words.") == expected
    assert task(("user", "audio", audio), HELLO, capabilities=CLONER, reference_text="Words.") == expected


def test_system_text_is_the_instruction_unless_the_settings_have_one() -> None:
    system = ("system", "text", " Whisper. ")
    assert task(system, HELLO, capabilities=RICH).instruct == "Whisper."
    assert (
        task(system, ("system", "text", "Slowly."), HELLO, capabilities=RICH).instruct == "Whisper.\nSlowly."
    )
    assert task(system, HELLO, capabilities=RICH, instruct="Shout.").instruct == "Shout."
    assert task(system, HELLO, capabilities=RICH, instruct="").instruct is None
    assert task(("system", "text", "  "), HELLO, capabilities=RICH).instruct is None
    assert task(system, HELLO, capabilities=PLAIN).instruct is None


def test_names_take_the_spelling_of_the_model() -> None:
    found = task(HELLO, capabilities=RICH, voice="UNCLE_fu", language="english ")
    assert (found.voice, found.language) == ("Uncle_Fu", "English")


@pytest.mark.parametrize(
    ("messages", "capabilities", "settings", "code"),
    [
        ((), PLAIN, {}, ErrorCode.INPUT_EMPTY_TEXT),
        ((("assistant", "text", "Hi"),), PLAIN, {}, ErrorCode.INPUT_EMPTY_TEXT),
        ((("user", "text", ""),), PLAIN, {}, ErrorCode.INPUT_EMPTY_TEXT),
        (
            (("user", "text", "\u200b\ufeff\u00a0\u3164\u2800\u200d\t\n\x00"),),
            PLAIN,
            {},
            ErrorCode.INPUT_EMPTY_TEXT,
        ),
        ((("user", "audio", "a.wav"),), CLONER, {}, ErrorCode.INPUT_EMPTY_TEXT),
        ((HELLO, HELLO), PLAIN, {}, ErrorCode.INPUT_MULTI_TURN),
        ((HELLO, ("assistant", "audio", "a"), HELLO), PLAIN, {}, ErrorCode.INPUT_MULTI_TURN),
        (
            (HELLO, ("assistant", "audio", "a"), ("user", "audio", "b")),
            CLONER,
            {},
            ErrorCode.INPUT_MULTI_TURN,
        ),
        (
            (("user", "audio", "b"), ("assistant", "audio", "a"), HELLO),
            CLONER,
            {},
            ErrorCode.INPUT_MULTI_TURN,
        ),
        ((HELLO, ("user", "audio", "a"), ("user", "audio", "b")), CLONER, {}, ErrorCode.INPUT_UNSUPPORTED),
        ((HELLO, ("user", "audio", "a")), PLAIN, {}, ErrorCode.INPUT_UNSUPPORTED),
        ((HELLO, ("user", "image", "a")), RICH, {}, ErrorCode.INPUT_BAD_MODALITY),
        ((HELLO, ("user", "video", "a")), RICH, {}, ErrorCode.INPUT_BAD_MODALITY),
        ((HELLO, ("user", "toolcall", "a")), RICH, {}, ErrorCode.INPUT_BAD_MODALITY),
        ((HELLO, ("system", "audio", "a")), RICH, {}, ErrorCode.INPUT_BAD_MODALITY),
        ((("user", "text", b"Hi"),), PLAIN, {}, ErrorCode.INPUT_BAD_LINE),
        ((("user", "text", "a" * 5001),), PLAIN, {}, ErrorCode.INPUT_TOO_LONG),
        ((HELLO,), RICH, {"voice": "Nobody"}, ErrorCode.INPUT_UNKNOWN_VOICE),
        ((HELLO,), PLAIN, {"voice": "Vivian"}, ErrorCode.INPUT_UNKNOWN_VOICE),
        ((HELLO,), RICH, {"language": "Klingon"}, ErrorCode.INPUT_UNKNOWN_LANGUAGE),
        ((HELLO,), PLAIN, {"language": "English"}, ErrorCode.INPUT_UNKNOWN_LANGUAGE),
        ((HELLO,), PLAIN, {"cfg": 2.0}, ErrorCode.INPUT_UNSUPPORTED),
        ((HELLO,), Capabilities(sampling=False), {"temperature": 0.5}, ErrorCode.INPUT_UNSUPPORTED),
        ((HELLO,), Capabilities(sampling=False), {"repetition_penalty": 1.1}, ErrorCode.INPUT_UNSUPPORTED),
        ((HELLO,), PLAIN, {"instruct": "Whisper."}, ErrorCode.INPUT_UNSUPPORTED),
        ((HELLO,), PLAIN, {"reference_text": "Hi"}, ErrorCode.INPUT_UNSUPPORTED),
        ((HELLO,), CLONER, {"reference_text": "Hi"}, ErrorCode.INPUT_REFERENCE_TEXT),
        ((HELLO,), Capabilities(cloning=True, needs_reference=True), {}, ErrorCode.INPUT_AUDIO_MISSING),
        ((HELLO, ("user", "audio", b"a")), TWO_VOICES, {}, ErrorCode.INPUT_REFERENCE_TEXT),
        (
            (HELLO, ("user", "audio", b"a")),
            TWO_VOICES,
            {"reference_text": " \n"},
            ErrorCode.INPUT_REFERENCE_TEXT,
        ),
        (
            (HELLO, ("user", "audio", b"a"), ("user", "audio", b"b")),
            TWO_VOICES,
            {"reference_text": "a"},
            ErrorCode.INPUT_REFERENCE_TEXT,
        ),
        (
            (HELLO, ("user", "audio", b"a"), ("user", "audio", b"b")),
            TWO_VOICES,
            {"reference_text": "a\n "},
            ErrorCode.INPUT_REFERENCE_TEXT,
        ),
        (
            (HELLO, *(("user", "audio", b"a"),) * 3),
            TWO_VOICES,
            {"reference_text": "a\nb\nc"},
            ErrorCode.INPUT_UNSUPPORTED,
        ),
        ((HELLO,), PLAIN, {"seed": -1}, ErrorCode.INPUT_BAD_GENERATION),
        ((HELLO,), PLAIN, {"temperature": float("nan")}, ErrorCode.INPUT_BAD_GENERATION),
        ((HELLO,), PLAIN, {"top_p": 0.0}, ErrorCode.INPUT_BAD_GENERATION),
        ((HELLO,), PLAIN, {"top_k": -5}, ErrorCode.INPUT_BAD_GENERATION),
        ((HELLO,), PLAIN, {"repetition_penalty": 0.0}, ErrorCode.INPUT_BAD_GENERATION),
        ((HELLO,), RICH, {"cfg": -1.0}, ErrorCode.INPUT_BAD_GENERATION),
        ((HELLO,), PLAIN, {"max_seconds": 0.0}, ErrorCode.INPUT_BAD_GENERATION),
        ((HELLO,), PLAIN, {"mode": "text_only"}, ErrorCode.INPUT_UNSUPPORTED),
        ((HELLO,), Capabilities(modes=("text_audio",)), {"mode": "text_only"}, ErrorCode.INPUT_UNSUPPORTED),
        ((HELLO,), PLAIN, {"audio_top_k": 5}, ErrorCode.INPUT_UNSUPPORTED),
        ((HELLO,), PLAIN, {"max_tokens": 5}, ErrorCode.INPUT_UNSUPPORTED),
        ((HELLO,), Capabilities(text_out=True), {"text_temperature": -1.0}, ErrorCode.INPUT_BAD_GENERATION),
        (
            (HELLO,),
            Capabilities(text_out=True),
            {"audio_temperature": float("nan")},
            ErrorCode.INPUT_BAD_GENERATION,
        ),
        ((HELLO,), Capabilities(text_out=True), {"audio_top_k": -1}, ErrorCode.INPUT_BAD_GENERATION),
        ((HELLO,), Capabilities(text_out=True), {"max_tokens": 0}, ErrorCode.INPUT_BAD_GENERATION),
        ((("assistant", "text", "Hi"),), CHAT, {}, ErrorCode.INPUT_EMPTY_TEXT),
        ((HELLO, ("user", "audio", "a")), Capabilities(multi_turn=True), {}, ErrorCode.INPUT_BAD_MODALITY),
    ],
)
def test_refuses(
    messages: tuple[tuple[str, str, str | bytes], ...],
    capabilities: Capabilities,
    settings: dict[str, object],
    code: ErrorCode,
) -> None:
    with pytest.raises(InputError) as caught:
        task(*messages, capabilities=capabilities, **settings)
    assert caught.value.code is code
    assert caught.value.advice


def test_several_recordings_have_a_line_of_text_each() -> None:
    one, two = ("user", "audio", b"1"), ("user", "audio", b"2")

    def references(*messages: tuple[str, str, object], text: str) -> list[tuple[bytes, str]]:
        made = task(*messages, capabilities=TWO_VOICES, reference_text=text)  # pyright: ignore[reportArgumentType]
        return [(recording.data, words) for recording, words in made.references]

    assert references(one, HELLO, text="One\nvoice ") == [(b"1", "One\nvoice")]
    assert references(one, HELLO, two, text="One\n Two") == [(b"1", "One"), (b"2", "Two")]
    assert task(HELLO, capabilities=TWO_VOICES).references == []


@pytest.mark.parametrize(
    ("asked", "language"),
    [
        ("en", "English"),
        ("EN", "English"),
        ("en_US", "English"),
        (" en-US ", "English"),
        ("zh-Hans-CN", "Chinese"),
        ("chinese", "Chinese"),
    ],
)
def test_a_language_is_asked_for_by_name_or_code(asked: str, language: str) -> None:
    assert task(HELLO, capabilities=RICH, language=asked).language == language
    # A name of the model's goes before a code, and a code is found where the model writes codes.
    assert (
        task(HELLO, capabilities=Capabilities(languages=("english", asked.strip())), language=asked).language
        == asked.strip()
    )
    assert (
        task(
            HELLO, capabilities=Capabilities(languages=(language[:2].lower(), "zh")), language="Chinese"
        ).language
        == "zh"
    )


def test_unknown_voice_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="Vivian, Uncle_Fu"):
        task(HELLO, capabilities=RICH, voice="Nobody")


def test_length_limit_is_inclusive_and_ignores_outer_white_space() -> None:
    assert len(task(("user", "text", " " + "a" * 5000 + "\n")).text) == 5000


def test_a_whole_dialogue_keeps_every_user_text() -> None:
    found = task(
        ("system", "text", "Be kind."),
        HELLO,
        ("assistant", "text", "Hi"),
        ("user", "audio", "q.wav"),
        HELLO,
        capabilities=CHAT,
    )
    assert found == SpeechTask("Hello.\nHello.", "Be kind.")
    assert task(("user", "audio", "q.wav"), capabilities=CHAT).text == ""


@pytest.mark.parametrize("text", ["a", "...", "你好", "😀", "é", "7", "—", "\u200bx"])
def test_visible(text: str) -> None:
    assert is_visible(text)


@pytest.mark.parametrize(
    "text", ["", " ", "\u3164", "\u2800\u200d", "\u0301", "\x07", "\U000e0020", "\ud800"]
)
def test_invisible(text: str) -> None:
    assert not is_visible(text)


def test_import_is_light() -> None:
    code = "import sys, pipelines.validation, pipelines.registry; sys.exit(any(m in sys.modules for m in ('numpy', 'torch', 'onnxruntime')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
