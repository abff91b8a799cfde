"""Turns a request into the prompt of Qwen3-TTS: checks, text ids in the chat templates, codec ids, and the
position of the voice vector. Needs neither weights nor a device, and imports no torch."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from pipelines.errors import input_too_long
from pipelines.nn.config_keys import bad_checkpoint, read_tokenizer, revision
from pipelines.qwen3_tts.config import Qwen3TTSConfig, capabilities
from pipelines.request import Generation, IntArray, PreparedRequest, SynthesisRequest, TextPieces
from pipelines.validation import MAX_TOP_K, check_unicode, speech_task

#: Marks positions without an id.
NONE = -1


@dataclass(frozen=True, slots=True)
class Prompt:
    """The talker's input of one request, by positions."""

    #: int64 [length]: text ids; NONE at positions without text.
    text: IntArray
    #: int64 [length, codebooks]: codec ids that are embedded and summed; NONE if there is none.
    codes: IntArray
    #: int64 [frames]: the text id that is added to the input after each frame; after later frames it is
    #: tts_pad.
    trailing: IntArray
    #: The position of the voice vector, and the vector, float32 [hidden].
    voice: tuple[int, NDArray[np.float32]] | None = None

    def __len__(self) -> int:
        return len(self.text)


class TokenizedTask(msgspec.Struct, frozen=True, array_like=True):
    """A request whose texts are token ids."""

    role_ids: list[int]
    body_ids: list[int]
    #: The text that is spoken.
    text: str = ""
    generation: Generation = Generation()
    instruct_ids: list[int] = []
    language: str = "auto"
    #: A named voice.
    speaker: str | None = None
    #: Ids of the cloned recording's text; None: the voice is cloned without it.
    reference_ids: list[int] | None = None
    #: Whether more of the text follows: the prompt then has at least the first `streamed_ids` ids, and no end
    #: of the text. Not with `text_first`.
    text_open: bool = False

    def streamed_ids(self, codes: IntArray | None) -> int:
        """The minimum number of ids of an open text in its prompt. One text token is read in each frame, so
        the ids of the reference's text and of the open text together must be at least one more than the
        frames of `codes`."""
        return 1 if codes is None else max(len(codes) + 1 - len(self.reference_ids or ()), 1)


def build_prompt(
    config: Qwen3TTSConfig,
    task: TokenizedTask,
    voice: NDArray[np.float32] | None = None,
    codes: IntArray | None = None,
    text_first: bool = True,
) -> Prompt:
    """The prompt and the trailing text of one request, in the layout of the published wrapper.

    voice: a vector, float32 [hidden], if no speaker is named; codes: int64 [frames, codebooks] of the
    recording, to clone it in context. `text_first`: the whole text precedes the first frame
    (`non_streaming_mode` of the published API); otherwise one text token is read in each frame.
    """
    ids = config.ids
    pad = config.text_ids.tts_pad_token_id
    frames = 0 if codes is None else len(codes)
    head = [*task.instruct_ids, *task.role_ids]
    # Codebook-0 ids of language, voice (NONE for a vector), pad and bos. A speaker of a dialect changes Chinese
    # and "auto" to the dialect.
    language = task.language.lower()
    speaker = (task.speaker or "").lower()
    if language in ("auto", "chinese"):
        language = config.dialects.get(speaker, language)
    think = [ids.codec_nothink_id, ids.codec_think_bos_id, ids.codec_think_eos_id]
    if language != "auto":
        think = [
            ids.codec_think_id,
            ids.codec_think_bos_id,
            config.languages[language],
            ids.codec_think_eos_id,
        ]
    if speaker:
        think.append(config.speakers[speaker])
    elif voice is not None:
        think.append(NONE)
    prefix = [*think, ids.codec_pad_id, ids.codec_bos_id]
    text = [*head, *[pad] * (len(prefix) - 2), config.text_ids.tts_bos_token_id]
    # Ids of codebook 0.
    first = [NONE] * len(head) + prefix[:-1]
    body = [
        *(() if codes is None else task.reference_ids or ()),
        *task.body_ids,
        *(() if task.text_open else (config.text_ids.tts_eos_token_id,)),
    ]
    reference = [ids.codec_bos_id] + [NONE] * frames
    trailing = list[int]()
    if text_first:
        text += body + [pad] * len(reference)
        first += [ids.codec_pad_id] * len(body)
    else:
        text += (body + [pad] * (len(reference) - len(body)))[: len(reference)]
        trailing = body[len(reference) :]
    rows = np.full((len(text), config.codebooks), NONE, np.int64)
    rows[:, 0] = first + reference
    if codes is not None:
        rows[len(text) - frames :] = codes
    placed = None if voice is None else (len(head) + len(prefix) - 3, voice)
    return Prompt(np.array(text, np.int64), rows, np.array(trailing, np.int64), placed)


#: Splits a text before BPE, as in Qwen2 (transformers, `Qwen2Tokenizer`).
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: Numbers of template ids: before a text, after a text to speak, and after a reference's text.
ROLE_TOKENS = 3
TARGET_TAIL = 5
REFERENCE_TAIL = 2


class TextTokenizer:
    """Turns texts into the token ids of the prompt's parts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Any = tokenizer
        self._added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        parts = _state(tokenizer.pre_tokenizer).get("pretokenizers", [{}])
        is_nfc = _state(tokenizer.normalizer) == {"type": "NFC"}
        self._splits_at_words = parts[0].get("pattern") == {"Regex": _SPLIT} and is_nfc
        #: One more than the highest id that a text can get.
        self.vocabulary = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @staticmethod
    def from_folder(folder: Path) -> TextTokenizer:
        """Reads `tokenizer.json`, or `vocab.json` with `merges.txt` and the added tokens of
        `tokenizer_config.json`.

        Raises `ModelError` (`model.bad_checkpoint`) naming the file when none can be read.
        """
        return _read(folder, revision(folder, (".json", ".txt")))

    def certain(self, text: str) -> int:
        """The number of characters whose ids no following text can change; 0 if that is not known.

        These characters end before a space, or after a word and before a punctuation mark. The split before
        BPE always ends a part there, and the character that follows does not compose with earlier ones.
        """
        if not self._splits_at_words:
            return 0
        for end in range(len(text) - 1, 0, -1):
            last = text[end - 1]
            following = text[end]
            after_word = unicodedata.category(last)[0] in "LN" and unicodedata.category(following)[0] in "PSZ"
            if not after_word and (following != " " or last.isspace()):
                continue
            # Inside an added token, or inside the beginning of one, a part does not end.
            if not any(
                token.startswith(text[begin : begin + len(token)])
                for token in self._added
                for begin in range(max(end - len(token) + 1, 0), end)
            ):
                # The tokenizer has its own Unicode table, so the split is checked.
                known = self._tokenizer.normalizer.normalize_str(text[: end + 1])
                if self._tokenizer.pre_tokenizer.pre_tokenize_str(known)[-1][1][0] == len(known) - 1:
                    return end
        return 0

    def encode(self, text: str) -> list[int]:
        """The ids of a string with its template. Raises `InputError` (`input.unpronounceable`) for a text that
        is not Unicode."""
        check_unicode(text)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def target(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of the role (3) and of the text to speak.

        The whole template is tokenized and then cut, because a text that starts with a line break may
        merge with the template's.
        """
        ids = self.encode(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n")
        return ids[:ROLE_TOKENS], ids[ROLE_TOKENS:-TARGET_TAIL]

    def reference(self, text: str) -> list[int]:
        """The ids of a reference recording's text."""
        return self.encode(f"<|im_start|>assistant\n{text}<|im_end|>\n")[ROLE_TOKENS:-REFERENCE_TAIL]


def _state(part: Any) -> dict[str, Any]:
    """What a part of a tokenizer does; the whole tokenizer would include its vocabulary."""
    return json.loads(part.__getstate__()) if part else {}


# A tokenizer takes a second, in which no other thread runs: a server keeps it for its next engine.
@lru_cache(1)
def _read(folder: Path, _revision: str) -> TextTokenizer:
    if (path := folder / "tokenizer.json").is_file():
        return TextTokenizer(read_tokenizer(path))
    try:
        return TextTokenizer(_from_vocabulary(folder))
    except Exception as error:
        raise bad_checkpoint(f"{folder / 'vocab.json'} cannot be read as a tokenizer: {error}.") from error


def _from_vocabulary(folder: Path) -> Tokenizer:
    tokenizer: Any = Tokenizer(BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    added = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get(
        "added_tokens_decoder", {}
    )
    # The library assigns ids in order. They must be the ids of the checkpoint.
    for token, entry in sorted((int(token), entry) for token, entry in added.items()):
        add = tokenizer.add_special_tokens if entry.get("special") else tokenizer.add_tokens
        add([AddedToken(**{"normalized": False, **entry})])
        if (given := tokenizer.token_to_id(entry["content"])) != token:
            raise ValueError(f"added token {entry['content']!r} would get the id {given}, not {token}")
    return tokenizer


_encode = msgspec.msgpack.Encoder().encode
#: The task in a `PreparedRequest`'s data.
decode = msgspec.msgpack.Decoder(TokenizedTask).decode


class Frontend:
    """Tokenizes requests for one checkpoint. Implements `pipelines.request.Frontend`."""

    def __init__(self, folder: Path, config: Qwen3TTSConfig) -> None:
        """Raises `ModelError` (`model.bad_checkpoint`) for a tokenizer that does not fit the checkpoint."""
        self._capabilities = capabilities(config)
        self.tokenizer = TextTokenizer.from_folder(folder)
        if self.tokenizer.vocabulary > config.text_vocab:
            raise bad_checkpoint(
                f"{folder}: the tokenizer has {self.tokenizer.vocabulary} ids, but text_vocab_size is {config.text_vocab}.",
                "Download the checkpoint again, with its own tokenizer.",
            )

    def prepare(self, request: SynthesisRequest) -> tuple[PreparedRequest, TextPieces | None]:
        """Prepares a request; see `pipelines.request.Frontend`. Raises `InputError` for a request that this
        checkpoint cannot serve.

        For an open text the request has only the ids that later text cannot change.
        """
        able = self._capabilities
        tokenizer = self.tokenizer
        generation = request.generation
        task = speech_task(request.messages, generation, able, request.seed)
        if generation.top_k is not None:  # a larger value does not fit into a message
            generation = msgspec.structs.replace(generation, top_k=min(generation.top_k, MAX_TOP_K))
        recording = task.recording if able.cloning else None
        role, body = tokenizer.target(task.text)
        pieces = None
        if request.text_open:
            pieces = OpenTokens(tokenizer, able.max_text_characters).add
            text = next(
                message.content
                for message in request.messages
                if (message.role, message.modality) == ("user", "text")
            )
            body = pieces(str(text), False)
        instruct = list[int]()
        if task.instruct and able.instruct:
            instruct = tokenizer.encode(f"<|im_start|>user\n{task.instruct}<|im_end|>\n")
        tokenized = TokenizedTask(
            role,
            body,
            task.text,
            generation,
            instruct,
            task.language or "auto",
            task.voice,
            reference_ids=tokenizer.reference(task.reference_text) if task.reference_text else None,
            text_open=request.text_open,
        )
        prepared = PreparedRequest(
            request.request_id, request.seed, _encode(tokenized), recording, request.output
        )
        return prepared, pieces


def open_frontend(folder: Path) -> Frontend:
    """The frontend of a checkpoint folder. Raises `ModelError` (`model.bad_checkpoint`)."""
    return Frontend(folder, Qwen3TTSConfig.from_folder(folder))


@dataclass(eq=False)
class OpenTokens:
    """Tokenizes an open text piece by piece. `add` is a `pipelines.request.TextPieces`: together, the ids
    that it returns are those of the whole text."""

    _tokenizer: TextTokenizer
    _max_characters: int
    _text: str = ""
    #: Number of ids that were returned, and of the characters that they stand for.
    _given: int = 0
    _characters: int = 0

    def add(self, text: str, final: bool = False) -> list[int]:
        """Adds text and returns the new ids that cannot change; `final`: all remaining ids.

        Raises `InputError` for a text that is too long or not Unicode.
        """
        joined = (self._text + text).lstrip()
        if len(joined) > self._max_characters:
            raise input_too_long(
                f"The text has {len(joined)} characters; this model takes at most {self._max_characters}.",
                "Begin another utterance.",
            )
        self._text = joined
        whole = joined.rstrip() if final else joined
        end = len(whole) if final else self._tokenizer.certain(whole)
        if end <= self._characters and not final:
            return []
        ids = self._tokenizer.target(whole[:end])[1]
        fresh = ids[self._given :]
        self._given = len(ids)
        self._characters = end
        return fresh
