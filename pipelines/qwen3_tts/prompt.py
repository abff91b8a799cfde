"""Prompts of Qwen3-TTS as integers: the text's ids under its chat templates, codec ids, and the voice vector of each position."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from pipelines.errors import ErrorCode, InputError, ModelError
from pipelines.qwen3_tts.config import Qwen3TTSConfig
from pipelines.validation import no_character

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
    #: Whether more of the text follows: the prompt has its first `streamed_ids` or more, and no end. Not with `text_first`.
    text_open: bool = False

    @property
    def streamed_ids(self) -> int:
        """Ids of the text that stand in the prompt where one text token is read a frame: no prompt can be made of fewer."""
        return 1 if self.reference is None else max(len(self.reference.codes) + 1 - len(self.reference.text_ids), 1)


@dataclass(slots=True)
class _Columns:
    codebooks: int
    text: list[int] = field(default_factory=list)
    #: Runs of int64 [frames, codebooks].
    codes: list[NDArray[np.int64]] = field(default_factory=list)

    def add(self, text: Sequence[int], codec: Sequence[int]) -> None:
        """Aligned runs of text ids and codebook-0 ids."""
        frames = np.full((len(codec), self.codebooks), NONE, np.int64)
        frames[:, 0] = codec
        self.add_frames(text, frames)

    def add_frames(self, text: Sequence[int], frames: NDArray[np.int64]) -> None:
        self.text.extend(text)
        self.codes.append(frames)


def build_prompt(config: Qwen3TTSConfig, parts: PromptParts) -> Prompt:
    """The prompt and the trailing text of one request, in the layout that the published wrapper makes.

    Raises `InputError` for a language or a speaker that the checkpoint does not have.
    """
    ids, text_ids = config.ids, config.text_ids
    prefix = codec_prefix(config, parts)
    columns = _Columns(config.codebooks)
    head = [*(parts.instruct_ids if config.takes_instructions else ()), *parts.role_ids]
    columns.add(head, [NONE] * len(head))
    columns.add([text_ids.tts_pad] * (len(prefix) - 2) + [text_ids.tts_bos], prefix[:-1])
    voice_at = len(head) + len(prefix) - 3 if parts.voice is not None else None
    if parts.reference is not None:
        trailing = _clone_in_context(config, columns, parts.reference, parts)
    elif parts.text_first:
        body = [*parts.body_ids, text_ids.tts_eos]
        columns.add(body, [ids.pad] * len(body))
        columns.add([text_ids.tts_pad], [ids.bos])
        trailing = []
    else:
        columns.add(parts.body_ids[:1], [ids.bos])
        trailing = [*parts.body_ids[1:], *_end_of_text(config, parts)]
    return Prompt(
        text=np.array(columns.text, np.int64),
        codes=np.concatenate(columns.codes),
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
    ids, text_ids = config.ids, config.text_ids
    text = [*reference.text_ids, *parts.body_ids, *_end_of_text(config, parts)]
    frames = np.full((len(reference.codes) + 1, config.codebooks), NONE, np.int64)
    frames[0, 0] = ids.bos
    frames[1:] = reference.codes
    if parts.text_first:
        columns.add(text, [ids.pad] * len(text))
        columns.add_frames([text_ids.tts_pad] * len(frames), frames)
        return []
    padding = [text_ids.tts_pad] * (len(frames) - len(text))
    columns.add_frames((text + padding)[: len(frames)], frames)
    return text[len(frames) :]


def _end_of_text(config: Qwen3TTSConfig, parts: PromptParts) -> list[int]:
    return [] if parts.text_open else [config.text_ids.tts_eos]


#: The split of Qwen2 before BPE (transformers, `Qwen2Tokenizer`).
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ROLE_TOKENS = 3
_TARGET_TAIL = 5
_REFERENCE_TAIL = 2


class TextTokenizer:
    """Turns texts into the token ids of the prompt's parts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Any = tokenizer
        made = json.loads(tokenizer.to_str())
        self._added = [token["content"] for token in made["added_tokens"]]
        parts = (made["pre_tokenizer"] or {}).get("pretokenizers", [{}])
        self._splits_at_words = parts[0].get("pattern") == {"Regex": _SPLIT} and made["normalizer"] == {"type": "NFC"}

    @classmethod
    def from_folder(cls, folder: str | Path) -> TextTokenizer:
        """Reads `tokenizer.json`, or `vocab.json` with `merges.txt` and the added tokens of `tokenizer_config.json`.

        Raises `ModelError` (`model.bad_checkpoint`) naming the file when none can be read.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        try:
            if path.is_file():
                return cls(Tokenizer.from_file(str(path)))
            path = folder / "vocab.json"
            return cls(_from_vocabulary(folder))
        except Exception as error:
            raise ModelError(
                ErrorCode.MODEL_BAD_CHECKPOINT, f"{path} cannot be read as a tokenizer: {error}.", "Download the checkpoint again."
            ) from error

    @property
    def vocabulary(self) -> int:
        """One more than the highest id that a text can get."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def certain(self, text: str) -> int:
        """How many characters of a text have ids that no text behind them can change; 0 where that is not known.

        They end before a space, or before a mark behind a word: there the split before BPE ends a part, whatever follows, and the part
        behind it begins with a character that composes with nothing before it.
        """
        if not self._splits_at_words:
            return 0
        for end in range(len(text) - 1, 0, -1):
            last, following = text[end - 1], text[end]
            behind_word = unicodedata.category(last)[0] in "LN" and unicodedata.category(following)[0] in "PSZ"
            if (behind_word or (following == " " and not last.isspace())) and not self._in_added_token(text, end):
                # The split knows letters by a table of its own.
                known = self._tokenizer.normalizer.normalize_str(text[: end + 1])
                if self._tokenizer.pre_tokenizer.pre_tokenize_str(known)[-1][1][0] == len(known) - 1:
                    return end
        return 0

    def _in_added_token(self, text: str, at: int) -> bool:
        """Whether this place lies within an added token, or within what may become one."""
        for token in self._added:
            for begin in range(max(at - len(token) + 1, 0), at):
                if token.startswith(text[begin : begin + len(token)]):
                    return True
        return False

    def encode(self, text: str) -> list[int]:
        """The ids of a string that is already wrapped.

        Raises `InputError` (`input.unpronounceable`) for a text that is no Unicode: half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise no_character() from error
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def target(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of the role (3) and of the text to speak.

        The whole template is tokenized and then cut, because a text that starts with a line break may merge with the template's.
        """
        ids = self.encode(target_template(text))
        return split_target(ids)

    def reference(self, text: str) -> list[int]:
        """The ids of a reference recording's text."""
        return split_reference(self.encode(reference_template(text)))

    def instruction(self, text: str) -> list[int]:
        """The ids of an instruction with its role, all of which go into the prompt."""
        return self.encode(instruction_template(text))


def target_template(text: str) -> str:
    return f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n"


def reference_template(text: str) -> str:
    return f"<|im_start|>assistant\n{text}<|im_end|>\n"


def instruction_template(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def split_target(ids: list[int]) -> tuple[list[int], list[int]]:
    """(role ids, body ids) of a tokenized target template."""
    return ids[:_ROLE_TOKENS], ids[_ROLE_TOKENS:-_TARGET_TAIL]


def split_reference(ids: list[int]) -> list[int]:
    """Body ids of a tokenized reference template."""
    return ids[_ROLE_TOKENS:-_REFERENCE_TAIL]


def _from_vocabulary(folder: Path) -> Tokenizer:
    vocabulary: dict[str, int] = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [(left, right) for left, right in (line.split(" ") for line in lines if line and not line.startswith("#version"))]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, fuse_unk=False, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    _add_tokens(tokenizer, _added_tokens(folder / "tokenizer_config.json"))
    return tokenizer


def _added_tokens(path: Path) -> dict[int, dict[str, Any]]:
    table = json.loads(path.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
    return {int(token): entry for token, entry in table.items()}


def _add_tokens(tokenizer: Tokenizer, entries: dict[int, dict[str, Any]]) -> None:
    """Adds the tokens in the order of their ids, which must then be the ids that the library gives out."""
    for token in sorted(entries):
        entry = entries[token]
        added = AddedToken(
            entry["content"],
            single_word=entry.get("single_word", False),
            lstrip=entry.get("lstrip", False),
            rstrip=entry.get("rstrip", False),
            normalized=entry.get("normalized", False),
            special=entry.get("special", False),
        )
        add = tokenizer.add_special_tokens if entry.get("special", False) else tokenizer.add_tokens
        add([added])
        if (given := tokenizer.token_to_id(entry["content"])) != token:
            raise ValueError(f"added token {entry['content']!r} would get the id {given}, not {token}")
