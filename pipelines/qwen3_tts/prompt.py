"""Prompts of Qwen3-TTS as integers: which text id, which codec ids and which voice vector add up at each position.

Nothing here needs a model; `Qwen3TTSModel.embed` turns a prompt into embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipelines.errors import ErrorCode, InputError
from pipelines.qwen3_tts.config import Qwen3TTSConfig

#: No id at this position.
NONE = -1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's input to the talker, position by position."""

    #: int64 [length]: text id, projected; NONE where the position has no text term.
    text: NDArray[np.int64]
    #: int64 [length, codebooks]: codec ids that are embedded and summed; NONE where there is none.
    codes: NDArray[np.int64]
    #: int64 [frames]: text id that is added to the input after each frame; tts_pad follows for ever.
    trailing: NDArray[np.int64]
    #: Position of the voice vector, and the vector, float32 [hidden]; both None without one.
    voice_at: int | None = None
    voice: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class Reference:
    """A recording to clone in context: body ids of its text, and its codes int64 [frames, codebooks]."""

    text_ids: Sequence[int]
    codes: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What one prompt is made of. At most one of `speaker` (a named voice) and `voice` (a vector) is given."""

    role_ids: Sequence[int]
    body_ids: Sequence[int]
    instruct_ids: Sequence[int] = ()
    language: str = "auto"
    speaker: str | None = None
    voice: NDArray[np.float32] | None = None
    reference: Reference | None = None
    #: The whole text before the first frame (`non_streaming_mode` of the published API), or one text token a frame.
    text_first: bool = True


@dataclass(slots=True)
class _Columns:
    codebooks: int
    text: list[int] = field(default_factory=list)
    codes: list[Sequence[int]] = field(default_factory=list)

    def add(self, text: Sequence[int], codec: Sequence[int]) -> None:
        """Aligned runs of text ids and codebook-0 ids."""
        self.add_frames(text, [(code, *[NONE] * (self.codebooks - 1)) for code in codec])

    def add_frames(self, text: Sequence[int], frames: Sequence[Sequence[int]]) -> None:
        self.text.extend(text)
        self.codes.extend(frames)


def build_prompt(config: Qwen3TTSConfig, parts: PromptParts) -> Prompt:
    """The prompt and the trailing text of one request, in the layout that the published wrapper makes.

    Raises `InputError` for a language or a speaker that the checkpoint does not have.
    """
    ids = config.ids
    prefix = codec_prefix(config, parts)
    columns = _Columns(config.codebooks)
    head = [*(parts.instruct_ids if config.takes_instructions else ()), *parts.role_ids]
    columns.add(head, [NONE] * len(head))
    columns.add([ids.tts_pad] * (len(prefix) - 2) + [ids.tts_bos], prefix[:-1])
    voice_at = len(head) + len(prefix) - 3 if parts.voice is not None else None
    if parts.reference is not None:
        trailing = _clone_in_context(config, columns, parts.reference, parts)
    elif parts.text_first:
        body = [*parts.body_ids, ids.tts_eos]
        columns.add(body, [ids.pad] * len(body))
        columns.add([ids.tts_pad], [ids.bos])
        trailing = []
    else:
        columns.add(parts.body_ids[:1], [ids.bos])
        trailing = [*parts.body_ids[1:], ids.tts_eos]
    return Prompt(
        text=np.array(columns.text, np.int64),
        codes=np.array(columns.codes, np.int64).reshape(-1, config.codebooks),
        trailing=np.array(trailing, np.int64),
        voice_at=voice_at,
        voice=parts.voice,
    )


def codec_prefix(config: Qwen3TTSConfig, parts: PromptParts) -> list[int]:
    """Codebook-0 ids of language, voice (NONE for a vector), pad and bos."""
    ids = config.ids
    language = language_id(config, parts.language, parts.speaker)
    think = [ids.nothink, ids.think_bos, ids.think_eos] if language is None else [ids.think, ids.think_bos, language, ids.think_eos]
    if parts.speaker:
        think.append(speaker_id(config, parts.speaker))
    elif parts.voice is not None:
        think.append(NONE)
    return [*think, ids.pad, ids.bos]


def language_id(config: Qwen3TTSConfig, language: str, speaker: str | None) -> int | None:
    """The codec id of a language, None for "auto"; a dialect speaker turns Chinese and "auto" into the dialect.

    Raises `InputError` (`input.unknown_language`).
    """
    name = language.lower()
    if name not in config.spoken_languages:
        raise InputError(
            ErrorCode.INPUT_UNKNOWN_LANGUAGE,
            f"Unknown language {language[:80]!r}.",
            f"Choose one of: {', '.join(config.spoken_languages)}.",
        )
    dialect = config.dialects.get(speaker.lower()) if speaker else None
    if dialect is not None and name in ("auto", "chinese"):
        return config.languages[dialect]
    return None if name == "auto" else config.languages[name]


def speaker_id(config: Qwen3TTSConfig, speaker: str) -> int:
    """The codec id of a named voice. Raises `InputError` (`input.unknown_voice`)."""
    try:
        return config.speakers[speaker.lower()]
    except KeyError:
        raise InputError(
            ErrorCode.INPUT_UNKNOWN_VOICE, f"Unknown voice {speaker[:80]!r}.", f"Choose one of: {', '.join(config.speakers)}."
        ) from None


def _clone_in_context(config: Qwen3TTSConfig, columns: _Columns, reference: Reference, parts: PromptParts) -> list[int]:
    """Adds the reference's text and codes with the text to speak; returns the trailing text."""
    ids = config.ids
    text = [*reference.text_ids, *parts.body_ids, ids.tts_eos]
    frames: list[Sequence[int]] = [(ids.bos, *[NONE] * (config.codebooks - 1)), *reference.codes.tolist()]
    if parts.text_first:
        columns.add(text, [ids.pad] * len(text))
        columns.add_frames([ids.tts_pad] * len(frames), frames)
        return []
    padding = [ids.tts_pad] * (len(frames) - len(text))
    columns.add_frames((text + padding)[: len(frames)], frames)
    return text[len(frames) :]
