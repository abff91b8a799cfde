"""The meter `dnsmos`: overall quality from 1 to 5 by DNSMOS P.835 (Reddy et al., 2022), with the model in the package speechmos."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from worker.quality.metrics import Readings, Utterance

SAMPLE_RATE = 16_000
#: What the model looks at once; shorter speech is repeated, longer speech is looked at every second.
_WINDOW_SAMPLES = int(9.01 * SAMPLE_RATE)
#: speechmos.dnsmos.DNSMOS.get_polyfit_val: from the model's overall output to the scale of the listeners.
_OVERALL = np.poly1d([-0.06766283, 1.11546468, 0.04602535])


class DnsMosMeter:
    """Score `dnsmos`; one thread."""

    def __init__(self, threads: int = 1) -> None:
        spec = find_spec("speechmos")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("No module named 'speechmos'", name="speechmos")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        model = Path(spec.origin).parent / "dnsmos_models" / "sig_bak_ovr.onnx"
        self._session: Any = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])

    def measure(self, utterance: Utterance) -> Readings:
        audio = utterance.resampled(SAMPLE_RATE)
        audio = np.tile(audio, -(-_WINDOW_SAMPLES // len(audio))) if len(audio) < _WINDOW_SAMPLES else audio
        starts = range(0, len(audio) - _WINDOW_SAMPLES + 1, SAMPLE_RATE)
        overall = [
            self._session.run(None, {"input_1": audio[None, at : at + _WINDOW_SAMPLES].astype(np.float32)})[0][0][2] for at in starts
        ]
        return {"dnsmos": (float(np.mean(_OVERALL(np.array(overall)))), "")}


open_meter = DnsMosMeter
