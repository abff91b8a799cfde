"""One frozen `Settings`, built once and passed down: command line over environment over `.env` over TOML over defaults.

Environment names are `SPEECH_` and the key, nested keys joined by two underscores (`SPEECH_WORKER__LEASE_SECONDS`). The file is
`nightjar.toml` in the working directory, or what `SPEECH_CONFIG` names. An unknown key or a wrong value is a `ConfigError` that
names the key and where it was set.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import quote, unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError, ValidationInfo, field_validator

from jobs.ledger.location import STATE_FOLDER
from pipelines.errors import ConfigError, ErrorCode

PREFIX = "SPEECH_"
CONFIG_FILE = "nightjar.toml"
DEFAULT_BROKER_URL = "redis://127.0.0.1:6379/0"
#: Variables with the prefix that are no settings: where the file is, and whether a bug shows its traceback.
NOT_SETTINGS = frozenset({"SPEECH_CONFIG", "SPEECH_DEBUG"})

#: A shard may run longer, by heartbeats; a lease that ends later than this was written by a clock that went wrong.
LONGEST_LEASE_SECONDS = 6 * 3600.0

Positive = Annotated[float, Field(gt=0)]
PositiveInt = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class S3Settings(_Part):
    """How to reach an S3 store. What is unset comes from boto3's own chain (environment, profile, instance role)."""

    endpoint_url: str | None = Field(default=None, description="Address of an S3-compatible server; unset: AWS.")
    region: str | None = Field(default=None, description="Region of the bucket.")
    access_key_id: str | None = Field(default=None, description="Access key.")
    secret_access_key: SecretStr | None = Field(default=None, description="Secret key.")
    addressing_style: Literal["auto", "path", "virtual"] = Field(default="auto", description="How the bucket stands in the address.")


class WorkerSettings(_Part):
    """One worker process."""

    shards_in_flight: PositiveInt = Field(default=2, description="Shards a worker holds at once; two hide the tail of each other.")
    waiting_room: PositiveInt | None = Field(default=None, description="Most requests that wait in the engine; unset: the engine's own.")
    lease_seconds: Annotated[float, Field(gt=0, le=LONGEST_LEASE_SECONDS)] = Field(
        default=60.0, description="How long a shard stays a worker's without a heartbeat; up to 6 hours."
    )
    heartbeat_seconds: Positive = Field(default=15.0, description="Time between heartbeats; well below `lease_seconds`.")
    drain_seconds: Positive = Field(default=300.0, description="How long a worker that was told to stop may finish its items.")
    commit_items: PositiveInt = Field(default=256, description="Most outcomes in one commit.")
    commit_seconds: Positive = Field(default=2.0, description="Longest time an outcome waits for its commit.")
    item_timeout_seconds: Positive = Field(default=600.0, description="Longest time one item may take.")
    metrics_port: Port | None = Field(default=None, description="Port of the Prometheus metrics; unset: none.")
    metrics_address: str = Field(default="127.0.0.1", description="Address of the metrics; `0.0.0.0`: every network.")
    restart_seconds: Positive = Field(
        default=10.0, description="Longest pause before `--gpu` or `--supervise` starts a worker that died again."
    )
    threads: PositiveInt | None = Field(default=None, description="Threads of the engine; unset: what was measured best.")
    meter_processes: PositiveInt = Field(default=1, description="Processes of the quality meters, one core each.")


class VllmSettings(_Part):
    """How models of the engine `vllm` are opened; unset: the best for the device and the model."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(default=None, description="Type of the LM; unset: bfloat16 on a GPU.")
    memory_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(default=None, description="Share of the GPU's memory for the LM.")
    slots: PositiveInt | None = Field(default=None, description="Sequences that run at once.")
    max_context: PositiveInt | None = Field(default=None, description="Positions of a sequence, prompt and speech.")
    tensor_parallel: PositiveInt = Field(default=1, description="GPUs that share one LM.")
    eager: bool | None = Field(default=None, description="Without compilation and CUDA graphs: a quicker start, slower steps.")


class LedgerSettings(_Part):
    """Waiting on a PostgreSQL ledger."""

    idle_transaction_seconds: Positive = Field(
        default=10.0, description="PostgreSQL: a transaction whose process is silent for so long is rolled back, and its locks are free."
    )
    lock_seconds: Positive = Field(
        default=30.0, description="PostgreSQL: longest wait for a lock; longer than `idle_transaction_seconds`, well below a lease."
    )
    statement_seconds: Positive = Field(default=3600.0, description="PostgreSQL: longest time of one statement, upgrades apart.")


class DispatchSettings(_Part):
    """How shards get from the ledger to the broker."""

    interval_seconds: Positive = Field(default=5.0, description="Time between looks for shards to hand out.")
    window_factor: PositiveInt = Field(default=2, description="Shards handed out for each slot of the live workers.")
    queued_timeout_seconds: Positive = Field(default=600.0, description="After this a message that nobody claimed counts as lost.")
    reconcile_seconds: Positive = Field(default=30.0, description="Time between passes of the reconciler.")
    backoff_seconds: Positive = Field(default=1.0, description="Pause of a shard that failed; doubles with each attempt, up to 300 s.")


class ShardSettings(_Part):
    """How ingest cuts a job into shards."""

    target_seconds: Positive = Field(
        default=3600.0, description="Most estimated audio of a shard, in seconds; a shard is about a minute of engine time."
    )
    max_items: PositiveInt = Field(default=256, description="Most items of a shard.")


class SweepSettings(_Part):
    """The sweep: objects of ended jobs that nothing names."""

    daily: bool = Field(default=False, description="Whether beat sends the sweep to a worker every day at 5:30.")
    delete: bool = Field(default=False, description="Whether the daily sweep deletes what it finds, or only counts and logs it.")
    grace_hours: Positive = Field(default=24.0, description="Age of the end of a job, and of an object, before the sweep looks at it.")


class FlowerSettings(_Part):
    """The dashboard of the queues."""

    basic_auth: SecretStr | None = Field(
        default=None, description="`user:password` that Flower asks for; without it Flower does not start."
    )
    address: str = Field(default="127.0.0.1", description="Address the dashboard listens at; `0.0.0.0` opens it to the network.")
    port: Port = Field(default=5555, description="Port of the dashboard.")


class ServeSettings(_Part):
    """The server of `nightjar serve`."""

    address: str = Field(default="127.0.0.1", description="Address the server listens at; `0.0.0.0`: every network, and only with a key.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8000, description="Port of the server; 0: a free one.")
    api_key: SecretStr | None = Field(default=None, description="Key that clients send; `nightjar evaluate` sends it too.")
    api_key_file: Path | None = Field(default=None, description="File of keys, one a line, that clients may send.")
    slots: PositiveInt = Field(default=256, description="Requests that are in the engine at once.")
    waiting_room: Annotated[int, Field(ge=0)] = Field(default=256, description="Requests that wait behind them; more get 429.")
    max_body_bytes: PositiveInt = Field(default=32 << 20, description="Largest body of a request.")
    max_audio_seconds: Positive = Field(default=600.0, description="Longest audio that a request may bring.")
    request_seconds: Positive = Field(default=600.0, description="Longest time of a request, from its slot to its last byte.")
    body_seconds: Positive = Field(default=60.0, description="Longest time a client may take to send its request.")
    header_seconds: Positive = Field(default=10.0, description="Longest time a connection may take for the headers of a request.")
    connections: PositiveInt = Field(default=2048, description="Connections at once; one without a request makes room for a new one.")
    stuck_seconds: Positive = Field(
        default=60.0, description="`/health` is 503 once nothing has come of the requests in the engine for so long."
    )
    drain_seconds: Positive = Field(default=60.0, description="How long requests may go on after SIGTERM.")


class Schedule(_Part):
    """A job that is submitted every night; its key in `schedules` is its name."""

    input: str = Field(description="Path or `s3://` address of the night's file; strftime codes and `{date}` (ISO) stand for the night.")
    input_format: Literal["dialogues", "openai-batch"] = Field(default="dialogues", description="How the file writes its lines.")
    hour: Annotated[int, Field(ge=0, le=23)] = Field(default=2, description="Hour of the day it runs, in the worker's time zone.")
    minute: Annotated[int, Field(ge=0, le=59)] = Field(default=0, description="Minute of the hour it runs.")
    model: str = Field(default="hibari", description="Pipeline or checkpoint folder.")
    speak: Literal["auto", "user", "assistant", "all"] | None = Field(
        default=None, description="Whose texts are spoken; unset: auto, the assistant's that have no audio yet, else the user's."
    )
    voice: str | None = Field(default=None, description="Voice of lines that name none.")
    voice_of: dict[Literal["user", "assistant"], str] = Field(default={}, description="Voice of one role's turns, by role.")
    language: str | None = Field(default=None, description="Language of lines that name none.")
    instruct: str | None = Field(default=None, description="Instruction of lines that have none.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(default=0, description="Seed of the job.")
    format: Literal["wav", "flac"] = Field(default="wav", description="Encoding of the audio.")
    qa: Literal["off", "basic", "strict"] = Field(default="basic", description="Checks that the speech has to pass.")
    qa_config: Path | None = Field(default=None, description="TOML file that changes the checks.")
    priority: int = Field(default=0, description="Higher runs first.")
    weight: PositiveInt = Field(default=1, description="Share against jobs of the same priority.")
    store_url: str | None = Field(default=None, description="Store of this schedule; unset: the common one.")
    on_error: Literal["skip", "abort"] = Field(default="skip", description="What a bad line does.")
    exports: tuple[str, ...] = Field(
        default=(), description="Formats that `nightjar nightly` writes when the night's job has ended, `,` between them; also `report`."
    )
    export_to: str | None = Field(
        default=None,
        description="Where each of them goes; `{format}` stands for it, the night as in `input`. A format of one file gets its "
        "extension where the place ends in either. Unset: `datasets/NAME/{date}/{format}` in `home`.",
    )
    splits: str | None = Field(default=None, description="Splits of the exports, such as train=0.98,dev=0.01,test=0.01.")

    @field_validator("exports", mode="before")
    @classmethod
    def _split_exports(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


class Settings(_Part):
    """Every setting of Nightjar. Build it with `load_settings`; a direct call takes only what it is given."""

    home: Path = Field(default=Path("out"), description="Folder of the embedded default: its ledger, its store and its broker's address.")
    database_url: SecretStr | None = Field(
        default=None, description="Ledger: `sqlite:///path` or `postgresql://…`; unset: SQLite in `home`."
    )
    broker_url: SecretStr | None = Field(
        default=None,
        description="Broker: `redis://…`; unset: the embedded broker of `home` while it runs, else `redis://127.0.0.1:6379/0`.",
    )
    store_url: str | None = Field(default=None, description="Store: a folder or `s3://bucket/prefix`; unset: `home`.")
    audio_roots: tuple[Path, ...] = Field(
        default=(), description="Folders that reference audio may be read from, `:` between them; unset: only the input file's own folder."
    )
    price_per_gpu_hour: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Price of an engine hour, for the cost in `nightjar status`."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level that is logged.")
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto", description="Form of logs; `auto`: console on a terminal, else JSON."
    )
    s3: S3Settings = Field(default=S3Settings(), description="The S3 store.")
    worker: WorkerSettings = Field(default=WorkerSettings(), description="Worker processes.")
    vllm: VllmSettings = Field(default=VllmSettings(), description="The vLLM engine.")
    ledger: LedgerSettings = Field(default=LedgerSettings(), description="Waiting on the ledger.")
    dispatch: DispatchSettings = Field(default=DispatchSettings(), description="Dispatch and reconciliation.")
    shard: ShardSettings = Field(default=ShardSettings(), description="Cutting of jobs.")
    sweep: SweepSettings = Field(default=SweepSettings(), description="The sweep.")
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

    def origin(self, key: str) -> str:
        """Where a dotted key was set: `command line`, `environment`, `.env`, a file's name, or `default`."""
        while key:
            if key in self._origins:
                return self._origins[key]
            key = key.rpartition(".")[0]
        return "default"


def embedded_broker_url(state_folder: Path) -> str | None:
    """Address of the broker that `nightjar run` keeps in a home, or None when none runs."""
    try:
        broker = json.loads((state_folder / "broker.json").read_text())
        os.kill(int(broker["pid"]), 0)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(broker["url"])


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
            has_port = parts.port is None or parts.port > 0
        except ValueError:
            has_port, parts = False, urlsplit("")
        cut = bool(parts.netloc) and "@" in parts.path + parts.fragment
        if cut or not has_port or (most_ats is not None and parts.netloc.count("@") > most_ats):
            raise ValueError("its password holds a sign that must be percent-encoded (@ is %40, / is %2F, # is %23, ? is %3F)")


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
    first = error.errors(include_url=False, include_input=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    origin = next((where for name, where in origins.items() if key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.")), "")
    if origin in {"environment", ".env"}:
        origin = f"{origin} {PREFIX}{key.replace('.', '__').upper()}"
    set_in = f" ({origin})" if origin else ""
    if first["type"] == "extra_forbidden":
        return _invalid(f"There is no setting {key}{set_in}.", "`nightjar config list` lists all settings.")
    reason = first["msg"].removeprefix("Value error, ")
    return _invalid(f"The setting {key}{set_in} cannot be used: {reason}.", "Correct it; `nightjar config list` lists all settings.")


def _invalid(message: str, advice: str) -> ConfigError:
    return ConfigError(ErrorCode.CONFIG_INVALID, message, advice)
