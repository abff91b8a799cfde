"""The groups of settings: one frozen model for each; a field's description is its line in `nightjar config list`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from jobs.input_format import InputFormat
from pipelines.audio_format import AudioFormat
from pipelines.engine_choice import EngineKind

#: A shard may run longer, by heartbeats; a lease that ends later than this was written by a clock that went wrong.
LONGEST_LEASE_SECONDS = 6 * 3600.0

Positive = Annotated[float, Field(gt=0)]
PositiveInt = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]


def _words(value: object) -> object:
    """The parts of a text between commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


class SettingsGroup(BaseModel):
    """A frozen group of settings, which refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class S3Settings(SettingsGroup):
    """How to reach an S3 store. What is unset comes from boto3's own chain (environment, profile, instance role)."""

    endpoint_url: str | None = Field(default=None, description="Address of an S3-compatible server; unset: AWS.")
    region: str | None = Field(default=None, description="Region of the bucket.")
    access_key_id: str | None = Field(default=None, description="Access key.")
    secret_access_key: SecretStr | None = Field(default=None, description="Secret key.")
    addressing_style: Literal["auto", "path", "virtual"] = Field(
        default="auto", description="Where the bucket name stands in the URL: in the path or in the host name."
    )


class WorkerSettings(SettingsGroup):
    """One worker process."""

    shards_in_flight: PositiveInt | None = Field(
        default=None,
        description="Shards that a worker runs at the same time. Unset: as many as keep its engine full, maximum 64.",
    )
    lease_seconds: Annotated[float, Field(gt=0, le=LONGEST_LEASE_SECONDS)] = Field(
        default=60.0, description="Seconds after which a shard without a heartbeat is given to another worker; maximum 6 hours."
    )
    heartbeat_seconds: Positive = Field(default=15.0, description="Seconds between heartbeats; must be well below `lease_seconds`.")
    drain_seconds: Positive = Field(default=300.0, description="Maximum seconds in which a worker finishes its items after SIGTERM.")
    commit_items: PositiveInt = Field(default=256, description="Maximum outcomes per commit.")
    commit_seconds: Positive = Field(default=2.0, description="Maximum seconds that an outcome waits for its commit.")
    pack_bytes: Annotated[int, Field(ge=1, le=1 << 30)] = Field(
        default=16 << 20, description="Jobs with `--pack`: bytes at which a pack is stored; maximum 1 GiB. Two per shard are in memory."
    )
    pack_seconds: Positive = Field(
        default=15.0, description="Jobs with `--pack`: maximum seconds that an item waits for its pack to be stored."
    )
    item_timeout_seconds: Positive = Field(default=600.0, description="Maximum seconds for one item.")
    metrics_port: Port | None = Field(
        default=None, description="Port of the Prometheus metrics; unset: none. The workers of `--gpu` use this port and the next ones."
    )
    metrics_address: str = Field(default="127.0.0.1", description="Address of the metrics. `0.0.0.0` opens it to every network.")
    restart_seconds: Positive = Field(
        default=10.0, description="Maximum pause before `--gpu` or `--supervise` restarts a worker that died."
    )
    quarantine_seconds: Positive = Field(
        default=600.0, description="Seconds between the restarts of a worker that failed again and again, while others work."
    )
    pin_cores: bool = Field(
        default=True, description="With several GPUs, give each worker its own CPU cores, near its GPU. Off: all workers share all cores."
    )
    threads: PositiveInt | None = Field(default=None, description="Threads of the engine. Unset: the fastest measured number.")
    meter_processes: PositiveInt = Field(default=1, description="Processes of the quality meters, one core each.")
    writer_processes: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Maximum processes that write to S3; they start when they are needed. Unset: one for two cores, maximum 4. "
        "0: the worker's own threads write.",
    )


class EngineSettings(SettingsGroup):
    """How a model's engine is opened, by a worker and by `nightjar serve` alike; unset: the best for the device and the model.

    Models of the engine `cpu` take the waiting room only.
    """

    kind: EngineKind = Field(default="auto", description="Engine of models that both can run: `native` or `vllm`. `auto`: `native`.")
    slots: PositiveInt | None = Field(
        default=None, description="Utterances that run at the same time. Unset: by the engine and the GPU's memory (docs/models.md)."
    )
    waiting_room: PositiveInt | None = Field(
        default=None, description="Maximum requests that wait in the engine for a slot. Unset: on a GPU as many as there are slots."
    )
    memory_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Share of the GPU's memory for the engine (`vllm`: for the LM). Unset: 0.9 of what is free; `vllm`: by the model.",
    )
    reproducible: bool | None = Field(
        default=None, description="Equal requests give equal bits in every batch, at a lower speed. On a CPU they always do."
    )
    max_context: PositiveInt | None = Field(default=None, description="Maximum positions of an utterance: prompt and speech.")
    prefill: Literal["auto", "padded", "packed"] = Field(
        default="auto",
        description="Engine `native`, graphs: how prompts are computed. `packed`: one after the other, without padding; refused with "
        "`reproducible` and without graphs. `auto`: packed where it can be, else padded to whole pages.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="Data type of the weights, on `vllm` of the LM's. Unset: bfloat16 on a GPU, float32 on a CPU."
    )
    executor: Literal["auto", "eager", "graph", "megakernel"] = Field(
        default="auto",
        description="How a frame is run. `graph`: CUDA graphs. `eager`: single operations; starts faster, runs slower. `auto`: the best. "
        "`megakernel`: as `graph`, and persistent kernels for one or two Qwen3-TTS utterances at a time: on an H200 a frame of one at 0.6B "
        "takes 1.5 instead of 2.0 ms; not for `reproducible`. `auto` has them on GPUs of compute capability 9.0 with at least 128 "
        "multiprocessors, such as the H200, but not for streams, whose first chunk comes later with them.",
    )

    voice_cache: Path | None = Field(
        default=None, description="Qwen3-TTS: folder that keeps cloned voices, encoded, for later starts. Unset: they are kept in memory."
    )
    voice_cache_mib: PositiveInt = Field(default=256, description="Qwen3-TTS: maximum size of `voice_cache` in MiB.")
    codec_rows: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Qwen3-TTS on a GPU: rows of the codec's continuous batch of whole utterances, such as 256. "
        "0: batches of similar lengths. On an H200 256 rows take less than half as much of a core, and with `reproducible` they are 1.8 "
        "times as fast. They need 7.6 GiB of the GPU.",
    )


class VllmSettings(SettingsGroup):
    """What only the engine `vllm` has."""

    tensor_parallel: PositiveInt = Field(default=1, description="GPUs that share one LM.")
    step_tokens: PositiveInt | None = Field(default=None, description="Maximum tokens of an engine step.")


class LedgerSettings(SettingsGroup):
    """Waiting on a PostgreSQL ledger."""

    idle_transaction_seconds: Positive = Field(
        default=10.0, description="PostgreSQL: a transaction that is idle for longer is rolled back and its locks are released."
    )
    lock_seconds: Positive = Field(
        default=30.0,
        description="PostgreSQL: maximum wait for a lock; must be longer than `idle_transaction_seconds` and well below a lease.",
    )
    statement_seconds: Positive = Field(default=3600.0, description="PostgreSQL: maximum seconds for one statement, except upgrades.")


class DispatchSettings(SettingsGroup):
    """How shards get from the ledger to the broker."""

    interval_seconds: Positive = Field(default=5.0, description="Seconds between two runs of the dispatcher.")
    window_factor: PositiveInt = Field(default=2, description="Shards queued or leased for each shard that the live workers can use.")
    queued_timeout_seconds: Positive = Field(
        default=600.0, description="Seconds after which a message that no worker claimed counts as lost."
    )
    reconcile_seconds: Positive = Field(default=30.0, description="Seconds between two runs of the reconciler.")
    backoff_seconds: Positive = Field(
        default=1.0, description="Pause before a failed shard runs again; doubles with each attempt, up to 300 s."
    )


class ShardSettings(SettingsGroup):
    """How ingest cuts a job into shards."""

    target_seconds: Positive = Field(
        default=100_000.0, description="Maximum estimated audio seconds of a shard; a shard is about a minute of engine time."
    )
    max_items: PositiveInt = Field(default=8192, description="Maximum items of a shard.")


CUT_ADDRESS = "its password holds a sign that must be percent-encoded (@ is %40, / is %2F, # is %23, ? is %3F)"


def has_port(parts: SplitResult) -> bool:
    """Whether the port of an address is none or a number, and not the rest of a password."""
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


class NotifySettings(SettingsGroup):
    """The hook of the operator that is told of every job's end; it is never a job's."""

    command: tuple[str, ...] = Field(
        default=(),
        description="Command that runs at each end of a job, without a shell: words as a shell splits them, or a list in a file. The "
        "status is on its standard input as JSON; NIGHTJAR_JOB and NIGHTJAR_STATE are variables.",
    )
    url: SecretStr | None = Field(
        default=None,
        description="Address that gets the status by POST at each end of a job. "
        "`https://USER:PASSWORD@HOST/PATH` sends a Basic authorization.",
    )
    secret: SecretStr | None = Field(
        default=None, description="Key of the HMAC-SHA256 of the body, in the header `X-Nightjar-Signature` of the POST."
    )
    timeout_seconds: Annotated[float, Field(gt=0, le=600)] = Field(
        default=30.0, description="Maximum seconds for the command, and for the POST."
    )
    attempts: PositiveInt = Field(default=20, description="Maximum tries to report one end. The pauses between them double, up to 300 s.")

    @property
    def enabled(self) -> bool:
        """Whether there is a hook."""
        return bool(self.command) or self.url is not None

    @field_validator("command", mode="before")
    @classmethod
    def _split_command(cls, value: object) -> object:
        return tuple(shlex.split(value)) if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _refuse_other_schemes(cls, value: SecretStr | None) -> SecretStr | None:
        if value is None:
            return value
        try:
            parts = urlsplit(value.get_secret_value())
        except ValueError:
            # The parser's words repeat the password.
            raise ValueError(CUT_ADDRESS) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it is not an address of the form https://HOST/PATH")
        if not has_port(parts):
            raise ValueError(CUT_ADDRESS)
        if any(not "!" <= sign <= "~" for sign in f"{parts.path}{parts.query}".rstrip()):
            # No request could be sent there.
            raise ValueError("its path holds a space or another sign that must be percent-encoded")
        return value


class FlowerSettings(SettingsGroup):
    """The dashboard of the queues."""

    basic_auth: SecretStr | None = Field(default=None, description="`user:password` for Flower. Flower does not start without it.")
    address: str = Field(default="127.0.0.1", description="Address the dashboard listens at; `0.0.0.0` opens it to the network.")
    port: Port = Field(default=5555, description="Port of the dashboard.")


class ServeSettings(SettingsGroup):
    """The server of `nightjar serve`."""

    address: str = Field(default="127.0.0.1", description="Address of the server. `0.0.0.0` opens it to every network and needs a key.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8000, description="Port of the server; 0 takes a free port.")
    api_key: SecretStr | None = Field(default=None, description="Key that clients must send.")
    api_key_file: Path | None = Field(default=None, description="File of valid keys, one per line.")
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Host names, separated by `,`, under which a server without a key answers, besides `localhost` and loopback addresses.",
    )
    slots: PositiveInt | None = Field(
        default=None,
        description="Maximum requests that are handed to the engine. Unset: as many as run and wait there (`engine.slots` and "
        "`engine.waiting_room`).",
    )
    streams: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Streams that the model is prepared for before `/health` is 200, where its family can (Qwen3-TTS; SparkTTS and "
        "Fish Speech S2 on `native`). Unset: 128 on a GPU, 8 on a CPU.",
    )
    waiting_room: Annotated[int, Field(ge=0)] = Field(
        default=512, description="Maximum requests that wait in the server before they are handed to the engine. More get status 429."
    )
    stream_queue_seconds: Positive = Field(
        default=2.0, description="Maximum seconds that a stream waits in the server. One that would wait longer gets status 429 at once."
    )
    max_body_bytes: PositiveInt = Field(default=32 << 20, description="Maximum bytes of a request body.")
    max_audio_seconds: Positive = Field(default=600.0, description="Maximum seconds of audio in a request.")
    request_seconds: Positive = Field(default=600.0, description="Maximum seconds for a request, from its slot to its last byte.")
    body_seconds: Positive = Field(default=60.0, description="Maximum seconds for a client to send its request.")
    header_seconds: Positive = Field(default=10.0, description="Maximum seconds for a connection to send the headers of a request.")
    connections: PositiveInt = Field(
        default=2048, description="Maximum open connections. A connection without a request is closed to make room for a new one."
    )
    stuck_seconds: Positive = Field(
        default=60.0, description="Seconds without progress of the requests in the engine after which the model is opened again."
    )
    drain_seconds: Positive = Field(default=60.0, description="Maximum seconds for running requests after SIGTERM.")
    message_bytes: PositiveInt = Field(default=1 << 20, description="Maximum bytes of a WebSocket message.")
    contexts_per_connection: PositiveInt = Field(default=32, description="Maximum open contexts of a WebSocket.")
    contexts: PositiveInt = Field(default=1024, description="Maximum open contexts of all WebSockets. More get status 429.")
    context_characters: PositiveInt = Field(default=50_000, description="Maximum characters of a context.")
    context_idle_seconds: Positive = Field(
        default=60.0, description="Seconds after which a context ends that has nothing to say and gets no text."
    )
    connection_idle_seconds: Positive = Field(
        default=300.0, description="Seconds after which a WebSocket without a context is closed if its client sends nothing."
    )
    text_in: bool | None = Field(
        default=None,
        description="Speak the text of a context while it is being written. Unset: with the voices for which the model always reads "
        "its text in this way (Qwen3-TTS, voices cloned without the recording's text). `true`: all voices of Qwen3-TTS, named ones on all "
        "routes. `false`: sentence by sentence.",
    )
    voices_folder: Path | None = Field(default=None, description="Folder of stored voices. Unset: `voices` in `home`.")
    stored_voices: PositiveInt = Field(default=256, description="Maximum stored voices.")
    voice_bytes: PositiveInt = Field(default=8 << 20, description="Maximum bytes of the recording of a stored voice.")
    strict: bool = Field(default=False, description="Refuse requests for speech with a field that the server does not know.")

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _split_hosts(cls, value: object) -> object:
        return _words(value)


class Schedule(SettingsGroup):
    """A job that is submitted every night; its key in `schedules` is its name."""

    input: str = Field(description="Path or `s3://` address of the night's file; strftime codes and `{date}` (ISO) stand for the night.")
    input_format: InputFormat = Field(default="dialogues", description="Format of the file.")
    model: str = Field(default="hibari", description="Pipeline or checkpoint folder.")
    speak: Literal["auto", "user", "assistant", "all"] | None = Field(default=None, description="Whose texts become speech; as `--speak`.")
    voice: str | None = Field(default=None, description="Voice for lines without a voice.")
    voice_of: dict[Literal["user", "assistant"], str] = Field(default={}, description="Voice for each role.")
    language: str | None = Field(default=None, description="Language for lines without a language.")
    instruct: str | None = Field(default=None, description="Style instruction for lines without one.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(default=0, description="Seed of the job.")
    format: AudioFormat = Field(default="wav", description="Audio format: wav, flac, mp3 or opus.")
    sample_rate: Annotated[int, Field(ge=8_000, le=48_000)] | None = Field(
        default=None, description="Sample rate of the audio in Hz, 8000 to 48000. Unset: the model's own."
    )
    pack: bool = Field(default=False, description="Store the audio of many items in one object, a pack; as `--pack`.")
    qa: Literal["off", "basic", "strict"] = Field(default="basic", description="Quality checks.")
    qa_config: Path | None = Field(default=None, description="TOML file with changes to the checks.")
    priority: int = Field(default=0, description="Jobs with a higher priority run first.")
    weight: PositiveInt = Field(default=1, description="Share of the workers among jobs of the same priority.")
    store_url: str | None = Field(default=None, description="Store of this schedule. Unset: `store_url`.")
    on_error: Literal["skip", "abort"] = Field(default="skip", description="`skip`: leave bad lines out. `abort`: refuse the whole file.")
    exports: tuple[str, ...] = Field(
        default=(), description="Export formats that `nightjar nightly` writes after the job, separated by `,`. `report` is also possible."
    )
    export_to: str | None = Field(
        default=None,
        description="Path of each export. `{format}` is replaced by the format and `{date}` by the night. If the path ends in one of them, "
        "a format of one file adds its extension. Unset: `datasets/NAME/{date}/{format}` in `home`.",
    )
    splits: str | None = Field(default=None, description="Splits of the exports, for example train=0.98,dev=0.01,test=0.01.")

    @field_validator("exports", mode="before")
    @classmethod
    def _split_exports(cls, value: object) -> object:
        return _words(value)
