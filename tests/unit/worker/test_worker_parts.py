"""The parts of a worker process, each alone: leases, pipelines, upkeep, metrics, supervision, requests."""

from __future__ import annotations

import hashlib
import io
import threading
import time
from typing import BinaryIO

import numpy as np
import pytest

from jobs.layout import reference_key
from jobs.ledger.records import Artifact, Done, Failed, Job, JobSpec, JobState, Lease, Ticket
from jobs.shard_file import ShardLine
from jobs.spec import item_seed
from pipelines.errors import ErrorCode, InputError, NightjarError, ServiceError, StoreError, SynthesisError
from pipelines.recording import SizedCache
from pipelines.request import Generation, Message, Pipeline, Speech
from tests.support.fakes import FakeClock, FakePipeline, MemoryStore
from worker.feeding import EngineTimer, RequestBuilder
from worker.leases import MAX_REREADS, HeldLeases, LeaseGoneError
from worker.maintenance import PeriodicTask
from worker.metrics import Metrics
from worker.models import PipelineCache
from worker.quality.verdict import check_speech

SPEC = JobSpec("fake", seed=3, generation=Generation(voice="sine", temperature=0.5))
JOB = Job(
    id="job", name="", state=JobState.RUNNING, state_reason="", spec=SPEC, spec_sha="sha", input_uri="", input_sha256="",
    idempotency_key="", store_url="memory://", owner="", priority=0, weight=1, max_attempts=3, max_in_flight=None, error_budget=None, labels={},
    total_items=1, total_shards=1, rejected_lines=0, lines_read=1, created_at=0, started_at=None, finished_at=None,
)  # fmt: skip


def lease(shard_no: int = 0) -> Lease:
    return Lease(JOB, shard_no, 2, "worker-1", "key", "sha", {0: ("item-0", 0)})


def away() -> ServiceError:
    return ServiceError(ErrorCode.LEDGER_UNREACHABLE, "away")


class TestLeases:
    def test_a_lease_ends_when_no_heartbeat_came_through(self) -> None:
        clock = FakeClock()
        book = HeldLeases(60, clock)
        held = book.hold(lease())
        clock.advance(50)
        book.renewed(book.tickets(), set(), clock.monotonic() - 1)
        clock.advance(50)
        assert held.gone is None
        clock.advance(20)
        assert held.gone == "expired"
        assert book.tickets() == []

    def test_a_lost_lease_stays_lost(self) -> None:
        book = HeldLeases(60, FakeClock())
        held = book.hold(lease())
        told: list[bool] = []
        held.on_gone = lambda: told.append(held.gone == "lost")
        book.renewed(book.tickets(), {held.lease.ticket}, 0)
        assert told == [True]
        book.drain()
        assert held.gone == "lost"
        assert all(told)

    def test_a_lease_taken_while_draining_is_given_up_at_once(self) -> None:
        book = HeldLeases(60, FakeClock())
        book.drain()
        assert book.hold(lease()).gone == "drained"

    def test_retries_last_as_long_as_the_lease(self) -> None:
        clock = FakeClock()
        errors: list[NightjarError] = []
        held = HeldLeases(60, clock, errors.append).hold(lease())

        def fail() -> None:
            raise away()

        started_at = clock.monotonic()
        with pytest.raises(LeaseGoneError):
            held.retrying(fail)
        assert 60 <= clock.monotonic() - started_at < 66
        assert 10 < len(errors) < 30

    def test_what_no_retry_mends_is_raised_at_once(self) -> None:
        errors: list[NightjarError] = []
        held = HeldLeases(60, FakeClock(), errors.append).hold(lease())

        def fail() -> None:
            raise StoreError(ErrorCode.STORE_MISSING, "gone")

        with pytest.raises(StoreError):
            held.retrying(fail)
        assert errors == []

    def test_a_draining_worker_tries_once(self) -> None:
        held = HeldLeases(60, FakeClock()).hold(lease())
        held.give_up("drained")
        assert held.retrying(lambda: 7) == 7
        calls: list[int] = []

        def fail() -> None:
            calls.append(1)
            raise away()

        with pytest.raises(LeaseGoneError):
            held.retrying(fail)
        assert len(calls) == 1

    def test_a_lost_lease_is_not_worked_on(self) -> None:
        held = HeldLeases(60, FakeClock()).hold(lease())
        held.give_up("lost")
        with pytest.raises(LeaseGoneError):
            held.retrying(lambda: 7)


class TestEngineTimer:
    def test_requests_that_overlap_share_the_time(self) -> None:
        clock = FakeClock()
        timer = EngineTimer(clock)
        first = timer.change(+1)
        clock.advance(1)
        second = timer.change(+1)
        clock.advance(2)
        assert timer.change(-1) - first == pytest.approx(2)
        clock.advance(3)
        assert timer.change(-1) - second == pytest.approx(4)
        clock.advance(100)
        third = timer.change(+1)
        clock.advance(1)
        assert timer.change(-1) - third == pytest.approx(1)


class TestPipelineCache:
    def cache(self) -> tuple[PipelineCache, dict[str, FakePipeline]]:
        opened: dict[str, FakePipeline] = {}

        def open_model(model: str, _decodes: bool) -> Pipeline:
            opened[model] = FakePipeline(model)
            return opened[model]

        return PipelineCache(open_model), opened

    def test_a_model_is_opened_once_and_shared(self) -> None:
        cache, opened = self.cache()
        with cache.use("a") as first, cache.use("a") as second:
            assert first is second
        with cache.use("a") as third:
            assert third is opened["a"]
        assert opened["a"].closes == 0

    def test_a_model_whose_engine_has_ended_is_opened_again(self) -> None:
        cache, opened = self.cache()
        with cache.use("a"):
            dead = opened["a"]
        dead.state = "broken"
        with cache.use("a") as again:
            assert again is opened["a"] is not dead
        assert (dead.closes, opened["a"].closes) == (1, 0)

    def test_another_model_takes_the_place_of_an_idle_one(self) -> None:
        cache, opened = self.cache()
        with cache.use("a"):
            pass
        with cache.use("b"):
            assert opened["a"].closes == 1
        assert cache.pipelines() == [opened["b"]]

    def test_waiters_are_served_in_order_and_no_model_is_closed_in_use(self) -> None:
        cache, opened = self.cache()
        order: list[str] = []
        waits = {model: threading.Event() for model in ("b", "a", "c")}

        def work(model: str) -> None:
            # Asked while it waits, and so after it took its place in the queue.
            with cache.use(model, waits[model].set) as pipeline:
                order.append(model)
                assert isinstance(pipeline, FakePipeline)
                assert pipeline.closes == 0

        threads = [threading.Thread(target=work, args=(model,)) for model in waits]
        with cache.use("a"):
            for thread, waiting in zip(threads, waits.values(), strict=True):
                thread.start()
                assert waiting.wait(240)
            assert order == []
        for thread in threads:
            thread.join(240)
        assert order == ["b", "a", "c"]
        assert opened["b"].closes == 1

    def test_a_waiter_may_give_up(self) -> None:
        cache, _ = self.cache()

        def give_up() -> None:
            raise LeaseGoneError("drained")

        with cache.use("a"):
            with pytest.raises(LeaseGoneError), cache.use("b", give_up):
                pass
            with cache.use("a"):
                pass

    def test_a_broken_pipeline_is_closed_and_opened_anew(self) -> None:
        cache, opened = self.cache()
        with cache.use("a") as broken:
            cache.discard(broken)
            with cache.use("a") as fresh:
                assert fresh is not broken
        assert isinstance(broken, FakePipeline)
        assert broken.closes == 1
        assert cache.pipelines() == [opened["a"]]

    def test_a_model_that_does_not_open_leaves_the_room_free(self) -> None:
        calls: list[str] = []

        def open_model(model: str, _decodes: bool) -> Pipeline:
            calls.append(model)
            if len(calls) == 1:
                raise ServiceError(ErrorCode.MODEL_UNREACHABLE, "no hub")
            return FakePipeline(model)

        cache = PipelineCache(open_model)
        with pytest.raises(ServiceError), cache.use("a"):
            pass
        with cache.use("a"):
            pass
        cache.close()
        cache.close()

    def test_a_model_that_opens_while_the_cache_is_closed_is_closed_too(self) -> None:
        opening, may_open, made = threading.Event(), threading.Event(), FakePipeline("a")

        def open_model(_: str, _decodes: bool) -> Pipeline:
            opening.set()
            assert may_open.wait(10)
            return made

        cache = PipelineCache(open_model)

        def use() -> None:
            with cache.use("a"):
                pass

        user, closer = threading.Thread(target=use), threading.Thread(target=cache.close)
        user.start()
        assert opening.wait(10)
        closer.start()
        closer.join(0.2)
        may_open.set()
        user.join(10)
        closer.join(10)
        assert (made.closes, cache.pipelines()) == (1, [])


class TestPeriodicTask:
    def test_failures_are_survived_and_nudges_heard(self) -> None:
        calls: list[int] = []

        def work() -> None:
            calls.append(1)
            if len(calls) == 1:
                raise away()
            if len(calls) == 2:
                raise ValueError("a bug")

        task = PeriodicTask("test", 3600, work)
        task.start()
        for count in (1, 2, 3):
            task.wake()
            deadline = time.monotonic() + 240
            while len(calls) < count and time.monotonic() < deadline:
                time.sleep(0.005)
        task.stop()
        assert len(calls) == 3


class TestMetrics:
    def test_outcomes_are_counted_by_code(self) -> None:
        metrics = Metrics()
        artifact = Artifact(0, "audio", "key", "sha", 100, 1500, 16000, 24000, 1)
        metrics.count(
            [Done(0, (artifact,)), Failed(1, ErrorCode.SYNTH_NAN, ""), Failed(2, ErrorCode.SYNTH_NAN, "")]
        )
        value = metrics.registry.get_sample_value
        assert value("speech_items_total", {"outcome": "done", "code": ""}) == 1
        assert value("speech_items_total", {"outcome": "failed", "code": "synth.nan"}) == 2
        assert value("speech_audio_seconds_total") == 1.5
        assert value("speech_stored_bytes_total") == 100


class TestRequests:
    def builder(self, store: MemoryStore, max_bytes: int = 1000) -> RequestBuilder:
        held = HeldLeases(60, FakeClock()).hold(lease())
        return RequestBuilder(held, store, SizedCache(max_bytes, len))

    def line(self, *messages: Message, generation: Generation | None = None) -> ShardLine:
        return ShardLine(0, 1, "item-0", messages, generation or Generation(), len(messages))

    def test_the_seed_is_the_lines_own_or_made_of_job_and_line(self) -> None:
        build = self.builder(MemoryStore()).build
        text = Message("user", "text", "hello")
        assert build(self.line(text)).seed == item_seed(3, "item-0", 1)
        assert build(self.line(text, generation=Generation(seed=11))).seed == 11

    def test_the_lines_settings_go_over_the_jobs(self) -> None:
        request = self.builder(MemoryStore()).build(
            self.line(Message("user", "text", "hello"), generation=Generation(temperature=1.0))
        )
        assert (request.generation.voice, request.generation.temperature) == ("sine", 1.0)

    def test_reference_audio_is_loaded_once_and_only_the_users(self) -> None:
        store = MemoryStore()
        key = "jobs/job/references/abc.wav"
        store.put(key, b"RIFF")
        build = self.builder(store).build
        spoken = Message("assistant", "audio", "/etc/passwd")
        request = build(self.line(Message("user", "audio", key), Message("user", "text", "hello"), spoken))
        assert request.messages[0].content == b"RIFF"
        assert request.messages[2].content == "/etc/passwd"
        store.delete(key)
        assert build(self.line(Message("user", "audio", key))).messages[0].content == b"RIFF"

    def test_reference_audio_with_a_flipped_bit_is_read_again(self) -> None:
        class Flips(MemoryStore):
            def open(self, key: str) -> BinaryIO:
                data, self.left = self.get(key), self.left - 1
                return io.BytesIO(data if self.left < 0 else bytes([data[0] ^ 1]) + data[1:])

            left = MAX_REREADS

        store, key = Flips(), reference_key("job", hashlib.sha256(b"RIFF").hexdigest(), "wav")
        store.put(key, b"RIFF")
        assert (
            self.builder(store).build(self.line(Message("user", "audio", key))).messages[0].content == b"RIFF"
        )
        store.left = MAX_REREADS + 1
        with pytest.raises(StoreError) as caught:
            self.builder(store).build(self.line(Message("user", "audio", key)))
        assert caught.value.code is ErrorCode.STORE_CONFLICT

    def test_audio_outside_the_jobs_references_is_refused(self) -> None:
        with pytest.raises(InputError) as caught:
            self.builder(MemoryStore()).build(self.line(Message("user", "audio", "/etc/passwd")))
        assert caught.value.code is ErrorCode.INPUT_AUDIO_FORBIDDEN

    def test_the_cache_keeps_no_more_than_it_may(self) -> None:
        store = MemoryStore()
        build = self.builder(store, max_bytes=250).build
        lines = [self.line(Message("user", "audio", f"jobs/job/references/{name}.wav")) for name in "abc"]
        for name, line in zip("abc", lines):
            store.put(f"jobs/job/references/{name}.wav", bytes(100))
            build(line)
        store.objects.clear()
        build(lines[2])
        with pytest.raises(InputError):
            build(lines[0])


@pytest.mark.parametrize(
    ("samples", "code"),
    [
        (np.zeros(0, np.float32), ErrorCode.SYNTH_NO_AUDIO),
        (np.full(10, np.nan, np.float32), ErrorCode.SYNTH_NAN),
        (np.array([0.1, np.inf], np.float32), ErrorCode.SYNTH_NAN),
        (np.array([0.1, -np.inf], np.float32), ErrorCode.SYNTH_NAN),
        (np.full(10, 1e-4, np.float32), ErrorCode.SYNTH_SILENT),
    ],
)
def test_speech_that_is_none_is_refused(samples: np.ndarray, code: ErrorCode) -> None:
    with pytest.raises(SynthesisError) as caught:
        check_speech(Speech(samples, 16000))
    assert caught.value.code is code


def test_quiet_speech_is_speech() -> None:
    check_speech(Speech(np.array([0.0, -0.01], np.float32), 16000))


def test_the_priority_of_a_ticket_is_no_part_of_it() -> None:
    assert Ticket("job", 1, 2, priority=5) == Ticket("job", 1, 2)
    assert {Ticket("job", 1, 2, priority=5)} == {Ticket("job", 1, 2)}
