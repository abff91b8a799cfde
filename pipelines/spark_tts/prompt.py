"""Prompts of the speech LM (Spark-TTS, `process_prompt` and `process_prompt_control`), which have no chat
template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from pipelines.nn.config_keys import bad_checkpoint, read_tokenizer
from pipelines.spark_tts.config import GENDERS, LEVELS
from pipelines.validation import check_unicode, control_token

CONTROLS = (
    "task_tts",
    "task_controllable_tts",
    "start_content",
    "end_content",
    "start_style_label",
    "end_style_label",
    "start_global_token",
    "end_global_token",
    "start_semantic_token",
    "end_semantic_token",
)
#: Labels of created voices.
LABELS = (
    *(f"gender_{number}" for number in range(len(GENDERS))),
    *(f"{what}_label_{number}" for what in ("pitch", "speed") for number in range(len(LEVELS))),
)


class SparkCodes(NamedTuple):
    """The tokens of BiCodec in a sequence of ids, in order."""

    semantic: tuple[int, ...]
    voice: tuple[int, ...]


class Vocabulary:
    """Converts text to ids, and ids to tokens of BiCodec."""

    def __init__(self, tokenizer: Tokenizer, semantic_codes: int, global_codes: int, file: Path) -> None:
        self._tokenizer = tokenizer
        self._file = file
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self.semantic = self._run("bicodec_semantic", semantic_codes)
        self.voice = self._run("bicodec_global", global_codes)
        #: The ids of control tokens, by name.
        self.controls = {name: self.id(name) for name in (*CONTROLS, *LABELS)}

    @classmethod
    def from_folder(cls, folder: Path, semantic_codes: int, global_codes: int) -> Vocabulary:
        """Reads `tokenizer.json`. Raises `ModelError` (`model.bad_checkpoint`) that names the file or a
        missing token."""
        path = folder / "tokenizer.json"
        return cls(read_tokenizer(path), semantic_codes, global_codes, path)

    def id(self, name: str) -> int:
        """The id of the token `<|name|>`. Raises `ModelError` (`model.bad_checkpoint`)."""
        token = self._tokenizer.token_to_id(f"<|{name}|>")
        if token is None:
            raise bad_checkpoint(f"{self._file} has no token <|{name}|>.")
        return token

    @property
    def non_text(self) -> frozenset[int]:
        """The ids of all tokens that are not text: tokens of BiCodec, labels, values and control tokens."""
        return self._added.union(self.semantic, self.voice, self.controls.values())

    def encode(self, text: str) -> list[int]:
        """The ids of a string; control tokens are written as `<|name|>` in it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def spoken(self, text: str) -> list[int]:
        """The ids of `<|start_content|>text<|end_content|>`.

        Raises `InputError` (`input.unpronounceable`) for a text that contains a control token or is not Unicode.
        """
        check_unicode(text)
        ids = self.encode(f"<|start_content|>{text}<|end_content|>")
        for token in ids[1:-1]:
            if token in self._added:
                raise control_token(str(self._tokenizer.id_to_token(token)))
        return ids

    def parse(self, ids: Iterable[int]) -> SparkCodes:
        """The tokens of BiCodec among these ids, at any position, like the published parser."""
        known = list(ids)
        return SparkCodes(
            tuple(token - self.semantic.start for token in known if token in self.semantic),
            tuple(token - self.voice.start for token in known if token in self.voice),
        )

    def _run(self, name: str, count: int) -> range:
        """The ids of `<|name_0|>`, `<|name_1|>` ..., which must be consecutive."""
        ids = [self.id(f"{name}_{code}") for code in range(count)]
        run = range(ids[0], ids[0] + count)
        if ids != list(run):
            raise bad_checkpoint(
                f"{self._file}: the ids of <|{name}_0|> to <|{name}_{count - 1}|> do not follow one another."
            )
        return run


def clone_prompt(
    vocabulary: Vocabulary,
    text: str,
    voice: Sequence[int],
    reference_text: str | None = None,
    semantic: Sequence[int] = (),
) -> list[int]:
    """The prompt for `text` in the voice of these global tokens.

    If the text of the reference is given, the LM continues the reference's semantic tokens. The two texts are
    joined before they are tokenized, as in the published code. Raises `InputError` (`input.unpronounceable`).
    """
    ids = [
        vocabulary.controls["task_tts"],
        *vocabulary.spoken((reference_text or "") + text),
        vocabulary.controls["start_global_token"],
        *(vocabulary.voice.start + code for code in voice),
        vocabulary.controls["end_global_token"],
    ]
    if reference_text:
        ids.append(vocabulary.controls["start_semantic_token"])
        ids += [vocabulary.semantic.start + code for code in semantic]
    return ids


def creation_prompt(vocabulary: Vocabulary, text: str, voice: str) -> list[int]:
    """The prompt for `text` in a created voice such as `female/high/moderate` (gender, pitch, speed).

    Raises `InputError` (`input.unpronounceable`).
    """
    gender, pitch, speed = voice.split("/")
    return [
        vocabulary.controls["task_controllable_tts"],
        *vocabulary.spoken(text),
        vocabulary.controls["start_style_label"],
        vocabulary.controls[f"gender_{GENDERS.index(gender)}"],
        vocabulary.controls[f"pitch_label_{LEVELS.index(pitch)}"],
        vocabulary.controls[f"speed_label_{LEVELS.index(speed)}"],
        vocabulary.controls["end_style_label"],
    ]
