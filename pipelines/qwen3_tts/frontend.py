"""The part of a request for Qwen3-TTS that needs neither weights nor a device: checks and token ids. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pipelines.errors import ErrorCode, ModelError
from pipelines.qwen3_tts.config import Qwen3TTSConfig, capabilities
from pipelines.qwen3_tts.prompt import TextTokenizer
from pipelines.qwen3_tts.text_pieces import OpenTokens
from pipelines.request import Generation, PreparedRequest, SynthesisRequest, TextPieces
from pipelines.validation import check_seed, speech_task


class TokenizedTask(msgspec.Struct, frozen=True, array_like=True):
    """One request, its texts as token ids."""

    #: The text that is spoken.
    text: str
    role_ids: list[int]
    body_ids: list[int]
    generation: Generation
    instruct_ids: list[int] = []
    language: str = "auto"
    #: A named voice.
    voice: str | None = None
    #: The encoded file of the voice to clone, and the ids of its text; no ids: clone the voice without it.
    recording: bytes | None = None
    reference_ids: list[int] | None = None
    #: Whether more of the text follows.
    text_open: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TokenizedTask).decode


class Frontend:
    """Tokenizes requests for one checkpoint. Implements `pipelines.request.Frontend`."""

    def __init__(self, folder: Path, config: Qwen3TTSConfig) -> None:
        """Raises `ModelError` (`model.bad_checkpoint`) for a tokenizer that is not the checkpoint's."""
        self._config = config
        self._capabilities = capabilities(config)
        self.tokenizer = TextTokenizer.from_folder(folder)
        if self.tokenizer.vocabulary > config.text_vocab:
            message = f"{folder}: the tokenizer has {self.tokenizer.vocabulary} ids, but text_vocab_size is {config.text_vocab}."
            raise ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, message, "Download the checkpoint again, with its own tokenizer.")

    def prepare(self, request: SynthesisRequest) -> tuple[PreparedRequest, TextPieces | None]:
        """The request as `read` takes it; see `pipelines.request.Frontend`. Raises `InputError` for what this checkpoint cannot do."""
        task, pieces = self.tokenize(request)
        data = _encode(msgspec.structs.replace(task, recording=None))
        return PreparedRequest(request.request_id, request.seed, data, task.recording), pieces

    def tokenize(self, request: SynthesisRequest) -> tuple[TokenizedTask, TextPieces | None]:
        """As `prepare`, with texts as the ids of their tokens; of a text that is open those that are certain."""
        check_seed(request.seed)
        task = speech_task(request.messages, request.generation, self._capabilities)
        role, body = self.tokenizer.target(task.text)
        pieces = None
        if request.text_open:
            pieces = OpenTokens(self.tokenizer, self._capabilities.max_text_characters).add
            text = next(message.content for message in request.messages if (message.role, message.modality) == ("user", "text"))
            body = pieces(str(text), False)
        tokenized = TokenizedTask(
            task.text,
            role,
            body,
            request.generation,
            self.tokenizer.instruction(task.instruct) if task.instruct and self._config.takes_instructions else [],
            task.language or "auto",
            task.voice,
            task.recording if self._config.clones else None,
            self.tokenizer.reference(task.reference_text) if self._config.clones and task.reference_text else None,
            request.text_open,
        )
        return tokenized, pieces


def read(prepared: PreparedRequest) -> TokenizedTask:
    """What `Frontend.prepare` made."""
    return msgspec.structs.replace(_decode(prepared.data), recording=prepared.recording)


def open_frontend(folder: Path) -> Frontend:
    """The frontend of a checkpoint folder. Raises `ModelError` (`model.bad_checkpoint`)."""
    return Frontend(folder, Qwen3TTSConfig.from_folder(folder))
