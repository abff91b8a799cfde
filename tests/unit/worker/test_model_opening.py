"""A model that is opened ahead of its first shard: taken once, closed where nobody wants it, and its error
is told to who asks for it."""

from __future__ import annotations

import pytest

from jobs.settings import Settings
from pipelines.errors import ErrorCode, ModelError
from tests.support.fakes import FakePipeline
from tests.support.run_kit import until
from worker import models
from worker.models import Preload


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> FakePipeline:
    pipeline = FakePipeline()
    monkeypatch.setattr(models, "has_process", lambda *_: True)
    monkeypatch.setattr(models, "open_model", lambda *_: pipeline)
    return pipeline


def test_a_preloaded_model_is_taken_once(opened: FakePipeline) -> None:
    preload = Preload(Settings(), "a")
    assert preload.take("a") is opened
    assert preload.take("a") is None, "the next one is opened anew"
    preload.close()
    assert opened.closes == 0, "who took it closes it"


def test_a_preloaded_model_makes_room_for_another_one(opened: FakePipeline) -> None:
    assert Preload(Settings(), "a").take("b") is None
    assert opened.closes == 1, "two models are open"


def test_a_preloaded_model_that_nobody_took_is_closed(opened: FakePipeline) -> None:
    Preload(Settings(), "a").close()
    until(lambda: opened.closes == 1, "its engine stays")


def test_a_model_that_cannot_be_opened_is_said_to_who_asks_for_it() -> None:
    with pytest.raises(ModelError) as caught:
        Preload(Settings(), "no-such-model").take("no-such-model")
    assert caught.value.code is ErrorCode.MODEL_UNKNOWN


def test_a_model_without_a_process_is_not_preloaded() -> None:
    assert Preload(Settings(), "hibari").take("hibari") is None
