"""Meters in batches: what a draw gets does not depend on the draws beside it, and one that fails costs no other."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from benchmarks.checkpoint import write_ctc
from jobs.checks import Bound, Option
from pipelines.errors import ErrorCode, ModelError
from pipelines.hibari.pipeline import HibariPipeline
from pipelines.request import Message, SynthesisRequest, submit
from tests.support.fake_gpus import FakeGpus
from worker.quality import process
from worker.quality.aligner import CtcMeter
from worker.quality.meters import (
    SAMPLE_RATE,
    Reading,
    Readings,
    SileroMeter,
    Utterance,
    open_meter,
)
from worker.quality.process import (
    BATCH,
    LEAST_BATCH,
    MeterError,
    MeterHangError,
    MeterPool,
    MeterProcess,
    MeterTask,
)

ALIGNER = Path(__file__).parents[2] / "support" / "aligner"
#: The largest difference of a score in a batch on a CPU, by its meter.
TOLERANCES = {"align": 1e-4, "asr": 0.0}


@pytest.fixture(scope="module")
def spoken() -> list[Utterance]:
    """Utterances of 0.1 to 50 s, none as long as another one."""
    voice = HibariPipeline(threads=1)
    found = list[Utterance]()
    for number, text in enumerate(
        ("Yes.", "Rice is often served in round bowls.", "A pot of tea helps to pass the evening.")
    ):
        made = submit(voice, SynthesisRequest(text, (Message("user", "text", text),), seed=number)).result()
        found.append(Utterance(made.samples, made.sample_rate, text))
    voice.close()
    long = np.concatenate([found[1].samples, found[2].samples] * 10)
    found.append(Utterance(long[: 50 * found[1].sample_rate], found[1].sample_rate, "It is long. " * 5))
    found.append(Utterance(found[1].samples[: found[1].sample_rate // 10], found[1].sample_rate, "cut"))
    return found


def meter_of(name: str, model: str, folder: Path) -> CtcMeter:
    """The meter, on the CPU: with a trained model, or one of random weights whose speech is masked or not."""
    if model != "trained":
        write_ctc(folder / "ctc", tiny=True)
    if model == "unmasked":
        config = folder / "ctc" / "preprocessor_config.json"
        config.write_text(
            config.read_text().replace('"return_attention_mask": true', '"return_attention_mask": false')
        )
    place = ALIGNER if model == "trained" else folder / "ctc"
    return open_meter(name, {"model": str(place), "device": "cpu"})  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, model) for name in ("align", "asr") for model in ("trained", "masked", "unmasked")],
)
def test_a_draw_alone_gets_what_it_gets_in_a_batch(
    spoken: list[Utterance], tmp_path: Path, name: str, model: str
) -> None:
    meter = meter_of(name, model, tmp_path)
    for some in (spoken, spoken[::-1], spoken[1:3] * 5):
        for one, readings in zip(some, meter.measure_batch(some), strict=True):
            alone = meter.measure(one)
            assert readings.keys() == alone.keys()
            for score, (value, detail, *more) in readings.items():
                assert value == pytest.approx(alone[score][0], abs=TOLERANCES[name]), (one.text, score)
                assert (detail, *more) == (*alone[score][1:],)


@pytest.mark.parametrize("name", ["align", "distillmos", "speaker"])
def test_a_meter_for_which_a_gpu_has_no_room_runs_on_the_cpu(
    spoken: list[Utterance], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Items would else fail, all of them."""
    if find_spec({"speaker": "resemblyzer"}.get(name, "torch" if name == "align" else name)) is None:
        pytest.skip(f"the meter {name} is not installed")
    gpu = FakeGpus(count=1)
    gpu.install(monkeypatch)
    gpu.free_gib = 1.7
    options: dict[str, Option] = {"model": str(ALIGNER)} if name == "align" else {}
    one = replace(spoken[1], reference=None)
    wanted = open_meter(name, {**options, "device": "cpu"}).measure(one)
    assert open_meter(name, options).measure(one) == wanted
    with pytest.raises(ModelError, match=r"cannot be used|no room"):
        open_meter(name, {**options, "device": "cuda:7"})


def test_the_frames_of_a_model_are_as_long_in_a_batch_as_alone(
    spoken: list[Utterance], tmp_path: Path
) -> None:
    """Of a model whose frames are too long for a short draw to say how long they are."""
    write_ctc(tmp_path / "ctc", tiny=True)
    config = tmp_path / "ctc" / "config.json"
    values = json.loads(config.read_text())
    torch.manual_seed(0)
    sizes = transformers.Wav2Vec2Config(**values | {"add_adapter": True})
    transformers.Wav2Vec2ForCTC(sizes).save_pretrained(tmp_path / "ctc")
    meter = open_meter("align", {"model": str(tmp_path / "ctc"), "device": "cpu"})
    long = replace(spoken[2], samples=np.resize(spoken[2].samples, 10 * spoken[2].sample_rate))
    short = replace(spoken[1], samples=spoken[1].samples[: spoken[1].sample_rate])
    found, _ = meter.measure_batch([long, short])  # type: ignore[attr-defined]
    assert found["align"].words == meter.measure(long)["align"].words  # type: ignore[union-attr]


def test_distillmos_scores_speech_as_its_package_does(spoken: list[Utterance]) -> None:
    """Of one segment and of several ones."""
    if find_spec("distillmos") is None:
        pytest.skip("distillmos is not installed")
    meter = open_meter("distillmos", {"device": "cpu"})
    # Its own import needs torchaudio.
    package = sys.modules["distillmos"].ConvTransformerSQAModel().eval()
    long = np.concatenate([one.resampled() for one in spoken])[: 9 * SAMPLE_RATE]
    for audio in (spoken[1].resampled().copy(), long):
        with torch.inference_mode():
            wanted = package(torch.from_numpy(audio)[None]).item()
        found = meter.measure(Utterance(audio, SAMPLE_RATE, ""))
        assert found["distillmos"][0] == pytest.approx(wanted, abs=1e-4)


def test_a_ctc_model_hears_the_words(spoken: list[Utterance]) -> None:
    meter = open_meter("asr", {"model": str(ALIGNER), "language": "english"})
    heard = meter.measure(spoken[2])
    assert heard["cer"][0] < 0.5, heard
    other = meter.measure(
        Utterance(spoken[2].samples, spoken[2].sample_rate, "Quite another text was asked for here.")
    )
    assert other["cer"][0] > 0.6
    assert other["cer"][1] == heard["cer"][1]


@pytest.mark.parametrize("name", ["distillmos", "speaker", "asr"])
@pytest.mark.parametrize("device", ["cuda:9", "gpu0"])
def test_a_device_that_is_not_there_is_named(name: str, device: str) -> None:
    options = {"model": str(ALIGNER)} if name == "asr" else {}
    with pytest.raises(ModelError) as caught:
        open_meter(name, {**options, "device": device})
    assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT
    assert f"'{device}'" in caught.value.message


def test_silero_finds_the_pause_and_the_silence(spoken: list[Utterance]) -> None:
    meter, speech = SileroMeter(), spoken[1].resampled()
    without = meter.measure(spoken[1])
    assert without["silence"][0] < 0.3
    assert without["pause"][0] < 0.3
    half = len(speech) // 2
    paused = np.concatenate([speech[:half], np.zeros(2 * SAMPLE_RATE, np.float32), speech[half:]])
    found = meter.measure(Utterance(paused, SAMPLE_RATE, ""))
    assert found["pause"] == (pytest.approx(2.0, abs=0.3), "silero")
    assert found["silence"][0] == pytest.approx(
        (without["silence"][0] * len(speech) + 2 * SAMPLE_RATE) / len(paused), abs=0.1
    )
    quiet = paused * np.float32(1 / 30)
    assert meter.measure(Utterance(quiet, SAMPLE_RATE, ""))["silence"][0] < 0.9


def test_silero_hears_no_speech_in_noise_and_leaves_the_samples_as_they_are(spoken: list[Utterance]) -> None:
    meter = SileroMeter()
    noise = np.random.default_rng(0).normal(0, 0.02, 60 * SAMPLE_RATE).astype(np.float32)
    whole = noise[: 2 * 512].copy()
    for sound in (noise, whole, noise[:100]):
        before = sound.copy()
        assert meter.measure(Utterance(sound, SAMPLE_RATE, "")) == {
            "silence": (1.0, "silero"),
            "pause": (0.0, "silero"),
        }
        assert np.array_equal(sound, before)


class Host(MeterProcess):
    """Keeps the draws of each batch; fails on batches with a text, and is slow for some."""

    def __init__(self, go: threading.Event, fails: Mapping[str, Exception] | None = None) -> None:
        super().__init__()
        self.go, self.fails = go, fails or {}
        self.batches: list[tuple[str, list[str]]] = []

    def measure(
        self, meters: Mapping[str, Mapping[str, Option]], utterances: Sequence[Utterance]
    ) -> Sequence[Readings]:
        assert self.go.wait(60)
        (name,) = meters
        self.batches.append((name, [one.text for one in utterances]))
        for text, error in self.fails.items():
            if any(one.text == text for one in utterances):
                raise error
        return [{name: Reading(float(len(one.text)))} for one in utterances]

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def tasks(texts: Sequence[str], *meters: str, high: float = 100.0) -> list[MeterTask]:
    silence = np.zeros(9, np.float32)
    chosen: dict[str, dict[str, Option]] = {name: {} for name in meters}
    return [
        MeterTask(chosen, Utterance(silence, 9, text), item=text, bounds={meters[0]: Bound(high=high)})
        for text in texts
    ]


@pytest.mark.usefixtures("a_gpu")
def test_draws_that_wait_for_the_same_meters_are_measured_together_and_in_the_order_of_cost() -> None:
    go = threading.Event()
    host = Host(go)
    pool = MeterPool(open_host=lambda: host)
    texts = ["first", *("x" * number for number in range(1, 40))]
    measured = [pool.submit(one) for one in tasks(texts, "cheap", "costly", high=20.0)]
    other = pool.submit(tasks(["other"], "else")[0])
    go.set()
    for text, one in zip(texts, measured, strict=True):
        names = {"cheap", "costly"} if len(text) <= 20 else {"cheap"}
        assert one.result(60).keys() == names
    assert other.result(60).keys() == {"else"}
    pool.close()
    assert max(len(some) for _, some in host.batches) == BATCH
    assert len([name for name, _ in host.batches if name == "cheap"]) <= 5
    assert all(len(text) <= 20 for name, some in host.batches if name == "costly" for text in some)


@pytest.mark.parametrize("error", [MeterError("It broke."), MeterHangError("It took long.")])
@pytest.mark.usefixtures("a_gpu")
def test_a_draw_that_fails_costs_no_other_of_its_batch(error: MeterError) -> None:
    go = threading.Event()
    host = Host(go, {"bad": error})
    pool = MeterPool(open_host=lambda: host)
    measured = {one.item: pool.submit(one) for one in tasks(["a", "b", "bad", "c", "d"], "cheap", "costly")}
    go.set()
    for item, one in measured.items():
        if item == "bad":
            with pytest.raises(type(error)):
                one.result(60)
        else:
            assert one.result(60).keys() == {"cheap", "costly"}
    host.batches.clear()
    go.clear()
    later = [pool.submit(one) for one in tasks(["e", "f", "g", "h"], "cheap", "costly")]
    go.set()
    for one in later:
        one.result(60)
    pool.close()
    # Meters that took too long for a batch get single draws.
    alone = all(len(some) == 1 for _, some in host.batches)
    assert alone == isinstance(error, MeterHangError)


@pytest.mark.usefixtures("a_gpu")
def test_draws_wait_for_a_full_batch_but_not_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GATHER_SECONDS", 600.0)
    go = threading.Event()
    go.set()
    host = Host(go)
    pool = MeterPool(2, open_host=lambda: host)
    few = [pool.submit(one) for one in tasks(["a", "b", "c"], "cheap")]
    assert not wait(few, 0.2).done
    few.append(pool.submit(tasks(["d"], "cheap")[0]))
    assert all(one.result(60) for one in few)
    last = pool.submit(tasks(["e"], "cheap")[0])
    pool.close()
    assert last.cancelled()
    assert [len(some) for _, some in host.batches] == [LEAST_BATCH]
    monkeypatch.setattr(process, "GATHER_SECONDS", 0.3)
    pool = MeterPool(2, open_host=lambda: host)
    # Those of other meters wait beside them, not after them.
    few = [
        pool.submit(tasks([text], meter)[0])
        for text, meter in zip("abc", ("cheap", "else", "cheap"), strict=True)
    ]
    assert all(one.result(60) for one in few)
    pool.close()
    assert sum(len(some) for _, some in host.batches) == LEAST_BATCH + 3
