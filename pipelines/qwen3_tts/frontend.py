"""The part of a request for Qwen3-TTS that needs neither weights nor a device: checks and token ids.
Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipelines.errors import ErrorCode, InputError, NightjarError
from pipelines.nn.config_keys import bad_checkpoint
from pipelines.qwen3_tts.config import Qwen3TTSConfig, capabilities
from pipelines.qwen3_tts.prompt import TextTokenizer, TokenizedTask
from pipelines.request import (
    Failed,
    Handle,
    OnEvent,
    PreparedRequest,
    SynthesisRequest,
    TextPieces,
)
from pipelines.validation import bounded_top_k, check_seed, speech_task

if TYPE_CHECKING:
    from pipelines.engine.engine import Engine
    from pipelines.engine.scheduler import GenerationRequest


_encode = msgspec.msgpack.Encoder().encode
#: The task in a `PreparedRequest`'s data.
decode = msgspec.msgpack.Decoder(TokenizedTask).decode


class Frontend:
    """Tokenizes requests for one checkpoint. Implements `pipelines.request.Frontend`."""

    def __init__(self, folder: Path, config: Qwen3TTSConfig) -> None:
        """Raises `ModelError` (`model.bad_checkpoint`) for a tokenizer that is not the checkpoint's."""
        self._config = config
        self._capabilities = capabilities(config)
        self.tokenizer = TextTokenizer.from_folder(folder)
        if self.tokenizer.vocabulary > config.text_vocab:
            message = f"{folder}: the tokenizer has {self.tokenizer.vocabulary} ids, but text_vocab_size is {config.text_vocab}."
            raise bad_checkpoint(message, "Download the checkpoint again, with its own tokenizer.")

    def prepare(self, request: SynthesisRequest) -> tuple[PreparedRequest, TextPieces | None]:
        """The request as `decode` takes it; see `pipelines.request.Frontend`. Raises `InputError` for what
        this checkpoint cannot do.

        Of a text that is open it has the ids that are certain.
        """
        check_seed(request.seed)
        config, tokenizer, generation = self._config, self.tokenizer, request.generation
        task = speech_task(request.messages, generation, self._capabilities)
        if generation.top_k is not None:  # a message holds no larger one
            generation = msgspec.structs.replace(generation, top_k=bounded_top_k(generation.top_k))
        recording = task.recording if config.clones else None
        role, body = tokenizer.target(task.text)
        pieces = None
        if request.text_open:
            pieces = OpenTokens(tokenizer, self._capabilities.max_text_characters).add
            text = next(
                message.content
                for message in request.messages
                if (message.role, message.modality) == ("user", "text")
            )
            body = pieces(str(text), False)
        tokenized = TokenizedTask(
            role,
            body,
            task.text,
            generation,
            tokenizer.instruction(task.instruct) if task.instruct and config.takes_instructions else [],
            task.language or "auto",
            task.voice,
            reference_ids=tokenizer.reference(task.reference_text)
            if config.clones and task.reference_text
            else None,
            text_open=request.text_open,
        )
        return PreparedRequest(request.request_id, request.seed, _encode(tokenized), recording), pieces


def open_frontend(folder: Path) -> Frontend:
    """The frontend of a checkpoint folder. Raises `ModelError` (`model.bad_checkpoint`)."""
    return Frontend(folder, Qwen3TTSConfig.from_folder(folder))


class OpenTokens:
    """The text of one utterance. `add` is a `pipelines.request.TextPieces`: the ids that it gives, joined,
    are those of the joined text."""

    def __init__(self, tokenizer: TextTokenizer, max_characters: int) -> None:
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        self._text = ""
        #: Ids that were given, and the characters that they are made of.
        self._given = 0
        self._characters = 0

    def add(self, text: str, final: bool = False) -> list[int]:
        """The ids that are certain with this text and were not given before; `final`: all of the rest.

        Raises `InputError` for a text that is too long, and for one that is no Unicode.
        """
        joined = (self._text + text).lstrip()
        if len(joined) > self._max_characters:
            message = (
                f"The text has {len(joined)} characters; this model takes at most {self._max_characters}."
            )
            raise InputError(ErrorCode.INPUT_TOO_LONG, message, "Begin another utterance.")
        self._text = joined
        whole = joined.rstrip() if final else joined
        end = len(whole) if final else self._tokenizer.certain(whole)
        if end <= self._characters and not final:
            return []
        ids = self._tokenizer.target(whole[:end])[1]
        fresh, self._given, self._characters = ids[self._given :], len(ids), end
        return fresh


#: Gives a request with these ids of its text to the engine; says whether they are all of it. Raises
#: `NightjarError`.
Begin = Callable[[list[int], bool], "tuple[GenerationRequest, Handle]"]


class OpenText:
    """The `pipelines.request.Handle` of a text that comes in pieces.

    The engine hears of the request once the ids are there that stand in its prompt.
    """

    def __init__(
        self,
        engine: Engine,
        begin: Begin,
        first: int,
        end_id: int,
        on_event: OnEvent,
        pieces: TextPieces | None = None,
    ) -> None:
        """`first`: how many ids that is; `end_id`: the one that follows the text; `pieces`: makes ids of
        text, None: ids come."""
        self._engine, self._begin, self._on_event, self._pieces = engine, begin, on_event, pieces
        self._first, self._end_id = first, end_id
        self._lock = threading.RLock()
        self._ids: list[int] = []
        self._begun: tuple[GenerationRequest, Handle] | None = None
        #: Whether nothing more is to come: the text has ended, or the stream.
        self._complete = False

    def append(self, text: str | list[int], final: bool) -> None:
        error: NightjarError | None = None
        with self._lock:
            if self._complete:
                return
            if isinstance(text, list):
                ids = text
            else:
                assert self._pieces is not None, "the text of a prepared request comes as ids"
                ids = self._pieces(text, final)
            self._complete = final
            if self._begun is not None:
                if ids or final:
                    self._engine.append(self._begun[0], [*ids, self._end_id] if final else ids, final)
                return
            self._ids += ids
            try:
                if final and not self._ids:
                    raise InputError(
                        ErrorCode.INPUT_EMPTY_TEXT, "There is no text to speak.", "Send some text."
                    )
                if final or len(self._ids) >= self._first:
                    self._begun = self._begin(self._ids, final)
            except NightjarError as refused:
                self._complete, error = True, refused
        if error is not None:
            self._on_event(Failed(error))

    def cancel(self) -> None:
        with self._lock:
            self._complete = True
            begun = self._begun
        if begun is not None:
            begun[1].cancel()
