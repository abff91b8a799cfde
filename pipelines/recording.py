"""What a recording of a voice to clone must be. Imports no model library: submit looks at every recording as the models do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pipelines.errors import ErrorCode, InputError
from pipelines.request import MAX_REFERENCE_SECONDS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LEAST_SECONDS = 0.5
#: Root mean square below which a recording holds no voice (-60 dBFS).
SILENCE = 1e-3
_BEST_LENGTH = "Three to fifteen seconds of clear speech work best."


def check_encoded(recording: bytes) -> None:
    """Raises `InputError` for an encoded audio file that no model can clone a voice from, as `decode_recording` and
    `check_recording` do."""
    check_recording(*decode_recording(recording))


def decode_recording(
    recording: bytes, sample_rate: int | None = None, *, channel: int | None = None, quality: Literal["HQ", "VHQ"] = "HQ"
) -> tuple[NDArray[np.float32], int]:
    """As `pipelines.audio.decode`, with no more decoded than a recording may have: what is longer is `input.reference_length`."""
    from pipelines.audio import decode  # only where there is audio to read

    try:
        return decode(recording, sample_rate, max_seconds=MAX_REFERENCE_SECONDS, channel=channel, quality=quality)
    except InputError as error:
        if error.code is not ErrorCode.INPUT_TOO_LONG:
            raise
        raise InputError(ErrorCode.INPUT_REFERENCE_LENGTH, error.message.replace("audio", "reference audio", 1), _BEST_LENGTH) from error


def check_recording(samples: NDArray[np.float32], sample_rate: int) -> None:
    """Raises `InputError` for a recording [samples] that is too short, too long or silent."""
    import numpy as np  # only where there is audio to read

    seconds = len(samples) / sample_rate
    if not LEAST_SECONDS <= seconds <= MAX_REFERENCE_SECONDS:
        raise InputError(
            ErrorCode.INPUT_REFERENCE_LENGTH,
            f"The reference audio is {seconds:.2f} s long; it must have {LEAST_SECONDS:g} to {MAX_REFERENCE_SECONDS:g} s.",
            _BEST_LENGTH,
        )
    if float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))) < SILENCE:
        raise InputError(ErrorCode.INPUT_REFERENCE_SILENT, "The reference audio is silent.", "Give a recording with a clear voice.")
