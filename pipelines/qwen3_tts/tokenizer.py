"""The Qwen2 byte-level BPE of a checkpoint folder, and the chat templates that wrap what is spoken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from pipelines.errors import ErrorCode, InputError, ModelError

#: The split of Qwen2 before BPE (transformers, `Qwen2Tokenizer`).
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ROLE_TOKENS = 3
_TARGET_TAIL = 5
_REFERENCE_TAIL = 2


class TextTokenizer:
    """Turns texts into the token ids of the prompt's parts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

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

    def encode(self, text: str) -> list[int]:
        """The ids of a string that is already wrapped.

        Raises `InputError` (`input.unpronounceable`) for a text that is no Unicode: half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                ErrorCode.INPUT_UNPRONOUNCEABLE, "The text holds half of a surrogate pair, which is no character.", "Correct its encoding."
            ) from error
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
