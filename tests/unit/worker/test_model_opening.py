"""A model that is opened ahead of its first shard: taken once, closed where nobody wants it, and its error
is told to who asks for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobs.engine_process import spare_variables, start_spare
from jobs.settings import EngineSettings, Settings
from pipelines.engine_process.client import EngineProcess
from pipelines.errors import ErrorCode, ModelError
from tests.support.native_plugin import NAME, installed
from tests.support.run_kit import until
from tests.support.services import children
from worker.models import Preload, open_model


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The processes before a test, whose models have processes of their own."""
    for name, value in installed(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(tmp_path))
    return set(children(os.getpid()))


def test_a_preloaded_model_is_taken_once(before: set[int]) -> None:
    preload = Preload(Settings(), NAME)
    pipeline = preload.take(NAME)
    assert isinstance(pipeline, EngineProcess)
    assert preload.take(NAME) is None, "the next one is opened anew"
    preload.close()
    assert pipeline.pid in set(children(os.getpid())) - before, "who took it closes it"
    pipeline.close()


def test_a_model_opens_in_the_process_that_was_started_before_the_settings_were_known(
    before: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in spare_variables(Settings(), NAME, "no_such_family").items():
        monkeypatch.setenv(name, value)
    start_spare()
    start_spare()  # its own children must not start one too
    until(lambda: set(children(os.getpid())) - before, "it is not started")
    (early,) = set(children(os.getpid())) - before
    pipeline = Preload(Settings(engine=EngineSettings(slots=3)), NAME).take(NAME)
    assert isinstance(pipeline, EngineProcess)
    try:
        assert (pipeline.pid, pipeline.info.slots) == (early, 3)
        again = open_model(Settings(), NAME, True)
        again.close()
        assert isinstance(again, EngineProcess)
        assert again.pid != early, "the next one has a process of its own"
    finally:
        pipeline.close()


def test_a_preloaded_model_makes_room_for_another_one(before: set[int]) -> None:
    assert Preload(Settings(), NAME).take("b") is None
    assert set(children(os.getpid())) == before, "two models are open"


def test_a_preloaded_model_that_nobody_took_is_closed(before: set[int]) -> None:
    preload = Preload(Settings(), NAME)
    until(lambda: set(children(os.getpid())) - before, "its engine is not opened")
    preload.close()
    until(lambda: set(children(os.getpid())) == before, "its engine stays")


def test_a_model_that_cannot_be_opened_is_said_to_who_asks_for_it() -> None:
    with pytest.raises(ModelError) as caught:
        Preload(Settings(), "no-such-model").take("no-such-model")
    assert caught.value.code is ErrorCode.MODEL_UNKNOWN


def test_a_model_without_a_process_is_not_preloaded() -> None:
    assert Preload(Settings(), "hibari").take("hibari") is None
