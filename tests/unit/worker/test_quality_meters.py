"""Meters: the built-in ones, those of other packages, and the process they run in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from jobs.checks import (
    ENTRY_POINT_GROUP,
    METERS,
    missing_libraries,
    missing_libraries_error,
    missing_weights,
    quality_of,
)
from pipelines.audio import encode
from pipelines.errors import ConfigError, ErrorCode, ModelError, NightjarError
from pipelines.request import Message, Speech, SynthesisRequest, submit
from tests.support.golden_arrays import read_arrays
from tests.support.golden_checkpoint import whole
from tests.support.packages import write_package
from tests.support.quality_kit import speechlike
from tests.support.services import children
from worker.quality.meters import (
    SAMPLE_RATE,
    AsrMeter,
    Reading,
    Readings,
    Utterance,
    check_weights,
    open_meter,
)
from worker.quality.process import MeterError, MeterHangError, MeterPool, MeterProcess, MeterTask

RATE = 16_000


def add_meter(folder: Path, code: str) -> str:
    """Writes what pip would write of a package with the meter `peak`, whose class is `Meter`; the search
    path that has it."""
    write_package(folder, "peak-meter", ENTRY_POINT_GROUP, {"peak": "peak_meter:Meter"})
    (folder / "peak_meter.py").write_text(code)
    return f"{folder}:{Path(__file__).parents[3]}"


class TestMeters:
    def test_a_name_nobody_knows(self) -> None:
        with pytest.raises(ModelError) as caught:
            open_meter("no-such-meter", {})
        assert caught.value.code is ErrorCode.MODEL_UNKNOWN
        assert "asr" in str(caught.value)

    def test_a_library_that_is_not_there_is_named_with_its_extra(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "faster_whisper", None)
        with pytest.raises(ModelError) as caught:
            open_meter("asr", {"model": "/nowhere"})
        assert caught.value.code is ErrorCode.CONFIG_MISSING_LIBRARY
        assert "extra `qa` (docs/install.md)" in str(caught.value)

    def test_every_built_in_meter_is_known_by_what_it_imports(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, card in METERS.items():
            for library in card.libraries:
                with monkeypatch.context() as patched:
                    patched.setitem(sys.modules, library, None)
                    assert library in missing_libraries(name)
                    lack = missing_libraries_error([name])
                if name == "silero":
                    assert lack is None
                    continue
                assert lack is not None
                assert lack.code is ErrorCode.CONFIG_MISSING_LIBRARY
                assert library in lack.message
                assert card.install in lack.advice
        assert missing_libraries_error(["a-meter-of-another-package"]) is None

    def test_each_command_of_several_missing_meters_names_what_it_installs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for card in METERS.values():
            for library in card.libraries:
                monkeypatch.setitem(sys.modules, library, None)
        lack = missing_libraries_error(METERS)
        assert lack is not None
        assert (
            "Install Nightjar with its extra `qa` (docs/install.md); Nightjar with its extra `gpu` (docs/install.md); "
            "DistillMOS with: pip install " in lack.advice
        )
        assert not any(card.install.startswith("it ") for card in METERS.values())

    def test_weights_are_looked_for_without_being_opened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        check_weights(
            {"asr": {"model": str(tmp_path)}, "silero": {}, "a-meter-of-another-package": {}}, fetch=False
        )
        # The hub's library reads where its cache is when it is imported.
        code = (
            "from pipelines.errors import ModelError\n"
            "from worker.quality.meters import check_weights\n"
            "try:\n    check_weights({'asr': {'model': 'owner/model'}}, fetch=False)\n"
            "except ModelError as error:\n    print(error.code.value)"
        )
        environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
        asked = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[3],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert asked.stdout.strip() == ErrorCode.MODEL_UNREACHABLE.value
        monkeypatch.setitem(sys.modules, "faster_whisper.utils", None)
        with pytest.raises(ModelError, match="faster_whisper") as broken:
            check_weights({"asr": {}}, fetch=False)
        assert broken.value.code is ErrorCode.CONFIG_MISSING_LIBRARY

    @pytest.mark.parametrize("meter", ["align", "asr"])
    @pytest.mark.parametrize("model", [5, "~nosuchuser"])
    def test_a_model_that_is_no_path_is_refused(self, meter: str, model: str | int) -> None:
        with pytest.raises(ModelError) as caught:
            check_weights({meter: {"model": model}}, fetch=False)
        assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT

    @pytest.mark.parametrize("meter", ["align", "asr"])
    def test_a_model_whose_folder_is_missing_is_refused_without_the_hub(
        self, tmp_path: Path, meter: str
    ) -> None:
        missing = {meter: {"model": str(tmp_path / "missing")}}
        refusals: list[Callable[[], object]] = [
            lambda: check_weights(missing, fetch=True),
            lambda: open_meter(meter, missing[meter]),
        ]
        for refuse in refusals:
            with pytest.raises(ModelError, match="there is no") as caught:
                refuse()
            assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT
            assert f"meters.{meter}.model" in caught.value.advice
        error = missing_weights(missing, fetch=False)
        assert error is not None
        assert error.code is ErrorCode.MODEL_BAD_CHECKPOINT

    def test_weights_that_cannot_be_fetched_now_are_an_outage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import faster_whisper.utils
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        def code_of(answer: Exception | Path) -> ErrorCode:
            def download(_: str, *, local_files_only: bool) -> str:
                assert not local_files_only
                if isinstance(answer, Exception):
                    raise answer
                return str(answer)

            monkeypatch.setattr(faster_whisper.utils, "download_model", download)
            with pytest.raises(ModelError) as caught:
                open_meter("asr", {"model": "owner/model"})
            return caught.value.code

        class TransportError(Exception):
            """What an HTTP library raises."""

        for outage in (LocalEntryNotFoundError("not cached"), ConnectionError(), TransportError(), tmp_path):
            assert code_of(outage) is ErrorCode.MODEL_UNREACHABLE
        for fault in (ValueError("Invalid model size"), HFValidationError("Repo id")):
            assert code_of(fault) is ErrorCode.MODEL_BAD_CHECKPOINT
        (tmp_path / "model.bin").write_bytes(b"no weights")
        assert code_of(tmp_path) is ErrorCode.MODEL_BAD_CHECKPOINT

    def test_a_text_of_an_unnamed_language_is_heard_in_the_one_that_is_spoken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str | None] = []

        class Whisper:
            supported_languages = ("de", "en", "zh")

            def __init__(self, *_: object, **__: object) -> None:
                """Opens nothing."""

            def transcribe(
                self, _: NDArray[np.float32], language: str | None, **__: object
            ) -> tuple[list[SimpleNamespace], SimpleNamespace]:
                asked.append(language)
                heard = "今天天汽很好。" if language in (None, "zh") else "Das Wetter ist heute schoen."
                return [SimpleNamespace(text=heard)], SimpleNamespace(language=language or "zh")

        monkeypatch.setattr("faster_whisper.WhisperModel", Whisper)
        sample = Utterance(np.zeros(RATE, np.float32), RATE, "今天天气很好。")
        meter, german = AsrMeter(str(tmp_path)), AsrMeter(str(tmp_path), language="German")
        assert meter.measure(sample) == {"cer": Reading(1 / 6, "今天天汽很好。", True)}
        assert set(meter.measure(replace(sample, language="zh-CN"))) == {"cer"}
        assert set(meter.measure(replace(sample, language="auto"))) == {"cer"}
        assert set(german.measure(replace(sample, text="Das Wetter ist heute schön."))) == {"cer", "wer"}
        meter.measure(replace(sample, language="Klingon"))
        assert asked == [None, "zh", None, "de", None]

    def test_options_and_weights_it_cannot_use(self) -> None:
        for options in ({"modle": "base"}, {"model": "/nowhere/at/all"}):
            with pytest.raises(ModelError) as caught:
                open_meter("asr", options)
            assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT

    def test_silero_tells_speech_from_silence_in_a_process_of_its_own(self) -> None:
        process = MeterProcess(240)
        silence = np.zeros(2 * RATE, np.float32)
        (readings,) = process.measure({"silero": {}}, [Utterance(silence, RATE, "")])
        assert readings["silence"] == Reading(1.0, "silero")
        with pytest.raises(ModelError) as caught:
            process.measure({"no-such-meter": {}}, [Utterance(silence, RATE, "")])
        assert caught.value.code is ErrorCode.MODEL_UNKNOWN
        assert process.measure({"silero": {}}, [Utterance(silence, RATE, "")])[0]["silence"][0] == 1.0
        process.close()
        process.close()

    def test_a_process_that_dies_or_hangs_costs_its_draw_and_no_other(self) -> None:
        before, process = set(children(os.getpid())), MeterProcess(240)
        sample = Utterance(np.zeros(RATE, np.float32), RATE, "")
        process.measure({}, [sample])
        (child,) = set(children(os.getpid())) - before
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert process.measure({}, [sample]) == [{}]
        process.close()

    def test_a_process_that_is_killed_in_a_draw_costs_this_draw_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = (
            "import os, pathlib, time\n"
            "class Meter:\n"
            "    def measure(self, sample):\n"
            "        if sample.text:\n"
            "            pathlib.Path(sample.text).write_text(f'{os.getpid()}.')\n"
            "            time.sleep(600)\n"
            "        return {'peak': (os.getpid(), '')}\n"
        )
        monkeypatch.setenv("PYTHONPATH", add_meter(tmp_path, code))
        samples, told, pool = np.zeros(RATE, np.float32), tmp_path / "pid", MeterPool()
        killed, *others = [pool.submit(MeterTask({"peak": {}}, Utterance(samples, RATE, text))) for text in (str(told), "", "")]  # fmt: skip
        deadline, children_killed = time.monotonic() + 240, set[int]()
        # If all three were one batch, it is measured alone again, and killed again.
        while not killed.done():
            assert time.monotonic() < deadline
            time.sleep(0.01)
            if told.exists() and (text := told.read_text()).endswith("."):
                told.unlink()
                children_killed.add(int(text[:-1]))
                os.kill(int(text[:-1]), signal.SIGKILL)
        with pytest.raises(MeterError, match="SIGKILL"):
            killed.result()
        first, second = (one.result(240)["peak"][0] for one in others)
        assert first == second not in children_killed
        pool.close()

    def test_a_hang_ends_with_the_process_and_slow_weights_are_an_outage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = (
            "import time\n"
            "class Meter:\n"
            "    def __init__(self, slow=False):\n"
            "        if slow:\n"
            "            time.sleep(600)\n"
            "    def measure(self, sample):\n"
            "        if sample.text == 'hang':\n"
            "            time.sleep(600)\n"
            "        return {'peak': (1.0, sample.text)}\n"
        )
        monkeypatch.setenv("PYTHONPATH", add_meter(tmp_path, code))
        sample = Utterance(np.zeros(RATE // 10, np.float32), RATE, "well")
        before, process = set(children(os.getpid())), MeterProcess(draw_seconds=0.1, seconds_per_second=1.0)
        with pytest.raises(MeterHangError, match="more than 0 s") as caught:
            process.measure({"peak": {}}, [replace(sample, text="hang")])
        assert caught.value.code is ErrorCode.QA_METER
        assert set(children(os.getpid())) == before
        process = MeterProcess(opening_seconds=0.5)
        with pytest.raises(ModelError, match="not open after") as slow:
            process.measure({"peak": {"slow": True}}, [sample])
        assert slow.value.code is ErrorCode.MODEL_UNREACHABLE

    def test_a_process_that_does_not_read_holds_nobody_up(self) -> None:
        process = MeterProcess(240, opening_seconds=0.3)
        child = process._start()  # pyright: ignore[reportPrivateUsage]
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(ModelError) as caught:
            process.measure({}, [Utterance(np.zeros(40 * RATE, np.float32), RATE, "")])
        assert caught.value.code is ErrorCode.MODEL_UNREACHABLE
        assert child.ended

    def test_closing_the_pool_cuts_a_measurement_short_and_settles_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = (
            "import pathlib, time\n"
            "class Meter:\n"
            "    def measure(self, sample):\n"
            "        pathlib.Path(sample.text).touch()\n"
            "        time.sleep(600)\n"
        )
        monkeypatch.setenv("PYTHONPATH", add_meter(tmp_path, code))
        measuring = tmp_path / "measuring"
        task = MeterTask({"peak": {}}, Utterance(np.zeros(RATE, np.float32), RATE, str(measuring)))
        pool = MeterPool()
        measured = pool.submit(task)
        deadline = time.monotonic() + 240
        while not measuring.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        closer = threading.Thread(target=pool.close, daemon=True)
        closer.start()
        closer.join(240)
        assert not closer.is_alive()
        with pytest.raises(CancelledError):
            measured.result(240)
        with pytest.raises(CancelledError):
            pool.submit(task)


QWEN3 = Path(__file__).parents[2] / "golden" / "qwen3_tts"


class TestBuiltInMeters:
    """Meters whose libraries are here; the weights come with them."""

    @pytest.fixture(scope="class")
    def speech(self) -> Iterator[Speech]:
        from pipelines.hibari.pipeline import HibariPipeline

        voice = HibariPipeline(threads=1)
        message = Message("user", "text", "The captain read a long letter beside the window.")
        yield submit(voice, SynthesisRequest("a", (message,), seed=1)).result()
        voice.close()

    @pytest.mark.parametrize(
        ("name", "library", "score", "good", "bad"),
        [
            ("distillmos", "distillmos", "distillmos", 4.0, 2.5),
            ("dnsmos", "speechmos", "dnsmos", 3.0, 2.0),
            ("speaker", "resemblyzer", "similarity", 0.95, 0.8),
        ],
    )
    def test_good_speech_is_told_from_noise(
        self, speech: Speech, name: str, library: str, score: str, good: float, bad: float
    ) -> None:
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
        meter = open_meter(name, {})
        reference = encode(speech.samples, speech.sample_rate, "wav")
        noise = np.random.default_rng(0).normal(0, 0.1, len(speech.samples)).astype(np.float32)

        def value(samples: NDArray[np.float32]) -> float:
            return meter.measure(Utterance(samples, speech.sample_rate, speech.text, reference=reference))[
                score
            ][0]

        heard, noisy = value(speech.samples), value(noise)
        assert heard > good
        assert noisy < bad
        assert value(speech.samples) == heard
        assert "torchaudio" not in sys.modules

    def test_a_package_adds_a_meter_by_an_entry_point(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = (
            "class Meter:\n"
            "    def __init__(self, times=1):\n"
            "        self.times = times\n"
            "    def measure(self, sample):\n"
            "        print('meters may print')\n"
            "        if sample.text == 'fail':\n"
            "            raise ValueError('no such text')\n"
            "        if sample.text == 'short':\n"
            "            return {'peak': (1, 'too short', False)}\n"
            "        return {'peak': (float(abs(sample.samples).max()) * self.times, sample.text)}\n"
        )
        monkeypatch.setenv("PYTHONPATH", add_meter(tmp_path, code))
        process = MeterProcess(240)
        sample = Utterance(np.array([0.25, -0.5], np.float32), RATE, "hello")
        assert process.measure({"peak": {"times": 3}}, [sample]) == [{"peak": Reading(1.5, "hello")}]
        assert process.measure({"peak": {}}, [replace(sample, text="short")]) == [
            {"peak": Reading(1.0, "too short", False)}
        ]
        with pytest.raises(NightjarError, match="no such text") as caught:
            process.measure({"peak": {}}, [replace(sample, text="fail")])
        assert caught.value.code is ErrorCode.QA_METER
        process.close()

    def test_meters_of_one_draw_share_its_samples(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are sent to a process once, and resampled there once."""
        code = (
            "import os\n"
            "class Meter:\n"
            "    def __init__(self, times=1):\n"
            "        pass\n"
            "    def measure(self, sample):\n"
            "        assert not sample.samples.flags.writeable\n"
            "        if sample.text == 'end':\n"
            "            os._exit(3)\n"
            "        if sample.text == 'fail':\n"
            "            raise ValueError('no such text')\n"
            "        return {'place': (id(sample.resampled()), sample.text), 'at': (len(sample.resampled()), '')}\n"
        )
        monkeypatch.setenv("PYTHONPATH", add_meter(tmp_path, code))
        process = MeterProcess(240)
        samples = speechlike(0.1)
        first, second, failing, ending, other = (
            Utterance(samples, 24_000, text) for text in ("first", "second", "fail", "end", "other")
        )

        def measured(*utterances: Utterance, times: int = 1) -> list[Readings]:
            return list(process.measure({"peak": {"times": times}}, utterances))

        both = measured(first, second)
        assert [one["place"][1] for one in both] == ["first", "second"]
        assert both[0]["at"][0] == round(len(samples) * SAMPLE_RATE / 24_000)
        assert measured(second, first, times=2) == both[::-1]
        # As when another meter measures those that passed.
        assert measured(second) == measured(second, times=3) == both[1:]
        # One that the process does not have.
        assert [one["place"][1] for one in measured(second, other)] == ["second", "other"]
        assert [one["place"][1] for one in measured(other, second, times=3)] == ["other", "second"]
        for lost in (failing, ending):
            with pytest.raises(NightjarError) as caught:
                measured(lost)
            assert caught.value.code is ErrorCode.QA_METER
            assert [one["place"][1] for one in measured(other, second)] == ["other", "second"]
        # The next process has none.
        process.close()
        assert [one["place"][1] for one in measured(second)] == ["second"]
        process.close()

    def test_a_process_uses_the_memory_of_a_batch_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = (
            "import resource\n"
            "import numpy as np\n"
            "class Meter:\n"
            "    def measure(self, sample):\n"
            "        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
            "        batch = [np.ones(4 << 20, np.float32) for _ in range(3)]\n"
            "        return {'pages': (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, '')}\n"
        )
        monkeypatch.setenv("PYTHONPATH", add_meter(tmp_path, code))
        process = MeterProcess(240)
        utterances = [Utterance(speechlike(0.1), RATE, "") for _ in range(4)]
        first, *_, last = (one["pages"][0] for one in process.measure({"peak": {}}, utterances))
        process.close()
        # 48 MiB have at least 24 pages of 2 MiB.
        assert first >= 24
        assert last <= first / 4


def test_the_samples_that_meters_share_cannot_be_changed() -> None:
    for rate in (SAMPLE_RATE, 24_000):
        samples = speechlike(0.1)
        utterance = Utterance(samples, rate, "")
        assert np.array_equal(utterance.resampled(), soxr.resample(samples, rate, SAMPLE_RATE))
        with pytest.raises(ValueError, match="read-only"):
            utterance.resampled()[0] = 1


class TestVoice:
    """The meter of voices by the speaker encoder of a checkpoint."""

    @staticmethod
    def similarity(speech: str, reference: str) -> float:
        meter = open_meter("voice", {"model": str(whole(QWEN3 / "checkpoint-base")), "device": "cpu"})
        samples, rate = soundfile.read(QWEN3 / "refs" / speech, dtype="float32")
        utterance = Utterance(samples, rate, "", reference=(QWEN3 / "refs" / reference).read_bytes())
        assert meter.measure(replace(utterance, reference=None)) == {}
        ((score, reading),) = meter.measure(utterance).items()
        assert score == "voice_similarity"
        return reading[0]

    def test_its_score_is_the_cosine_of_the_vectors_that_the_model_clones_with(self) -> None:
        arrays = read_arrays(QWEN3 / "arrays_base.npz")
        cases = ("clone_xvector_streaming", "clone_xvector_nonstreaming")
        first, second = (np.asarray(arrays[f"{case}.0.speaker_embedding"], np.float64) for case in cases)
        cosine = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
        assert self.similarity("ref_b_24k_mono.wav", "ref_a_24k_mono.wav") == pytest.approx(cosine, abs=1e-4)
        assert self.similarity("ref_a_24k_mono.wav", "ref_a_24k_mono.wav") == pytest.approx(1, abs=1e-6)

    @pytest.mark.parametrize("folder", ["qwen3_tts/checkpoint-custom", "spark/checkpoint"])
    def test_a_checkpoint_without_a_speaker_encoder_is_refused_before_the_job(self, folder: str) -> None:
        meters = {"voice": {"model": str(whole(QWEN3.parent / folder))}}
        for refuse in (
            lambda: check_weights(meters, fetch=False),
            lambda: open_meter("voice", meters["voice"]),
        ):
            with pytest.raises(ModelError, match="has no speaker encoder") as refused:
                refuse()
            assert refused.value.code is ErrorCode.MODEL_BAD_CHECKPOINT

    @pytest.mark.parametrize("options", [{"model": "/no/such/folder"}, {"model": "hibari"}, {}])
    def test_a_folder_that_is_missing_is_refused_before_the_job(self, options: dict[str, str]) -> None:
        with pytest.raises(ModelError, match="no readable folder") as refused:
            check_weights({"voice": options}, fetch=False)
        assert refused.value.code is ErrorCode.MODEL_UNKNOWN
        refused_by_jobs = missing_weights({"voice": options}, fetch=False)
        assert refused_by_jobs is not None
        assert refused_by_jobs.code is ErrorCode.MODEL_UNKNOWN

    def test_its_option_is_named(self) -> None:
        with pytest.raises(ModelError, match="'model'") as refused:
            open_meter("voice", {})
        assert refused.value.code is ErrorCode.MODEL_BAD_CHECKPOINT
        with pytest.raises(ConfigError) as unmeasured:
            quality_of("basic", None, ["bounds.voice_similarity.low=0.5"])
        assert "--qa-set meters.voice.model=FOLDER" in unmeasured.value.advice

    def test_it_hears_the_first_minute_of_samples_that_cannot_be_changed(
        self, recwarn: pytest.WarningsRecorder
    ) -> None:
        meter = open_meter("voice", {"model": str(whole(QWEN3 / "checkpoint-base")), "device": "cpu"})
        samples, rate = soundfile.read(QWEN3 / "refs" / "ref_a_24k_mono.wav", dtype="float32")
        minute, reference = np.resize(samples, 60 * rate), encode(samples, rate, "wav")
        found = []
        for speech in (minute, np.concatenate((minute, np.zeros(5 * rate, np.float32)))):
            speech.flags.writeable = False
            found.append(meter.measure(Utterance(speech, rate, "", reference=reference)))
        assert found[0] == found[1]
        assert not [one for one in recwarn if "not writable" in str(one.message)]
