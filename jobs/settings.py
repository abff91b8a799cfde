"""The frozen `Settings` of a process. Sources in order of precedence: command line, environment, `.env`, TOML file,
defaults.

The name of a variable is `SPEECH_` followed by the key; nested keys are joined by two underscores
(`SPEECH_WORKER__THREADS`). The file is `nightjar.toml` in the working directory, or the one that
`SPEECH_CONFIG` names. An unknown key or a wrong value raises a `ConfigError` with the key and its source. The
docstring of a field is its line in `nightjar config list`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import quote, unquote, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jobs.formatting import JsonObject, is_address
from jobs.own_files import STATE_FOLDER, embedded_broker_url
from jobs.times import Times, read_times
from pipelines.errors import ConfigError, invalid, nearest
from pipelines.options import EngineKind, Precision
from pipelines.registry import ModelCard, has_option

log = logging.getLogger(__name__)

PREFIX = "SPEECH_"
CONFIG_FILE = "nightjar.toml"
DEFAULT_BROKER_URL = "redis://127.0.0.1:6379/0"
#: Variables with the prefix that are not settings: the path of the file, and whether to show tracebacks.
NOT_SETTINGS = frozenset({"SPEECH_CONFIG", "SPEECH_DEBUG"})
UNESCAPED_CHARACTER = (
    "its password contains a character that must be percent-encoded (@ is %40, / is %2F, # is %23, ? is %3F)"
)
#: Sources whose keys are variables.
_VARIABLES = ("environment", ".env")
_LISTED = "`nightjar config list` lists all settings."
#: Settings of `engine` that apply only to Qwen3-TTS, and settings that the engine `vllm` lacks or names
#: differently.
_QWEN3_ONLY = {"voice_cache", "codec_rows"}
_NATIVE_ONLY = {"executor", *_QWEN3_ONLY}


def _of_text(read: Callable[[str], object]) -> BeforeValidator:
    """Converts the text of a variable with `read`. A list, which a file may have, is not converted."""
    return BeforeValidator(lambda value: read(value) if isinstance(value, str) else value)


def _parts(text: str, separator: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(separator) if part.strip())


Positive = Annotated[float, Field(gt=0)]
PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
Words = Annotated[tuple[str, ...], _of_text(lambda text: _parts(text, ","))]


class SettingsGroup(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class S3Settings(SettingsGroup):
    """Access to an S3 store. Unset values come from boto3 (environment, profile, instance role)."""

    endpoint_url: str | None = None
    """Address of an S3-compatible server; unset: AWS."""
    region: str | None = None
    """Region of the bucket."""
    access_key_id: str | None = None
    """Access key."""
    secret_access_key: SecretStr | None = None
    """Secret key."""
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """Whether the bucket name is in the path of the URL or in the host name."""


class WorkerSettings(SettingsGroup):
    """One worker process."""

    drain_seconds: Positive = 300.0
    """Maximum seconds in which a worker finishes its items after SIGTERM."""
    item_timeout_seconds: Positive = 600.0
    """Maximum seconds for one item."""
    metrics_port: Port | None = None
    """Port of the Prometheus metrics; unset: no metrics. The workers of `--gpu` use this port and the next
    ones."""
    metrics_address: str = "127.0.0.1"
    """Address of the metrics. `0.0.0.0` opens it to every network."""
    threads: PositiveInt | None = None
    """Threads of the engine. Unset: the fastest measured number."""
    meter_processes: PositiveInt | None = None
    """Processes of the quality meters, one core each. Unset: half of the cores, at most 8."""


class EngineSettings(SettingsGroup):
    """How a worker or `nightjar serve` opens a model's engine. Unset: the best for the device and the
    model."""

    kind: EngineKind = "auto"
    """Engine of models that both engines can run: `native` or `vllm`. `auto`: `native`."""
    slots: PositiveInt | None = None
    """Utterances that run at the same time. Unset: depends on the engine and the GPU's memory
    (docs/models.md)."""
    memory_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the GPU's memory for the engine (`vllm`: for the LM). Unset: 0.85 of the free memory; `vllm`:
    depends on the model."""
    reproducible: bool | None = None
    """Equal requests give equal bits in every batch, at a lower speed. On a CPU they always do."""
    max_context: PositiveInt | None = None
    """Maximum positions of an utterance: prompt and speech."""
    dtype: Precision | None = None
    """Data type of the weights; on `vllm` only of the LM's weights. Unset: bfloat16 on a GPU, float32 on a
    CPU."""
    executor: Literal["auto", "eager", "graph", "megakernel"] = "auto"
    """How a frame is run. `auto`: the best for the GPU. `graph`: CUDA graphs. `eager`: single operations,
    which start faster and run slower. `megakernel`: as `graph`, and faster for one or two Qwen3-TTS
    utterances at a time (docs/qwen3-tts.md)."""
    voice_cache: Path | None = None
    """Qwen3-TTS: folder that keeps encoded cloned voices for later starts. Unset: memory only."""
    codec_rows: Count = 0
    """Qwen3-TTS on a GPU: rows of the codec's continuous batch, such as 256, which needs 7.6 GiB of the GPU's
    memory. 0: batches of similar lengths (docs/qwen3-tts.md)."""


class VllmSettings(SettingsGroup):
    """Settings of the engine `vllm` only."""

    tensor_parallel: PositiveInt = 1
    """Number of GPUs that share one LM."""


class NotifySettings(SettingsGroup):
    """The operator's hook for ended jobs; a job cannot set it."""

    command: Annotated[tuple[str, ...], _of_text(lambda text: tuple(shlex.split(text)))] = ()
    """Command that runs when a job ends, without a shell. The variable is split into words as in a shell; the
    file may have a list of words."""
    timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 30.0
    """Maximum seconds for the command."""


class FlowerSettings(SettingsGroup):
    """The dashboard of the queues."""

    basic_auth: SecretStr | None = None
    """`user:password` for Flower. Flower does not start without it."""
    address: str = "127.0.0.1"
    """Address of the dashboard. `0.0.0.0` opens it to every network."""
    port: Port = 5555
    """Port of the dashboard."""


class ServeSettings(SettingsGroup):
    """The server of `nightjar serve`."""

    address: str = "127.0.0.1"
    """Address of the server. `0.0.0.0` opens it to every network and needs a key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port of the server; 0 takes a free port."""
    api_key: SecretStr | None = None
    """Key that clients must send."""
    api_key_file: Path | None = None
    """File of valid keys, one per line."""
    allowed_hosts: Words = ()
    """Host names, separated by `,`, under which a server without a key answers, besides `localhost` and
    loopback addresses."""
    slots: PositiveInt | None = None
    """Maximum requests in the engine at once. Unset: as many as it can run and queue."""
    streams: Count | None = None
    """Streams that the engine `native` is prepared for before `/health` returns 200. Unset: 128 on a GPU, 8
    on a CPU."""
    spare_process: bool | None = None
    """Keep a process that has imported the model's libraries, so that an engine that dies is replaced sooner.
    Unset: with a GPU."""
    waiting_room: Count = 512
    """Maximum requests that wait in the server before the engine gets them. Further requests get status
    429."""
    request_seconds: Positive = 600.0
    """Maximum seconds for a request, from its slot to its last byte."""
    drain_seconds: Positive = 60.0
    """Maximum seconds for running requests after SIGTERM."""
    text_in: bool | None = None
    """Speak the text of a context while it is being written. Unset: for Qwen3-TTS voices cloned without the
    recording's text. `true`: for all voices of Qwen3-TTS. `false`: sentence by sentence
    (docs/websocket.md)."""
    voices_folder: Path | None = None
    """Folder of stored voices. Unset: `voices` in `home`."""


def _job_options(value: JsonObject) -> JsonObject:
    from jobs.job_options import OptionError, read_options

    try:
        if own := value.keys() & {"name", "idempotency_key"}:
            raise OptionError(own.pop(), "each night has its own", unknown=True)
        return read_options(value)
    except OptionError as error:
        kind = "extra_forbidden" if error.unknown else "job_option"
        raise PydanticCustomError(kind, "{reason}", {"key": error.name, "reason": error.reason}) from None


class Schedule(SettingsGroup):
    """A job that is submitted every night; its key in `schedules` is its name."""

    input: str
    """Path or `s3://` address of the night's file; strftime codes and `{date}` (ISO) are replaced by the
    night's date."""
    store_url: str | None = None
    """Store of this schedule. Unset: `store_url`."""
    exports: Words = ()
    """Export formats that `nightjar nightly` writes after the job, separated by `,`. `report` is also
    possible."""
    export_to: str | None = None
    """Path of each export, with `{format}` and `{date}`. Unset: `datasets/NAME/{date}/{format}` in
    `home`."""
    splits: str | None = None
    """Splits of the exports, for example train=0.98,dev=0.01,test=0.01."""
    export_options: JsonObject = {}
    """Options of the exports by their Python names, such as `unique = true`, and a table for each format with its
    own."""
    #: All other keys are options of the job, by their Python names (`jobs.job_options`).
    options: Annotated[JsonObject, AfterValidator(_job_options)] = {}

    @model_validator(mode="before")
    @classmethod
    def _take_options(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        given = cast("dict[str, Any]", value)
        own = {name: given[name] for name in given if name in cls.model_fields and name != "options"}
        return own | {"options": {name: given[name] for name in given if name not in own}}


class Settings(SettingsGroup):
    """All settings of Nightjar. Build it with `load_settings`; the constructor reads no other sources."""

    home: Path = Path("out")
    """Default folder for ledger, store and broker address of `nightjar run`."""
    database_url: SecretStr | None = None
    """Ledger: `sqlite:///path` or `postgresql://…`; unset: SQLite in `home`."""
    broker_url: SecretStr | None = None
    """Broker: `redis://…`; unset: the embedded broker of `home` while it runs, else
    `redis://127.0.0.1:6379/0`."""
    store_url: str | None = None
    """Store: a folder or `s3://bucket/prefix`; unset: `home`."""
    audio_roots: Annotated[tuple[Path, ...], _of_text(lambda text: _parts(text, os.pathsep))] = ()
    """Folders from which reference audio may be read, separated by `:`. Unset: only the input file's
    folder."""
    price_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None
    """Price per GPU hour, for the cost in `nightjar status`."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _of_text(str.lower)] = "info"
    """Minimum level of log messages."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """Format of logs. `auto`: console on a terminal, else JSON."""
    s3: S3Settings = S3Settings()
    worker: WorkerSettings = WorkerSettings()
    engine: EngineSettings = EngineSettings()
    vllm: VllmSettings = VllmSettings()
    notify: NotifySettings = NotifySettings()
    flower: FlowerSettings = FlowerSettings()
    serve: ServeSettings = ServeSettings()
    schedules: dict[str, Schedule] = {}
    """Nightly jobs by name."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _times: Times = PrivateAttr(default_factory=read_times)

    @field_validator("home", "store_url", mode="before")
    @classmethod
    def _refuse_other_places(cls, value: object, info: ValidationInfo) -> object:
        # An empty path would mean the working directory, and an address would mean a folder with this name in
        # it.
        text = "" if value is None else str(value)
        if isinstance(value, str) and not text.strip():
            raise ValueError("it is empty")
        if info.field_name == "home" and is_address(text):
            raise ValueError(
                f"{text!r} is an address, but this must be a folder of this host; {PREFIX}STORE_URL puts the audio into a bucket"
            )
        if info.field_name == "store_url" and is_address(text) and "://" not in text:
            raise ValueError("an address has two slashes, such as s3://BUCKET/PREFIX")
        # `..` after a link is the parent of its target.
        return os.path.realpath(text) if ".." in text.split("/") and not is_address(text) else value

    @field_validator("database_url", "broker_url")
    @classmethod
    def _refuse_unescaped_password(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is not None:
            # The password of a database URL ends at the first `@`, that of other URLs at the last one.
            _check_urls(value.get_secret_value(), max_ats=1 if info.field_name == "database_url" else None)
        return value

    @property
    def times(self) -> Times:
        """The times and sizes of the protocol, which are not settings."""
        return self._times

    @property
    def state_folder(self) -> Path:
        """The folder of the embedded ledger, lock and logs."""
        return self.home.absolute() / STATE_FOLDER

    @property
    def ledger_url(self) -> str:
        """The URL of the ledger, with its password."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return sqlite_url(self.state_folder / "ledger.sqlite")

    @property
    def effective_broker_url(self) -> str:
        """The URL of the broker, with its password."""
        if self.broker_url is not None:
            return self.broker_url.get_secret_value()
        return embedded_broker_url(self.state_folder) or DEFAULT_BROKER_URL

    @property
    def effective_store_url(self) -> str:
        return self.store_url if self.store_url is not None else str(self.home.absolute())

    def export_folder(self, job_id: str, format: str, where: str | None) -> Path:
        """The default folder of an export, which depends on its filter."""
        name = format if where is None else f"{format}-{hashlib.sha256(where.encode()).hexdigest()[:16]}"
        return self.home.absolute() / "exports" / job_id / name

    def chosen_engine(self, card: ModelCard) -> Literal["cpu", "native", "vllm"]:
        """The engine of a model. Raises `ConfigError` (`config.invalid`) if the chosen engine cannot run
        it."""
        kind = self.engine.kind
        if kind == "auto" or card.engine == "cpu":
            return card.engine
        if kind not in (card.engines or (card.engine,)):
            raise invalid(
                f"The engine {kind!r} was chosen, but {card.name} runs on the engine {card.engine!r} only.",
                "Unset SPEECH_ENGINE__KIND, or set it to auto.",
            )
        return kind

    def engine_options(self, card: ModelCard) -> dict[str, Any]:
        """The options of `open_pipeline` for a model: the settings of its engine that are set. Raises the
        errors of `chosen_engine`."""
        engine = self.chosen_engine(card)
        if engine != "vllm" and self.vllm.tensor_parallel > 1:
            log.warning(
                "SPEECH_VLLM__TENSOR_PARALLEL has no effect: %s runs on the engine %s", card.name, engine
            )
        if engine == "cpu":
            return {} if self.worker.threads is None else {"threads": self.worker.threads}
        others = {"kind"}
        if engine == "vllm":
            others |= _NATIVE_ONLY
        elif not has_option(card, "voice_cache"):
            others |= _QWEN3_ONLY
        options = self.engine.model_dump(exclude_defaults=True, mode="json", exclude=others)
        if engine == "vllm":
            options |= self.vllm.model_dump(exclude_defaults=True)
            options |= {} if self.engine.executor == "auto" else {"eager": self.engine.executor == "eager"}
        return options | ({"engine": engine} if card.engines else {})

    def origin(self, key: str) -> str:
        """The source of a dotted key: `command line`, `environment`, `.env`, a file's name, or `default`."""
        while key:
            if key in self._origins:
                return self._origins[key]
            key = key.rpartition(".")[0]
        return "default"


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file, with special characters escaped."""
    return f"sqlite:///{quote(str(path))}"


def sqlite_path(url: str) -> Path | None:
    """The file of a `sqlite:///` URL; None for another database."""
    scheme, _, path = url.partition(":///")
    return Path(unquote(path.partition("?")[0])) if scheme.startswith("sqlite") else None


def _check_urls(urls: str, max_ats: int | None) -> None:
    """Raises `ValueError` if a special character in a password ends the address too early, because errors would show
    the rest of the password as a host or port."""
    for url in urls.split(";"):
        try:
            parts = urlsplit(url)
            # The rest of a password is not a valid port.
            whole = parts.port != 0
        except ValueError:
            raise ValueError(UNESCAPED_CHARACTER) from None
        cut = bool(parts.netloc) and "@" in parts.path + parts.fragment
        if cut or not whole or (max_ats is not None and parts.netloc.count("@") > max_ats):
            raise ValueError(UNESCAPED_CHARACTER)


def load_settings(**overrides: Any) -> Settings:
    """The settings of this process. `overrides`: settings of the command line (None: not given).

    Raises `ConfigError` with `config.invalid`.
    """
    file_name = os.environ.get("SPEECH_CONFIG")
    file = Path(file_name or CONFIG_FILE)
    layers = (
        (
            file.name,
            read_toml(file, "configuration file", "SPEECH_CONFIG", required=bool(file_name)),
        ),
        (".env", _read_variables(_dotenv(), ".env")),
        ("environment", _read_variables(os.environ, "environment")),
        ("command line", {key: value for key, value in overrides.items() if value is not None}),
    )
    merged: JsonObject = {}
    origins: dict[str, str] = {}
    for origin, values in layers:
        _merge(merged, values, origin, origins)
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        raise _config_error(error, origins) from None
    settings._origins.update(origins)  # pyright: ignore[reportPrivateUsage]
    return settings


def read_toml(path: Path, name: str, option: str, required: bool = True) -> JsonObject:
    """The tables of a TOML file that `option` gives, none of a missing one that is not required. Raises
    `config.invalid`."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if not required and isinstance(error, FileNotFoundError):
            return {}
        raise invalid(
            f"The {name} {path} cannot be read: {getattr(error, 'strerror', error)}.",
            f"Make it a readable TOML file, or correct {option}.",
        ) from None


def _dotenv() -> Mapping[str, str]:
    path = Path(".env")
    if not path.is_file():
        return {}
    from dotenv import dotenv_values

    try:
        return {name: value for name, value in dotenv_values(path).items() if value is not None}
    except (OSError, ValueError) as error:
        raise invalid(f"The file .env cannot be read: {error}.", "Make it readable or remove it.") from None


def _read_variables(variables: Mapping[str, str], origin: str) -> JsonObject:
    """Converts `SPEECH_A__B=x` to `{"a": {"b": "x"}}`, and decodes values that are JSON objects."""
    tree: JsonObject = {}
    for name, value in sorted(variables.items()):
        variable = name.upper()
        if variable.startswith("NIGHTJAR_"):
            _refuse_other_prefix(variable, origin)
        if not variable.startswith(PREFIX) or variable in NOT_SETTINGS:
            continue
        *parents, leaf = variable.removeprefix(PREFIX).lower().split("__")
        node: Any = tree
        for part in parents:
            node = node.setdefault(part, {})
            if not hasattr(node, "setdefault"):
                raise invalid(
                    f"{name} ({origin}) and a value of its whole group are both set.", "Set one of the two."
                )
        node[leaf] = value
        if value.startswith("{"):
            with suppress(ValueError):
                node[leaf] = json.loads(value)
    return tree


def _merge(
    into: JsonObject, values: Mapping[str, Any], origin: str, origins: dict[str, str], path: str = ""
) -> None:
    for key, value in values.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _merge(into[key], cast("Mapping[str, Any]", value), origin, origins, f"{name}.")
        else:
            into[key] = value
            origins[name] = origin


def _config_error(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    errors = error.errors(include_url=False, include_input=False)
    # A misspelled key may be the cause of a missing one.
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    place = [str(part) for part in first["loc"]]
    if (option := first.get("ctx", {}).get("key")) is not None:
        place[-1] = option
    key = ".".join(place)
    # The message about an unknown group names the key that was set in it.
    given = next(
        (name for name in origins if f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.")), ""
    )
    if first["type"] == "extra_forbidden":
        key = given or key
        origin = origins.get(given, "")
        near = nearest(key, setting_keys(key), variable_of if origin in _VARIABLES else str)
        return invalid(f"There is no setting {key}{_set_in(key, origin)}.", f"{near}{_LISTED}")
    where = _set_in(key, origins.get(given, ""))
    reason = first["msg"].removeprefix("Value error, ")
    return invalid(f"The setting {key}{where} cannot be used: {reason}.", f"Correct it; {_LISTED}")


def _set_in(key: str, origin: str) -> str:
    """The source of a key in parentheses; empty if it was not set."""
    return f" ({origin}{f' {variable_of(key)}' if origin in _VARIABLES else ''})" if origin else ""


def _refuse_other_prefix(variable: str, origin: str) -> None:
    """Raises `config.invalid` for a setting with the wrong prefix, which would have no effect."""
    rest = variable.removeprefix("NIGHTJAR_")
    key = rest.lower().replace("__", ".")
    if PREFIX + rest in NOT_SETTINGS or key in setting_keys(key):
        raise invalid(
            f"There is no setting {variable} ({origin}).",
            f"Did you mean {PREFIX}{rest}? All settings begin with {PREFIX}.",
        )


def variable_of(key: str) -> str:
    """The environment variable of a dotted key."""
    return f"{PREFIX}{key.replace('.', '__').upper()}"


def setting_fields(
    group: type[SettingsGroup] = Settings, path: str = ""
) -> Iterator[tuple[str, type[SettingsGroup]]]:
    """Yields (dotted key, group) of all settings. Keys of a schedule contain `NAME`."""
    for name, field in group.model_fields.items():
        inner = Schedule if name == "schedules" else field.annotation
        if isinstance(inner, type) and issubclass(inner, SettingsGroup):
            below = "schedules.NAME" if inner is Schedule else name
            yield from setting_fields(inner, f"{path}{below}.")
        else:
            yield f"{path}{name}", group


def setting_keys(like: str) -> set[str]:
    """The dotted keys of all settings, and of the job options of the schedule that `like` belongs to."""
    from jobs.job_options import hints

    schedule = like.split(".")[1] if like.startswith("schedules.") else "NAME"
    keys = [*(key for key, _ in setting_fields()), *(f"schedules.NAME.{option}" for option in hints())]
    return {key.replace(".NAME.", f".{schedule}.") for key in keys}
