"""Quality checks on the way of an item: redraws, quarantine, resume, exports, meters that are slow or
missing."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
import pytest

from jobs.checks import ENTRY_POINT_GROUP, Option, Quality, quality_of
from jobs.export.items import audio_items
from jobs.ingest import SubmitOptions
from jobs.ledger.records import QUARANTINE, Draw, ItemState, Job, JobState
from jobs.spec import item_seed
from pipelines.audio import decode, encode
from pipelines.errors import ErrorCode, InputError, ModelError
from pipelines.registry import register_pipeline
from pipelines.request import Speech, SynthesisRequest
from tests.support.fake_worker import fake_card
from tests.support.fakes import SAMPLE_RATE, FakeClock, FakePipeline, Markers, sine, spoken_text
from tests.support.packages import write_package
from tests.support.quality_kit import Costs, TextMeter, UnluckyPipeline, whisper_base
from tests.support.times import with_times
from tests.support.worker_rig import Rig
from worker.garbage import orphans
from worker.quality.meters import Readings, Utterance
from worker.quality.process import MeterPool, MeterProcess
from worker.result_writer import ResultWriter

BASIC = quality_of("basic")
assert BASIC is not None
Build = Callable[..., Rig]


@pytest.fixture(autouse=True)
def text_meter_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package here adds the meter `text`; the processes of meters do not have it."""
    write_package(tmp_path / "meters", "text-meter", ENTRY_POINT_GROUP, {"text": "text_meter:Meter"})
    monkeypatch.syspath_prepend(tmp_path / "meters")


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Builds rigs that are closed after the test; with a `host`, meters run in it."""
    forget = register_pipeline("fake", fake_card(), FakePipeline)
    rigs: list[Rig] = []

    def build_rig(
        host: TextMeter | None = None,
        folder: str = "a",
        pipeline: FakePipeline | None = None,
        clock: FakeClock | None = None,
        **options: float,
    ) -> Rig:
        (tmp_path / folder).mkdir(exist_ok=True)
        rig = Rig(tmp_path / folder, pipeline=pipeline or UnluckyPipeline(), clock=clock, **options)
        if host is not None:
            rig.writer = ResultWriter(meters=MeterPool(open_host=lambda: host))
            rig.runner = rig.runner_on(rig.ledger)
        rigs.append(rig)
        return rig

    yield build_rig
    for one in rigs:
        one.close()
    forget()


def orphans_of(rig: Rig, job: Job) -> list[str]:
    """What a sweep in an hour would find."""
    return [info.key for info, _ in orphans(rig.ledger, rig.store, job, rig.ledger.now() + 3600)]


def draws_of(rig: Rig, job: Job) -> dict[int, list[Draw]]:
    found: dict[int, list[Draw]] = {}
    for row in rig.ledger.draws_of(job.id, range(job.total_items)):
        found.setdefault(row.index, []).append(row.draw)
    return found


def metered(**changes: object) -> Quality:
    quality = quality_of("basic", None, ["meters.text={}", "bounds.score.low=0.5"])
    assert quality is not None
    return msgspec.structs.replace(quality, **changes)


def test_a_bad_draw_is_made_again_with_the_next_seed_and_the_good_one_is_kept(build: Build) -> None:
    rig = build()
    job = rig.submit(
        ["plain", "[[clipped:1]] once", "[[no_eos:1]] [[runaway:2]] twice"], seed=5, quality=BASIC
    )
    assert rig.run_next() == "finished"
    assert rig.status(job).job.state is JobState.COMPLETED
    draws = draws_of(rig, job)
    assert [[draw.code for draw in draws[index]] for index in range(3)] == [
        [None],
        [ErrorCode.QA_CLIPPED, None],
        [ErrorCode.SYNTH_NO_EOS, ErrorCode.SYNTH_RUNAWAY, None],
    ]
    assert rig.metrics.registry.get_sample_value("speech_refused_draws_total", {"code": "synth.no_eos"}) == 1
    assert [[draw.kept for draw in draws[index]] for index in range(3)] == [
        [True],
        [False, True],
        [False, False, True],
    ]
    for row in rig.items(job):
        last = draws[row.index][-1]
        assert row.artifact is not None
        assert row.artifact.seed == last.seed == item_seed(5, f"item-{row.index}", 0, last.draw)
        assert set(last.scores) == {"ended", "clipped", "silence", "pause", "loudness"}
        assert row.artifact.key.endswith(f"-draw{last.draw}.wav") == (last.draw > 0)
        assert rig.store.get(row.artifact.key) == encode(
            sine(text_of(rig, row.index), last.seed), SAMPLE_RATE, "wav"
        )


def text_of(rig: Rig, index: int) -> str:
    lines = sorted(rig.folder.glob("*.jsonl"))[0].read_text().splitlines()
    return msgspec.json.decode(lines[index])["messages"][0][2]


def test_an_item_without_a_good_draw_goes_to_quarantine_and_no_export_has_it(build: Build) -> None:
    rig = build()
    job = rig.submit(["good", "[[clipped:99]] bad", "[[silent]] nothing", "[[nan]] never"], quality=BASIC)
    assert rig.run_next() == "finished"
    rows = rig.items(job)
    assert [(row.state, row.error_code) for row in rows] == [
        (ItemState.DONE, None),
        (ItemState.FAILED, ErrorCode.QA_CLIPPED),
        (ItemState.FAILED, ErrorCode.SYNTH_SILENT),
        (ItemState.FAILED, ErrorCode.SYNTH_NAN),
    ]
    assert "`clipped` is" in (rows[1].error_message or "")
    assert rows[1].artifact is None
    assert [len(drawn) for drawn in draws_of(rig, job).values()] == [1, 3, 2, 2]
    kept = {one.index: one.key for one in rig.ledger.artifacts(job.id, QUARANTINE)}
    best = min(draws_of(rig, job)[1], key=lambda draw: (draw.scores["clipped"].value, draw.draw)).draw
    later = f"-draw{best}" if best else ""
    assert kept == {
        1: f"jobs/{job.id}/quarantine/00000/000000001-item-1{later}.wav",
        2: f"jobs/{job.id}/quarantine/00000/000000002-item-2.wav",
    }
    samples, _ = decode(rig.store.get(kept[1]))
    assert np.abs(samples).max() == pytest.approx(0.5, abs=1e-3)
    assert [item.example_id for item in audio_items(rig.ledger, rig.store, job.id)] == ["item-0"]
    assert len(rig.audio()) == 1
    assert rig.status(job).bytes_out == len(next(iter(rig.audio().values())))
    assert rig.ledger.error_counts(job.id)[ErrorCode.QA_CLIPPED] == 1
    assert orphans_of(rig, job) == []


def test_a_retry_by_a_person_draws_on_and_leaves_quarantine(build: Build) -> None:
    rig = build()
    job = rig.submit(["[[clipped:4]] late", "[[clipped:99]] never"], quality=BASIC)
    rig.run_next()
    assert rig.ledger.retry(job.id, [ErrorCode.QA_CLIPPED]) == 2
    assert rig.run_next() == "finished"
    draws = draws_of(rig, job)
    assert [draw.draw for draw in draws[0]] == [0, 1, 2, 3, 4]
    assert [draw.draw for draw in draws[1]] == [0, 1, 2, 3, 4, 5]
    assert len({draw.seed for draw in draws[1]}) == 6
    assert rig.items(job)[0].state is ItemState.DONE
    (kept,) = rig.ledger.artifacts(job.id, QUARANTINE)
    assert kept.index == 1
    assert kept.key.rpartition("-draw")[2] in {"3.wav", "4.wav", "5.wav"}
    assert len(orphans_of(rig, job)) == 2


def test_the_best_draw_can_be_kept_instead(build: Build) -> None:
    rig = build()
    quality = msgspec.structs.replace(BASIC, on_fail="keep", draws=2)
    job = rig.submit(["[[clipped:99]] bad", "[[nan]] no audio to keep"], quality=quality)
    rig.run_next()
    rows = rig.items(job)
    assert [row.state for row in rows] == [ItemState.DONE, ItemState.FAILED]
    assert [(draw.code, draw.kept) for draw in draws_of(rig, job)[0]] == [
        (ErrorCode.QA_CLIPPED, True),
        (ErrorCode.QA_CLIPPED, False),
    ]


def test_a_run_that_was_cut_off_ends_with_the_same_draws(build: Build) -> None:
    texts = ["[[clipped:2]] a", "b", "[[clipped:1]] c", "[[clipped:9]] d", *(f"text {n}" for n in range(30))]
    whole = build()
    job = whole.submit(texts, seed=3, quality=BASIC)
    whole.run_next()
    gate = threading.Event()
    cut = build(folder="b", host=TextMeter(gate))
    again = cut.submit(texts, seed=3, quality=metered())
    lease = cut.claim_next()
    thread = threading.Thread(target=cut.runner.run, args=(lease,))
    thread.start()
    until(lambda: len(cut.pipeline.submitted) >= len(texts) + 5)
    cut.leases.drain()
    gate.set()
    thread.join(240)
    assert cut.status(again).items.done + cut.status(again).items.failed <= len(texts)
    cut.leases = type(cut.leases)(cut.settings.times.lease_seconds, cut.clock)
    cut.runner = cut.runner_on(cut.ledger)
    while not cut.status(again).job.state.final:
        cut.run_next()
    first, second = draws_of(whole, job), draws_of(cut, again)
    assert {index: [(d.draw, d.seed, d.code, d.kept) for d in drawn] for index, drawn in first.items()} == {
        index: [(d.draw, d.seed, d.code, d.kept) for d in drawn] for index, drawn in second.items()
    }
    hashes = [
        [hashlib.sha256(data).hexdigest() for _, data in sorted(rig.audio().items())] for rig in (whole, cut)
    ]
    assert hashes[0] == hashes[1]


def until(condition: Callable[[], object], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_a_slow_meter_never_keeps_the_engine_from_being_fed(build: Build) -> None:
    gate = threading.Event()
    meter = TextMeter(gate)
    rig = build(host=meter)
    job = rig.submit([f"text {n}" for n in range(120)], quality=metered())
    thread = threading.Thread(target=rig.run_next)
    thread.start()
    until(lambda: len(rig.pipeline.submitted) == 120)
    assert meter.measured == []
    assert rig.audio() == {}
    gate.set()
    thread.join(240)
    assert rig.status(job).items.done == 120
    assert len(meter.measured) == 120
    for row in rig.items(job):
        assert row.artifact is not None
        assert rig.store.get(row.artifact.key) == encode(
            sine(f"text {row.index}", row.artifact.seed), SAMPLE_RATE, "wav"
        )


def test_a_reading_out_of_bounds_is_drawn_again_and_ends_with_its_code(build: Build) -> None:
    rig = build(host=TextMeter())
    job = rig.submit(["[[score:0.7]] fine", "[[score:0.2]] poor"], quality=metered(draws=2))
    rig.run_next()
    rows, draws = rig.items(job), draws_of(rig, job)
    assert [row.error_code for row in rows] == [None, ErrorCode.QA_SCORE]
    assert [(draw.scores["score"].value, draw.scores["score"].passed) for draw in draws[1]] == [
        (0.2, False),
        (0.2, False),
    ]
    assert draws[0][0].scores["score"].detail == "as the text says"


ALL_METERS = quality_of(
    "strict",
    None,
    ["draws=1", "meters.align={}", "bounds.align.low=-9", "meters.speaker={}", "bounds.similarity.low=0.8"],
)
COSTS = ["silero", "align", "asr", "distillmos", "speaker"]


@pytest.mark.parametrize(
    ("text", "code", "ran"),
    [
        ("good", None, COSTS),
        ("[[no_eos:9]] cut", ErrorCode.SYNTH_NO_EOS, []),
        ("[[clipped:9]] [[wer:1]] loud", ErrorCode.QA_CLIPPED, []),
        ("[[silence:0.9]] [[wer:1]] noise", ErrorCode.QA_SILENCE, COSTS[:1]),
        ("[[align:-20]] [[wer:1]] repeated", ErrorCode.QA_WER, COSTS[:2]),
        ("[[wer:1]] [[distillmos:1]] wrong words", ErrorCode.QA_WER, COSTS[:3]),
        ("[[distillmos:1]] [[similarity:0]] hoarse", ErrorCode.QA_MOS, COSTS[:4]),
        ("[[similarity:0.2]] another speaker", ErrorCode.QA_SPEAKER, COSTS),
    ],
)
def test_checks_run_in_the_order_of_their_cost_and_a_failed_one_is_the_last(
    build: Build, text: str, code: ErrorCode | None, ran: list[str]
) -> None:
    host = Costs()
    rig = build(host=host)
    job = rig.submit([text], quality=ALL_METERS)
    rig.run_next()
    assert ([row.error_code for row in rig.items(job)], host.measured) == ([code], ran)


def test_a_meter_that_this_worker_lacks_ends_the_shard_with_its_name(build: Build) -> None:
    rig = build()
    job = rig.submit(["one", "two"], quality=metered())
    assert rig.run_next() == "failed"
    rows = rig.items(job)
    assert {row.error_code for row in rows} == {ErrorCode.MODEL_UNKNOWN}
    assert "'text'" in (rows[0].error_message or "")


def pass_hours(clock: FakeClock) -> None:
    """Lets an hour pass, in steps, while the others go on."""
    for _ in range(12):
        time.sleep(0.1)
        clock.advance(300)


class LateTrouble(UnluckyPipeline):
    """From the second draw on it refuses `[[late:refused]]`, and never ends `[[late:hang]]`."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def submit(self, request: SynthesisRequest) -> Future[Speech]:
        late = Markers.of(spoken_text(request)).words.get("late")
        if request.request_id.count("/") > 2 and late == "refused":
            raise InputError(ErrorCode.INPUT_TOO_LONG, "Too long this time.")
        if request.request_id.count("/") > 2 and late == "hang":
            threading.Thread(target=pass_hours, args=(self._clock,), daemon=True).start()
            return Future()
        return super().submit(request)


@pytest.mark.parametrize(
    ("late", "code"), [("refused", ErrorCode.INPUT_TOO_LONG), ("hang", ErrorCode.SYNTH_TIMEOUT)]
)
def test_draws_that_were_made_stay_known_whatever_ends_the_item(
    build: Build, late: str, code: ErrorCode
) -> None:
    clock = FakeClock()
    rig = build(pipeline=LateTrouble(clock), clock=clock, lease_seconds=21_600)
    job = rig.submit([f"[[clipped:1]] [[late:{late}]]"], quality=BASIC, options=SubmitOptions(max_attempts=1))
    rig.run_next()
    assert [row.error_code for row in rig.items(job)] == [code]
    assert [(draw.draw, draw.code) for draw in draws_of(rig, job)[0]] == [(0, ErrorCode.QA_CLIPPED)]


def test_an_outage_of_a_meter_spends_no_attempt_and_asks_for_nothing_more(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.shard_run.WRITING_SECONDS", 0.0)
    ended = threading.Event()

    class Away(TextMeter):
        def measure_one(self, meters: Mapping[str, Mapping[str, Option]], utterance: Utterance) -> Readings:
            if self.measured:
                assert ended.wait(240)
            super().measure_one(meters, utterance)
            raise ModelError(ErrorCode.MODEL_UNREACHABLE, "The hub is away.", "Wait.")

    meter = Away()
    rig = build(host=meter)
    job = rig.submit(
        [f"text {n}" for n in range(20)], quality=metered(), options=SubmitOptions(max_attempts=1)
    )
    assert rig.run_next() == "failed"
    ended.set()
    status = rig.status(job)
    assert status.outage is not None
    assert status.outage.code is ErrorCode.MODEL_UNREACHABLE
    assert (status.items.failed, status.items.pending) == (0, 20)
    rig.writer.close()
    assert len(meter.measured) <= 2


def test_verdicts_and_audio_do_not_depend_on_shards(build: Build, tmp_path: Path) -> None:
    texts = [f"[[clipped:{n % 4}]] text {n}" for n in range(24)]
    seen = []
    for folder, items in (("one", 256), ("many", 5)):
        rig = build(folder=folder)
        rig.settings = with_times(rig.settings, shard_items=items)
        job = rig.submit(texts, seed=9, quality=BASIC)
        while not rig.status(job).job.state.final:
            rig.run_next()
        drawn = [
            (index, d.draw, d.seed, d.code, d.kept) for index, ds in draws_of(rig, job).items() for d in ds
        ]
        seen.append((drawn, [hashlib.sha256(data).hexdigest() for _, data in sorted(rig.audio().items())]))
    assert seen[0] == seen[1]


def test_trimmed_speech_is_stored_trimmed(build: Build) -> None:
    class Padded(FakePipeline):
        def _finish(self, request: SynthesisRequest, future: Future[Speech]) -> None:
            pad = np.zeros(SAMPLE_RATE, np.float32)
            future.set_result(Speech(np.concatenate([pad, sine("abc", 1), pad]), SAMPLE_RATE, "abc"))

    rig = build(pipeline=Padded())
    job = rig.submit(["abc"], quality=msgspec.structs.replace(BASIC, trim=True))
    rig.run_next()
    (row,) = rig.items(job)
    assert row.artifact is not None
    assert row.artifact.samples < SAMPLE_RATE // 2
    assert draws_of(rig, job)[0][0].scores["silence"].value < 0.8


def test_whisper_hears_what_was_said_and_refuses_another_text(build: Build, tmp_path: Path) -> None:
    weights = whisper_base(tmp_path / "whisper")
    if weights is None:
        pytest.skip("the ASR weights of the tests are not installed")
    from pipelines.hibari import describe
    from pipelines.hibari.pipeline import HibariPipeline
    from tests.support.quality_kit import FaultyVoice

    forget = register_pipeline("faulty-hibari", describe(), HibariPipeline)
    voice = FaultyVoice(3, HibariPipeline(threads=1))
    rig = build(pipeline=voice, lease_seconds=3600)  # pyright: ignore[reportArgumentType]
    quality = quality_of("strict", None, [f"meters.asr.model={weights}", "meters.distillmos=false"])
    assert quality is not None
    short = "The river froze last night."
    long = "The captain read a long letter beside the window, although the road to the harbor was still wet."
    job = rig.submit(
        ["Hi.", "John 3:16", "It's 5%", long, short, short, long],
        model="faulty-hibari",
        quality=quality,
    )
    rig.run_next()
    forget()
    draws = draws_of(rig, job)
    assert [len(draws[index]) for index in range(7)] == [1, 1, 1, 2, 2, 2, 2]
    assert [draws[index][0].code for index in range(3, 7)] == [
        ErrorCode.QA_DURATION, ErrorCode.SYNTH_SILENT, ErrorCode.QA_CLIPPED, ErrorCode.QA_WER,
    ]  # fmt: skip
    for index, drawn in draws.items():
        brief = index <= 2
        assert drawn[-1].scores["wer"].passed is (None if brief else True)
        assert brief or drawn[-1].scores["wer"].value == 0.0
        assert drawn[-1].scores["silence"].detail == "silero"
    assert "different sentence" in draws[6][0].scores["wer"].detail.lower()


class Counting(MeterProcess):
    """Real meters, with the texts that each one has measured."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}

    def measure(
        self, meters: Mapping[str, Mapping[str, Option]], utterances: Sequence[Utterance]
    ) -> Sequence[Readings]:
        for meter in meters:
            self.texts.setdefault(meter, []).extend(one.text for one in utterances)
        return super().measure(meters, utterances)


def test_planted_faults_are_all_found_and_most_cost_no_meter(build: Build, tmp_path: Path) -> None:
    weights = whisper_base(tmp_path / "whisper")
    if weights is None:
        pytest.skip("the ASR weights of the tests are not installed")
    from pipelines.hibari import describe
    from pipelines.hibari.pipeline import HibariPipeline
    from tests.support.quality_kit import FAULTS, FaultyVoice

    texts = [
        "The captain read a long letter beside the window, although the road to the harbor was still wet.",
        "We will meet again at the old station tomorrow morning, before the first train leaves for the sea.",
        "My brother painted the kitchen door in a bright color, and then he went out to buy some bread.",
        "Nobody knew why the lights were still on at midnight, because the house had been empty for years.",
        "The river froze last night, and the children of the village waited a long time to walk across it.",
    ]
    forget = register_pipeline("faulty-hibari", describe(), HibariPipeline)
    host = Counting()
    rig = build(pipeline=FaultyVoice(0, HibariPipeline(threads=1)), lease_seconds=3600)  # pyright: ignore
    rig.writer = ResultWriter(meters=MeterPool(open_host=lambda: host))
    rig.runner = rig.runner_on(rig.ledger)
    quality = quality_of("strict", None, [f"meters.asr.model={weights}", "draws=1"])
    planted = [(fault, text) for text in texts for fault in FAULTS]
    job = rig.submit([text for _, text in planted], model="faulty-hibari", quality=quality)
    rig.run_next()
    forget()
    codes = {fault: set[ErrorCode | None]() for fault in FAULTS}
    for row, (fault, _) in zip(rig.items(job), planted, strict=True):
        codes[fault].add(row.error_code)
    noisy = codes.pop("noisy")
    assert codes == {
        "truncated": {ErrorCode.QA_DURATION},
        "silent": {ErrorCode.SYNTH_SILENT},
        "clipped": {ErrorCode.QA_CLIPPED},
        "wrong-text": {ErrorCode.QA_WER},
        "repeated": {ErrorCode.QA_DURATION},
    }
    assert noisy <= {ErrorCode.QA_SILENCE, ErrorCode.QA_LOUDNESS, ErrorCode.QA_WER, ErrorCode.QA_MOS}
    # A fault that the worker hears itself reaches no meter, and wrong words are the end of a draw.
    assert sorted(host.texts["asr"]) == sorted(2 * texts)
    assert sorted(host.texts["silero"]) == sorted(2 * texts)
    assert len(host.texts["distillmos"]) <= len(texts)


def test_an_answer_without_audio_has_nothing_to_check(build: Build) -> None:
    class Writer(FakePipeline):
        def _finish(self, request: SynthesisRequest, future: Future[Speech]) -> None:
            future.set_result(
                Speech(np.empty(0, np.float32), SAMPLE_RATE, "asked", "written", {"mode": "text_only"})
            )

    rig = build(pipeline=Writer())
    job = rig.submit(["asked"], quality=BASIC)
    rig.run_next()
    assert rig.status(job).job.state is JobState.COMPLETED
    assert draws_of(rig, job) == {}
