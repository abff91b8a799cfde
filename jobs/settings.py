"""One frozen `Settings`, built once and passed down: command line over environment over `.env` over TOML over defaults.

Environment names are `SPEECH_` and the key, nested keys joined by two underscores (`SPEECH_WORKER__LEASE_SECONDS`). The file is
`nightjar.toml` in the working directory, or what `SPEECH_CONFIG` names. An unknown key or a wrong value is a `ConfigError` that
names the key and where it was set.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import quote, unquote, urlsplit

from pydantic import Field, PrivateAttr, SecretStr, ValidationError, ValidationInfo, field_validator

from jobs.formatting import is_address
from jobs.ledger.location import STATE_FOLDER, embedded_broker_url
from jobs.settings_groups import (
    CUT_ADDRESS,
    DispatchSettings,
    EngineSettings,
    FlowerSettings,
    LedgerSettings,
    NotifySettings,
    S3Settings,
    Schedule,
    ServeSettings,
    SettingsGroup,
    ShardSettings,
    VllmSettings,
    WorkerSettings,
    has_port,
)
from pipelines.errors import ConfigError, ErrorCode, nearest
from pipelines.registry import ModelCard, has_option

PREFIX = "SPEECH_"
CONFIG_FILE = "nightjar.toml"
DEFAULT_BROKER_URL = "redis://127.0.0.1:6379/0"
#: Settings that have another name now.
RENAMED = {
    "worker.waiting_room": "engine.waiting_room",
    "vllm.slots": "engine.slots",
    "vllm.memory_share": "engine.memory_share",
    "vllm.max_context": "engine.max_context",
    "vllm.dtype": "engine.dtype",
    "vllm.eager": "engine.executor",
}
#: Variables with the prefix that are no settings: where the file is, and whether a bug shows its traceback.
NOT_SETTINGS = frozenset({"SPEECH_CONFIG", "SPEECH_DEBUG"})


#: Of `engine`: what Qwen3-TTS alone has, which keeps cloned voices; what the engine vllm has not, or has by another name.
_QWEN3_ONLY = {"voice_cache", "voice_cache_mib", "codec_rows"}
_NATIVE_ONLY = {"executor", "prefill", *_QWEN3_ONLY}


class Settings(SettingsGroup):
    """Every setting of Nightjar. Build it with `load_settings`; a direct call takes only what it is given."""

    home: Path = Field(default=Path("out"), description="Default folder for ledger, store and broker address of `nightjar run`.")
    database_url: SecretStr | None = Field(
        default=None, description="Ledger: `sqlite:///path` or `postgresql://…`; unset: SQLite in `home`."
    )
    broker_url: SecretStr | None = Field(
        default=None,
        description="Broker: `redis://…`; unset: the embedded broker of `home` while it runs, else `redis://127.0.0.1:6379/0`.",
    )
    store_url: str | None = Field(default=None, description="Store: a folder or `s3://bucket/prefix`; unset: `home`.")
    audio_roots: tuple[Path, ...] = Field(
        default=(), description="Folders from which reference audio may be read, separated by `:`. Unset: only the input file's folder."
    )
    price_per_gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Price per GPU hour, for the cost in `nightjar status`."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Minimum level of log messages.")
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto", description="Format of logs. `auto`: console on a terminal, else JSON."
    )
    s3: S3Settings = Field(default=S3Settings(), description="The S3 store.")
    worker: WorkerSettings = Field(default=WorkerSettings(), description="Worker processes.")
    engine: EngineSettings = Field(default=EngineSettings(), description="The engine of a model.")
    vllm: VllmSettings = Field(default=VllmSettings(), description="What only vLLM has.")
    ledger: LedgerSettings = Field(default=LedgerSettings(), description="Waiting on the ledger.")
    dispatch: DispatchSettings = Field(default=DispatchSettings(), description="Dispatch and reconciliation.")
    shard: ShardSettings = Field(default=ShardSettings(), description="Cutting of jobs.")
    notify: NotifySettings = Field(default=NotifySettings(), description="The hook at a job's end.")
    flower: FlowerSettings = Field(default=FlowerSettings(), description="The dashboard.")
    serve: ServeSettings = Field(default=ServeSettings(), description="The server.")
    schedules: dict[str, Schedule] = Field(default={}, description="Nightly jobs by name.")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("audio_roots", mode="before")
    @classmethod
    def _split_roots(cls, value: object) -> object:
        return tuple(part for part in value.split(os.pathsep) if part) if isinstance(value, str) else value

    @field_validator("home", "store_url", mode="before")
    @classmethod
    def _refuse_no_folder(cls, value: object) -> object:
        # An empty path would be the working directory, which nobody named.
        if isinstance(value, str) and not value.strip():
            raise ValueError("it is empty")
        return value

    @field_validator("home", "store_url", mode="before")
    @classmethod
    def _refuse_other_places(cls, value: object, info: ValidationInfo) -> object:
        # As a path it would be a folder of this name in the working directory.
        text = str(value)
        if info.field_name == "home" and is_address(text):
            raise ValueError(f"{text!r} is an address, and this is a folder of this host; {PREFIX}STORE_URL puts the audio into a bucket")
        if info.field_name == "store_url" and is_address(text) and "://" not in text:
            raise ValueError("an address has two slashes, as in s3://BUCKET/PREFIX")
        return value

    @field_validator("database_url", "broker_url")
    @classmethod
    def _refuse_cut_url(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is not None:
            # The password of a database URL ends at its first `@`; others end at the last one.
            _check_urls(value.get_secret_value(), most_ats=1 if info.field_name == "database_url" else None)
        return value

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower_level(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @property
    def state_folder(self) -> Path:
        """Where the embedded default keeps its ledger, lock and logs."""
        return self.home.absolute() / STATE_FOLDER

    @property
    def ledger_url(self) -> str:
        """The ledger, with its password."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return sqlite_url(self.state_folder / "ledger.sqlite")

    @property
    def effective_broker_url(self) -> str:
        """The broker, with its password."""
        if self.broker_url is not None:
            return self.broker_url.get_secret_value()
        return embedded_broker_url(self.state_folder) or DEFAULT_BROKER_URL

    @property
    def effective_store_url(self) -> str:
        return self.store_url if self.store_url is not None else str(self.home.absolute())

    def export_folder(self, job_id: str, format: str, where: str | None) -> Path:
        """Where an export is written that was not given a place; one with another filter is another export."""
        name = format if where is None else f"{format}-{hashlib.sha256(where.encode()).hexdigest()[:16]}"
        return self.home.absolute() / "exports" / job_id / name

    def chosen_engine(self, card: ModelCard) -> Literal["cpu", "native", "vllm"]:
        """The engine that a model is opened on. Raises `ConfigError` (`config.invalid`) for one that cannot run it."""
        kind = self.engine.kind
        if kind == "auto" or card.engine == "cpu":
            return card.engine
        if kind not in (card.engines or (card.engine,)):
            message = f"The engine {kind!r} was chosen, but {card.name} runs on the engine {card.engine!r} only."
            raise _invalid(message, "Unset SPEECH_ENGINE__KIND, or set it to auto.")
        return kind

    def engine_options(self, card: ModelCard) -> dict[str, Any]:
        """Options of `open_pipeline` for a model: what was set of its engine, and nothing else. Raises as `chosen_engine`."""
        engine = self.chosen_engine(card)
        options: dict[str, Any]
        if engine == "cpu":
            options = {"threads": self.worker.threads, "waiting_room": self.engine.waiting_room}
        elif engine == "native":
            left_out = {"kind"} if has_option(card, "voice_cache") else {"kind", *_QWEN3_ONLY}
            options = self.engine.model_dump(exclude_defaults=True, mode="json", exclude=left_out)
        else:
            options = self.engine.model_dump(exclude_defaults=True, exclude={"kind", *_NATIVE_ONLY})
            options |= self.vllm.model_dump(exclude_defaults=True)
            options["eager"] = {"auto": None, "eager": True}.get(self.engine.executor, False)
        if card.engines:
            options["engine"] = engine
        return {name: value for name, value in options.items() if value is not None}

    def unused(self, card: ModelCard) -> str | None:
        """A sentence about settings of the engine vllm where a model runs on the engine native; None: there are none.

        Raises as `chosen_engine`.
        """
        names = [f"{PREFIX}VLLM__{name.upper()}" for name in self.vllm.model_dump(exclude_defaults=True)]
        if not names or self.chosen_engine(card) != "native":
            return None
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not used: {card.name} runs on the engine native."

    def origin(self, key: str) -> str:
        """Where a dotted key was set: `command line`, `environment`, `.env`, a file's name, or `default`."""
        while key:
            if key in self._origins:
                return self._origins[key]
            key = key.rpartition(".")[0]
        return "default"


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file; what a URL reads as its own is escaped."""
    return f"sqlite:///{quote(str(path))}"


def sqlite_path(url: str) -> Path | None:
    """The file of a `sqlite:///` URL, or None for another database."""
    scheme, _, path = url.partition(":///")
    return Path(unquote(path.partition("?")[0])) if scheme.startswith("sqlite") else None


def _check_urls(urls: str, most_ats: int | None) -> None:
    """Raises where a sign in a password ends the address too early: its rest would show up in errors as a host or a port."""
    for url in urls.split(";"):
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ValueError(CUT_ADDRESS) from None
        cut = bool(parts.netloc) and "@" in parts.path + parts.fragment
        if cut or not has_port(parts) or (most_ats is not None and parts.netloc.count("@") > most_ats):
            raise ValueError(CUT_ADDRESS)


def load_settings(**overrides: Any) -> Settings:
    """The settings of this process; `overrides` are the command line's (None: not given).

    Raises `ConfigError` with `config.invalid`.
    """
    file_name = os.environ.get("SPEECH_CONFIG")
    layers = [
        (Path(file_name or CONFIG_FILE).name, _read_toml(Path(file_name or CONFIG_FILE), required=file_name is not None)),
        (".env", _read_variables(_dotenv(), ".env")),
        ("environment", _read_variables(os.environ, "environment")),
        ("command line", {key: value for key, value in overrides.items() if value is not None}),
    ]
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, values in layers:
        _merge(merged, values, origin, origins)
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        raise _config_error(error, origins) from None
    settings._origins.update(origins)  # pyright: ignore[reportPrivateUsage]
    return settings


def _read_toml(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        if not required:
            return {}
        raise _invalid(f"The configuration file {path} does not exist.", "Correct SPEECH_CONFIG or unset it.") from None
    except OSError as error:
        raise _invalid(f"The configuration file {path} cannot be read: {error.strerror}.", "Make it a readable TOML file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _invalid(f"The configuration file {path} is not TOML: {error}.", "Correct it.") from None


def _dotenv() -> Mapping[str, str]:
    path = Path(".env")
    if not path.is_file():
        return {}
    from dotenv import dotenv_values

    try:
        return {name: value for name, value in dotenv_values(path).items() if value is not None}
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(f"The file .env cannot be read: {error}.", "Make it readable or remove it.") from None


def _read_variables(variables: Mapping[str, str], origin: str) -> dict[str, Any]:
    """`SPEECH_A__B=x` as `{"a": {"b": "x"}}`; a value that is a JSON object is read as such."""
    _check_prefix(variables, origin)
    tree: dict[str, Any] = {}
    for name, value in sorted(variables.items()):
        if not name.upper().startswith(PREFIX) or name.upper() in NOT_SETTINGS:
            continue
        *parents, leaf = name[len(PREFIX) :].lower().split("__")
        node = tree
        for part in parents:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise _invalid(f"{name} ({origin}) is set beside a value of the whole group.", "Set one of the two.")
            node = cast("dict[str, Any]", child)
        node[leaf] = _object_or_text(value)
    return tree


def _object_or_text(value: str) -> Any:
    if not value.startswith("{"):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _merge(into: dict[str, Any], values: Mapping[str, Any], origin: str, origins: dict[str, str], path: str = "") -> None:
    for key, value in values.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            child = into.get(key)
            nested: dict[str, Any] = cast("dict[str, Any]", child) if isinstance(child, dict) else {}
            into[key] = nested
            _merge(nested, cast("Mapping[str, Any]", value), origin, origins, f"{name}.")
        else:
            into[key] = value
            origins[name] = origin


def _config_error(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    errors = error.errors(include_url=False, include_input=False)
    # What is written wrongly explains what is missing.
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    key = ".".join(str(part) for part in first["loc"])
    origin = next((where for name, where in origins.items() if key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.")), "")
    if origin in {"environment", ".env"}:
        origin = f"{origin} {_variable(key)}"
    set_in = f" ({origin})" if origin else ""
    if key in RENAMED:
        name = RENAMED[key]
        advice = f"Write {_variable(name)}, or `{name}` in a file; `nightjar config list` says what it takes."
        return _invalid(f"The setting {key}{set_in} is now {name}.", advice)
    if first["type"] == "extra_forbidden":
        # A group that does not exist is named with the key that was given in it.
        given = next((name for name in origins if name == key or name.startswith(f"{key}.")), key)
        return _no_setting(given, origins.get(given, ""))
    reason = first["msg"].removeprefix("Value error, ")
    return _invalid(f"The setting {key}{set_in} cannot be used: {reason}.", "Correct it; `nightjar config list` lists all settings.")


def _no_setting(key: str, origin: str) -> ConfigError:
    """The error of a key that is none, with the nearest that there is, as it is written where this one was set."""
    schedule = key.split(".")[1] if key.startswith("schedules.") else "NAME"
    variables = origin in {"environment", ".env"}
    near = nearest(key, _keys(Settings, schedule), _variable if variables else str)
    set_in = f" ({origin}{f' {_variable(key)}' if variables else ''})" if origin else ""
    return _invalid(f"There is no setting {key}{set_in}.", f"{near}`nightjar config list` lists all settings.")


def _check_prefix(variables: Mapping[str, str], origin: str) -> None:
    """Raises `config.invalid` for a variable that is a setting but for its prefix, which would have no effect."""
    for name in variables:
        prefix, _, rest = name.upper().partition("_")
        if prefix != "NIGHTJAR":
            continue
        key = rest.lower().replace("__", ".")
        if PREFIX + rest in NOT_SETTINGS or key in _keys(Settings, key.split(".")[1] if "." in key else ""):
            raise _invalid(f"There is no setting {name} ({origin}).", f"Did you mean {PREFIX}{rest}? All settings begin so.")


def _variable(key: str) -> str:
    return f"{PREFIX}{key.replace('.', '__').upper()}"


def _keys(group: type[SettingsGroup], schedule: str, path: str = "") -> Iterator[str]:
    """The dotted keys of all settings, those of a schedule with its name."""
    for name, field in group.model_fields.items():
        inner = field.annotation
        if name == "schedules":
            yield from _keys(Schedule, schedule, f"schedules.{schedule}.")
        elif isinstance(inner, type) and issubclass(inner, SettingsGroup):
            yield from _keys(inner, schedule, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _invalid(message: str, advice: str) -> ConfigError:
    return ConfigError(ErrorCode.CONFIG_INVALID, message, advice)
