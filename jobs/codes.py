"""Codes as they are stored: a safetensors file of int16 tensors.

    codes   [frames, codebooks]
    voice   [n, codebooks], if the codec decodes the codes after others (`Speech.voice_codes`)

Its metadata has one key, `codec`: the JSON of `CodecIdentity`. Equal codes give equal bytes.
"""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pipelines.errors import ErrorCode, ModelError, StoreError, missing_library
from pipelines.registry import describe
from pipelines.request import CodecIdentity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

EXTENSION = "safetensors"


class StoredCodes(NamedTuple):
    """The codes of an item, see `Speech`, with their codec."""

    codes: NDArray[np.int16]
    voice_codes: NDArray[np.int16] | None
    codec: CodecIdentity

    def encoded(self) -> bytes:
        """The file."""
        from safetensors.numpy import save

        tensors = {"codes": self.codes}
        if self.voice_codes is not None:
            tensors["voice"] = self.voice_codes
        return save(tensors, {"codec": msgspec.json.encode(self.codec).decode()})


@cache
def codec_of(model: str) -> CodecIdentity:
    """The identity of a model's codec, whose weights are hashed. Raises `ModelError`."""
    if (read := describe(model).codec) is None:
        raise ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, f"The model {model} has no codec.")
    return read()


def read_codes(data: bytes) -> StoredCodes:
    """Reads a file. Raises `store.conflict` if it is damaged, `config.missing_library` without safetensors."""
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load
    except ImportError:
        raise missing_library("Reading codes", "safetensors", "gpu") from None
    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        codec = msgspec.json.decode(header["__metadata__"]["codec"], type=CodecIdentity)
        return StoredCodes(tensors["codes"], tensors.get("voice"), codec)
    except (SafetensorError, ValueError, KeyError, msgspec.MsgspecError) as error:
        raise StoreError(
            ErrorCode.STORE_CONFLICT,
            f"A file of codes cannot be read: {error!r:.200}.",
            "Make it again with: nightjar verify JOB --repair",
        ) from error
