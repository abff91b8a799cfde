"""Settings: which source wins, what is refused, and that secrets stay secret."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from pydantic import ValidationError

from jobs.settings import Settings, load_settings
from pipelines.errors import ConfigError, ErrorCode
from pipelines.registry import PUBLISHED, describe


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_defaults_live_in_the_home(tmp_path: Path) -> None:
    settings = load_settings()
    assert settings.ledger_url == f"sqlite:///{tmp_path}/out/.nightjar/ledger.sqlite"
    assert settings.effective_store_url == str(tmp_path / "out")
    assert settings.effective_broker_url == "redis://127.0.0.1:6379/0"
    assert settings.origin("home") == "default"


def test_two_dots_after_a_link_lead_to_the_parent_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/deep")
    settings = load_settings(home="link/../o", store_url="link/../s")
    assert settings.home == tmp_path / "real" / "o"
    assert settings.effective_store_url == str(tmp_path / "real" / "s")
    address = "s3://bucket/a/../b"
    assert load_settings(store_url=address).effective_store_url == address
    assert load_settings(home="link").home == Path("link")


def test_a_file_is_utf_8_whatever_the_locale_is(tmp_path: Path) -> None:
    (tmp_path / "nightjar.toml").write_text('store_url = "höme"\n', "utf-8")
    code = "from jobs.settings import load_settings; print(ascii(load_settings().store_url))"
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    said = subprocess.check_output([sys.executable, "-c", code], env=os.environ | variables, text=True)
    assert said == "'h\\xf6me'\n"


def test_command_line_over_environment_over_dotenv_over_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nightjar.toml").write_text(
        'home = "file"\nstore_url = "file"\nlog_level = "error"\n[worker]\nthreads = 1\n'
    )
    (tmp_path / ".env").write_text("SPEECH_HOME=dotenv\nSPEECH_STORE_URL=dotenv\nOTHER=1\n")
    monkeypatch.setenv("SPEECH_HOME", "environment")
    settings = load_settings(home=None)
    assert (settings.home, settings.store_url, settings.log_level) == (Path("environment"), "dotenv", "error")
    assert [
        settings.origin(key) for key in ("home", "store_url", "worker.threads", "worker.item_timeout_seconds")
    ] == [
        "environment",
        ".env",
        "nightjar.toml",
        "default",
    ]
    settings = load_settings(home="line", worker={"meter_processes": 7})
    assert (str(settings.home), settings.origin("home")) == ("line", "command line")
    assert (settings.worker.threads, settings.worker.meter_processes) == (1, 7)


def test_file_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "night.toml").write_text('[schedules.news]\ninput = "in/%Y.jsonl"\npriority = 3\n')
    monkeypatch.setenv("SPEECH_CONFIG", "night.toml")
    settings = load_settings()
    assert settings.schedules["news"].options == {"priority": 3}
    assert settings.origin("schedules.news.priority") == "night.toml"


def test_examples_hold_no_settings_that_act(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = Path(__file__).parents[3] / "examples"
    for folder in (examples, *(path for path in examples.rglob("*") if path.is_dir())):
        monkeypatch.chdir(folder)
        assert load_settings() == Settings(), folder


def test_nested_variables_and_json_groups_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECH_WORKER", '{"threads": 3}')
    monkeypatch.setenv("SPEECH_WORKER__METER_PROCESSES", "9")
    monkeypatch.setenv("SPEECH_SCHEDULES__NEWS__INPUT", "x.jsonl")
    settings = load_settings()
    assert (settings.worker.threads, settings.worker.meter_processes) == (3, 9)
    assert settings.schedules["news"].input == "x.jsonl"


def test_audio_roots_are_split_like_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECH_AUDIO_ROOTS", "/a:/b")
    assert load_settings().audio_roots == (Path("/a"), Path("/b"))


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("SPEECH_WORKER__THREADS", "many", "worker.threads"),
        ("SPEECH_WORKER__DRAIN_SECONDS", "-1", "worker.drain_seconds"),
        ("SPEECH_LOG_LEVEL", "loud", "log_level"),
        ("SPEECH_FLOWER__PORT", "70000", "flower.port"),
        ("SPEECH_WORKR__THREADS", "1", "workr"),
        ("SPEECH_WORKER__X__Y", "1", "worker.x"),
        ("SPEECH_NONSENSE", "1", "nonsense"),
        ("SPEECH_SCHEDULES__NEWS__PRIORITY", "3", "schedules.news.input"),
    ],
)
def test_wrong_values_and_unknown_keys_name_key_and_origin(
    name: str, value: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert key in caught.value.message
    assert "environment" in caught.value.message or key.endswith(".input")
    assert caught.value.advice


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("SPEECH_WORKR__THREADS", "SPEECH_WORKER__THREADS"),
        ("SPEECH_WORKER_THREADS", "SPEECH_WORKER__THREADS"),
        ("SPEECH_WORKER__TREADS", "SPEECH_WORKER__THREADS"),
        ("speech_databse_url", "SPEECH_DATABASE_URL"),
        ("SPEECH_SCHEDULES__NEWS__INPTU", "SPEECH_SCHEDULES__NEWS__INPUT"),
        ("NIGHTJAR_BROKER_URL", "SPEECH_BROKER_URL"),
        ("NIGHTJAR_WORKER__THREADS", "SPEECH_WORKER__THREADS"),
        ("NIGHTJAR_SCHEDULES__NEWS__INPUT", "SPEECH_SCHEDULES__NEWS__INPUT"),
        ("NIGHTJAR_CONFIG", "SPEECH_CONFIG"),
    ],
)
def test_a_variable_that_is_no_setting_is_answered_with_the_nearest(
    name: str, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match="There is no setting") as caught:
        load_settings()
    assert name.upper() in caught.value.message
    assert caught.value.advice.startswith(f"Did you mean {near}? ")


def test_other_variables_of_a_program_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NIGHTJAR_JOB", "NIGHTJAR_VERSION", "NIGHTJAR", "NIGHTJAR_"):
        monkeypatch.setenv(name, "1")
    assert load_settings() == Settings()


@pytest.mark.parametrize(
    ("content", "near"),
    [
        ("[workr]\nthreads = 1", "worker.threads"),
        ("hom = 'x'", "home"),
        ("[schedules.news]\ninputs = 'x'", "schedules.news.input"),
    ],
)
def test_a_key_of_a_file_that_is_no_setting_is_answered_with_the_nearest(
    content: str, near: str, tmp_path: Path
) -> None:
    (tmp_path / "nightjar.toml").write_text(content)
    with pytest.raises(ConfigError, match=r"There is no setting .*\(nightjar\.toml\)") as caught:
        load_settings()
    assert caught.value.advice.startswith(f"Did you mean {near}? ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLOTS", "0"),
        ("MEMORY_SHARE", "2"),
        ("MEMORY_SHARE", "0"),
        ("MAX_CONTEXT", "-1"),
        ("DTYPE", "int3"),
        ("EXECUTOR", "fast"),
        ("KIND", "fast"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_by_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"SPEECH_ENGINE__{name}", value)
    with pytest.raises(
        ConfigError,
        match=f"engine.{name.lower()} .environment SPEECH_ENGINE__{name}. cannot be used: Input should be",
    ):
        load_settings()


def test_an_engine_is_told_what_was_set_and_nothing_else() -> None:
    nothing = load_settings()
    cards = voice, qwen, spoken = (
        describe("hibari"),
        PUBLISHED["qwen3-tts-0.6b-base"][2],
        replace(describe("hibari"), engine="vllm"),
    )
    assert [nothing.engine_options(card) for card in cards] == [{}, {}, {}]
    settings = load_settings(
        engine={
            "slots": 5,
            "memory_share": 0.5,
            "executor": "graph",
            "reproducible": False,
            "voice_cache": "/voices",
        },
        vllm={"tensor_parallel": 2},
        worker={"threads": 3},
    )
    assert settings.engine_options(voice) == {"threads": 3}
    common = {"slots": 5, "memory_share": 0.5, "reproducible": False}
    assert settings.engine_options(qwen) == common | {"executor": "graph", "voice_cache": "/voices"}
    assert settings.engine_options(spoken) == common | {"eager": False, "tensor_parallel": 2}


def test_the_engine_of_a_model_that_both_can_run_is_chosen() -> None:
    spark = replace(PUBLISHED["qwen3-tts-0.6b-base"][2], family="spark_tts", engines=("native", "vllm"))
    asked = {
        "engine": {"slots": 5, "voice_cache": "/voices", "executor": "graph"},
        "vllm": {"tensor_parallel": 2},
    }
    automatic = load_settings(**asked)
    native, vllm = {"slots": 5, "executor": "graph"}, {"slots": 5, "tensor_parallel": 2, "eager": False}
    assert automatic.engine_options(spark) == {"engine": "native", **native}, "it keeps no voices"
    assert automatic.engine_options(replace(spark, engine="vllm")) == {"engine": "vllm", **vllm}
    for kind, options in (("native", native), ("vllm", vllm)):
        chosen = load_settings(**asked | {"engine": asked["engine"] | {"kind": kind}})
        assert chosen.engine_options(spark) == {"engine": kind, **options}
        assert chosen.engine_options(replace(spark, engine="vllm")) == {"engine": kind, **options}
        assert chosen.engine_options(describe("hibari")) == {}


def test_gpus_that_share_an_lm_on_another_engine_than_vllm_are_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    qwen = PUBLISHED["qwen3-tts-0.6b-base"][2]
    load_settings().engine_options(qwen)
    settings = load_settings(vllm={"tensor_parallel": 2})
    settings.engine_options(replace(qwen, engine="vllm"))
    assert caplog.messages == []
    settings.engine_options(qwen)
    assert caplog.messages == [
        f"SPEECH_VLLM__TENSOR_PARALLEL has no effect: {qwen.name} runs on the engine native"
    ]


def test_a_time_of_the_protocol_is_no_setting_and_can_be_replaced_for_a_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NIGHTJAR_TIMES__LEASE_SECONDS", "6")
    monkeypatch.setenv("NIGHTJAR_TIMES__SHARDS_IN_FLIGHT", "2")
    times = load_settings().times
    assert (times.lease_seconds, times.shards_in_flight, times.commit_items) == (6.0, 2, 256)
    monkeypatch.setenv("SPEECH_WORKER__LEASE_SECONDS", "6")
    with pytest.raises(ConfigError, match=r"There is no setting worker\.lease_seconds"):
        load_settings()


@pytest.mark.parametrize(("kind", "engine"), [("vllm", "native"), ("native", "vllm")])
def test_an_engine_that_cannot_run_a_model_is_refused_in_a_sentence(
    kind: str, engine: Literal["native", "vllm"]
) -> None:
    card = replace(PUBLISHED["qwen3-tts-0.6b-base"][2], engine=engine)
    settings = load_settings(engine={"kind": kind})
    with pytest.raises(
        ConfigError, match=f"'{kind}' was chosen, but {card.name} runs on the engine '{engine}' only"
    ) as caught:
        settings.engine_options(card)
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("content", ["home = ", "\x00", "nonsense = 1", "worker = 1", "home = ['x']"])
def test_bad_files_are_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "nightjar.toml").write_text(content)
    with pytest.raises(ConfigError, match=r"nightjar\.toml"):
        load_settings()


def test_a_named_file_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECH_CONFIG", "missing.toml")
    with pytest.raises(ConfigError, match=r"missing\.toml.*No such file") as caught:
        load_settings()
    assert "SPEECH_CONFIG" in caught.value.advice


def test_a_secret_never_shows_in_repr_or_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECH_DATABASE_URL", "postgresql://u:hunter2@h/db")
    monkeypatch.setenv("SPEECH_S3__SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("SPEECH_FLOWER__BASIC_AUTH", "me:hunter2")
    settings = load_settings()
    assert "hunter2" not in repr(settings)
    assert "hunter2" in settings.ledger_url
    monkeypatch.setenv("SPEECH_DATABASE_URL", '{"hunter2": "hunter2"}')
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("database_url", "postgresql://u:hunt@er2@h/db"),
        ("database_url", "postgresql://u:hunt/er2@h/db"),
        ("database_url", "postgresql://u:hunt#er2@h:5432/db"),
        ("broker_url", "redis://:hunt/er2@h:6379/0"),
        ("broker_url", "redis://:12/hunter2@h:6379/0"),
        ("broker_url", "redis://:hunt?er2@h:6379/0"),
        ("broker_url", "sentinel://:ok@h:1/0;sentinel://:hunt/er2@h:2/0"),
    ],
)
def test_an_address_whose_password_cuts_it_in_two_is_refused_unseen(key: str, url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(**{key: url})
    assert key in caught.value.message
    assert "percent" in caught.value.message
    assert "hunt" not in str(caught.value)
    assert "er2" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("database_url", "postgresql://u:p%40s%2Fs@h:5432/db?application_name=a@b"),
        ("database_url", "postgresql://u@h/db"),
        ("database_url", "postgresql:///db?host=/run/x@y"),
        ("database_url", "sqlite:////home/a@b/c:d.sqlite"),
        ("broker_url", "redis://:p@ss@h:6379/0"),
        ("broker_url", "redis://[::1]:6379/0"),
        ("broker_url", "redis+socket:///run/a@b:c?virtual_host=0"),
        ("broker_url", "sentinel://:pw@h1:26379/0;sentinel://:pw@h2:26379/0"),
        ("broker_url", "amqp://u:p@h:5672//"),
    ],
)
def test_addresses_that_their_libraries_read_are_taken(key: str, url: str) -> None:
    settings = load_settings(**{key: url})
    assert getattr(settings, key).get_secret_value() == url


def test_settings_are_frozen() -> None:
    settings = Settings(home=Path("x"))
    with pytest.raises(ValidationError):
        settings.home = Path("y")  # pyright: ignore[reportAttributeAccessIssue]
