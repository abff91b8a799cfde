"""Prompts of the speech LM (Spark-TTS, `process_prompt` and `process_prompt_control`): plain concatenation, no chat template."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.spark_tts.card import GENDERS, LEVELS
from pipelines.spark_tts.vocabulary import Vocabulary


def clone_prompt(
    vocabulary: Vocabulary, text: str, voice: Sequence[int], reference_text: str | None = None, semantic: Sequence[int] = ()
) -> list[int]:
    """The ids that ask for `text` in a voice of these global tokens.

    With the text of the reference the LM goes on after the reference's own semantic tokens. The two texts are joined before
    they are tokenized, as the published code does. Raises `InputError` (`input.unpronounceable`).
    """
    ids = [
        vocabulary.control("task_tts"),
        *vocabulary.spoken((reference_text or "") + text),
        vocabulary.control("start_global_token"),
        *vocabulary.voice_ids(voice),
        vocabulary.control("end_global_token"),
    ]
    if reference_text:
        ids += [vocabulary.control("start_semantic_token"), *vocabulary.semantic_ids(semantic)]
    return ids


def creation_prompt(vocabulary: Vocabulary, text: str, voice: str) -> list[int]:
    """The ids that ask for `text` in a created voice such as `female/high/moderate` (gender, pitch, speed).

    Raises `InputError` (`input.unpronounceable`).
    """
    gender, pitch, speed = voice.split("/")
    return [
        vocabulary.control("task_controllable_tts"),
        *vocabulary.spoken(text),
        vocabulary.control("start_style_label"),
        vocabulary.id(f"gender_{GENDERS.index(gender)}"),
        vocabulary.id(f"pitch_label_{LEVELS.index(pitch)}"),
        vocabulary.id(f"speed_label_{LEVELS.index(speed)}"),
        vocabulary.control("end_style_label"),
    ]
