"""Meters: the built-in ones, those of other packages, and the process they run in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pipelines.audio import encode
from pipelines.errors import ErrorCode, ModelError
from pipelines.request import Message, Speech, SynthesisRequest
from worker.quality.meters import ENTRY_POINT_GROUP, Sample, open_meter
from worker.quality.process import MeterError, MeterProcess

RATE = 16_000


class TestMeters:
    def test_a_name_nobody_knows(self) -> None:
        with pytest.raises(ModelError) as caught:
            open_meter("no-such-meter", {})
        assert caught.value.code is ErrorCode.MODEL_UNKNOWN
        assert "asr" in str(caught.value)

    def test_a_library_that_is_not_there_is_named_with_its_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "faster_whisper", None)
        with pytest.raises(ModelError) as caught:
            open_meter("asr", {"model": "/nowhere"})
        assert caught.value.code is ErrorCode.MODEL_MISSING_EXTRA
        assert "nightjar-speech[qa]" in str(caught.value)

    def test_options_and_weights_it_cannot_use(self) -> None:
        for options in ({"modle": "base"}, {"model": "/nowhere/at/all"}):
            with pytest.raises(ModelError) as caught:
                open_meter("asr", options)
            assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT

    def test_silero_tells_speech_from_silence_in_a_process_of_its_own(self) -> None:
        process = MeterProcess(60)
        silence = np.zeros(2 * RATE, np.float32)
        readings = process.measure({"silero": {}}, Sample(silence, RATE, ""))
        assert readings["silence"] == (1.0, "silero")
        with pytest.raises(ModelError) as caught:
            process.measure({"no-such-meter": {}}, Sample(silence, RATE, ""))
        assert caught.value.code is ErrorCode.MODEL_UNKNOWN
        assert process.measure({"silero": {}}, Sample(silence, RATE, ""))["silence"][0] == 1.0
        process.close()
        process.close()

    def test_a_process_that_dies_or_hangs_costs_its_draw_and_no_other(self) -> None:
        process = MeterProcess(60)
        sample = Sample(np.zeros(RATE, np.float32), RATE, "")
        process.measure({}, sample)
        child = process._child  # pyright: ignore[reportPrivateUsage]
        assert child is not None
        child.kill()
        child.wait()
        assert process.measure({}, sample) == {}
        process._timeout_seconds = 0.0  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(MeterError) as caught:
            process.measure({}, sample)
        assert caught.value.code is ErrorCode.QA_METER
        process._timeout_seconds = 60  # pyright: ignore[reportPrivateUsage]
        assert process.measure({}, sample) == {}
        process.close()


class TestBuiltInMeters:
    """Meters whose libraries are here; the weights come with them."""

    @pytest.fixture(scope="class")
    def speech(self) -> Iterator[Speech]:
        from pipelines.hibari.pipeline import HibariPipeline

        voice = HibariPipeline(threads=1)
        message = Message("user", "text", "The captain read a long letter beside the window.")
        yield voice.submit(SynthesisRequest("a", (message,), seed=1)).result()
        voice.close()

    @pytest.mark.parametrize(
        ("name", "library", "score", "good", "bad"),
        [
            ("distillmos", "distillmos", "distillmos", 4.0, 2.5),
            ("dnsmos", "speechmos", "dnsmos", 3.0, 2.0),
            ("speaker", "resemblyzer", "similarity", 0.95, 0.8),
        ],
    )
    def test_good_speech_is_told_from_noise(self, speech: Speech, name: str, library: str, score: str, good: float, bad: float) -> None:
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
        meter = open_meter(name, {})
        reference = encode(speech.samples, speech.sample_rate, "wav")
        noise = np.random.default_rng(0).normal(0, 0.1, len(speech.samples)).astype(np.float32)

        def value(samples: NDArray[np.float32]) -> float:
            return meter.measure(Sample(samples, speech.sample_rate, speech.text, reference=reference))[score][0]

        heard, noisy = value(speech.samples), value(noise)
        assert heard > good
        assert noisy < bad
        assert value(speech.samples) == heard
        assert "torchaudio" not in sys.modules

    def test_a_package_adds_a_meter_by_an_entry_point(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        info = tmp_path / "peak_meter-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: peak-meter\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\npeak = peak_meter:PeakMeter\n")
        (tmp_path / "peak_meter.py").write_text(
            "class PeakMeter:\n"
            "    def __init__(self, times=1):\n"
            "        self.times = times\n"
            "    def measure(self, sample):\n"
            "        print('meters may print')\n"
            "        if sample.text == 'fail':\n"
            "            raise ValueError('no such text')\n"
            "        return {'peak': (float(abs(sample.samples).max()) * self.times, sample.text)}\n"
        )
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
        process = MeterProcess(60)
        sample = Sample(np.array([0.25, -0.5], np.float32), RATE, "hello")
        assert process.measure({"peak": {"times": 3}}, sample) == {"peak": (1.5, "hello")}
        with pytest.raises(MeterError) as caught:
            process.measure({"peak": {}}, replace(sample, text="fail"))
        assert "no such text" in str(caught.value)
        process.close()
