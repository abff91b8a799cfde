"""What no job's speech may be, whatever its quality checks: no samples, no numbers, or silence."""

from __future__ import annotations

import math

from pipelines.errors import ErrorCode, SynthesisError
from pipelines.request import Speech

#: -60 dBFS: below this peak a recording of speech holds none.
SILENT_PEAK = 1e-3


def check_speech(speech: Speech) -> None:
    """Raises `SynthesisError`: `synth.no_audio` for no samples, `synth.nan` for NaN or infinity, `synth.silent` for silence."""
    samples = speech.samples
    if len(samples) == 0:
        raise SynthesisError(ErrorCode.SYNTH_NO_AUDIO, "The engine returned no samples.")
    peak = max(float(samples.max()), -float(samples.min()))
    if not math.isfinite(peak):
        raise SynthesisError(ErrorCode.SYNTH_NAN, "The audio holds values that are not numbers.")
    if peak < SILENT_PEAK:
        raise SynthesisError(ErrorCode.SYNTH_SILENT, f"The audio is silent: its peak is {peak:.2g} of full scale.")
