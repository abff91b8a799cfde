"""The registry of models: opens a pipeline by its name or its checkpoint folder. Imports no model library
before that."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pipelines.duration import Pace
from pipelines.errors import ErrorCode, ModelError, invalid, nearest
from pipelines.nn.config_keys import bad_checkpoint, read_table, revision
from pipelines.recording import read_recording
from pipelines.request import Capabilities, CodecIdentity, Frontend, Pipeline, SpeakerVector

if TYPE_CHECKING:
    from pipelines.results import StageDecoder

ENTRY_POINT_GROUP = "nightjar.pipelines"
_WEIGHT_FILES = ("*.json", "*.txt", "*.jinja", "*.safetensors")
_DESCRIPTION_FILES = ("*.json",)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The description of a model, which is available without loading the model."""

    #: The argument of `open_pipeline`: a registry name, or the absolute path of a checkpoint folder.
    name: str
    family: str
    #: The engine that runs its requests, or the default one of `engines`.
    engine: Literal["cpu", "native", "vllm"]
    #: Sample rate of its speech, in Hz.
    sample_rate: int
    capabilities: Capabilities
    #: Identity of the weights: a package version, a hub commit, or a digest of a folder; empty if unknown.
    revision: str = ""
    #: Average seconds of speech per character of text, for estimates of the length of audio.
    seconds_per_character: float = 0.07
    #: Values of its option `executor`; empty if there is no choice.
    executors: tuple[str, ...] = ()
    #: Values of its option `engine`; empty if there is no choice.
    engines: tuple[Literal["native", "vllm"], ...] = ()
    #: RTF of one worker: engine seconds per second of speech; None if not measured.
    rtf: float | None = None
    #: The expected length of its speech, learned from samples (`examples/paces.py`); None:
    #: unknown.
    pace: Pace | None = None
    #: Functions that check every text, and every recording of a voice to clone (an encoded file), at submit.
    #: They are cheap, load no model and raise `InputError` if the model would refuse it; None: no check.
    check_text: Callable[[str], None] | None = field(default=None, compare=False)
    check_reference: Callable[[bytes], object] | None = field(default=None, compare=False)
    #: Reads the identity of its codec, whose weights it hashes; None: it gives no codes.
    codec: Callable[[], CodecIdentity] | None = field(default=None, compare=False)


def checkpoint_card(folder: Path, family: str, suffixes: Sequence[str], **facts: Any) -> ModelCard:
    """The card of a checkpoint folder that the native engine runs. `suffixes`: those of its files; `facts`: the
    other fields."""
    return ModelCard(
        str(folder),
        family,
        "native",
        revision=revision(folder, suffixes),
        seconds_per_character=0.067,  # English read speech, for estimates
        check_reference=read_recording,
        **facts,
    )


class Provider(NamedTuple):
    """Describes and loads one model. Built-in packages and entry points of the group `nightjar.pipelines`
    have the functions `describe` and `load`."""

    #: The name of its card.
    name: str
    describe: Callable[[], ModelCard]
    load: Callable[..., Pipeline]
    #: Opens the frontend, which prepares requests outside of the engine's process.
    frontend: Callable[[], Frontend | None] = lambda: None
    #: Opens the decoder of its codec alone; None: it has none.
    decoder: Callable[..., StageDecoder] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """How the folder of a checkpoint family is recognised, and the package that reads it.

    The package has a module `config` with `describe(folder) -> ModelCard`, which reads configs and imports
    no torch, and a module `pipeline` with `open_pipeline(folder, **options) -> Pipeline`. Both raise
    `ModelError` (`model.bad_checkpoint`) for a faulty folder. Each is imported when it is needed.
    """

    name: str
    #: The extra that installs the libraries of the package.
    extra: str
    #: Values of `model_type` in the folder's config.json.
    model_types: tuple[str, ...] = ()
    #: Subfolders that identify the family if the folder has no config.json.
    subfolders: tuple[str, ...] = ()
    #: Checkpoints on the model hub that can be opened by a name: id -> card as published.
    #: `pipelines.registry.describe` reads the checkpoint itself.
    published: Mapping[str, ModelCard] = field(default_factory=dict[str, ModelCard])
    #: The package; empty: `pipelines.<name>`.
    package: str = ""
    #: Whether it has a module `prompt` with `open_frontend(folder) -> Frontend`, which imports no torch. If
    #: so, its pipeline takes prepared requests.
    frontend: bool = False
    #: Whether it has a module `speaker` with `open_speaker_encoder(folder, device) -> SpeakerVector`, for models that
    #: clone.
    encodes_speakers: bool = False
    #: The class in its module `vllm_model` that runs its LM on vLLM; empty: vLLM has the class itself, or
    #: does not run this family.
    vllm_model: str = ""
    #: Which of the options `streams` (number of prepared streams), `text_first` and `voice_cache` its pipeline
    #: has on the native engine.
    options: frozenset[str] = frozenset()

    def call(self, module: str, function: str, *arguments: Any, **options: Any) -> Any:
        """Calls a function of a module; a name with a leading dot is relative to the family's package. Raises
        `ModelError` (`model.missing_extra`) if a library is not installed."""
        try:
            found = importlib.import_module(module, self.package or f"pipelines.{self.name}")
            return getattr(found, function)(*arguments, **options)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith(("pipelines", "kernels")):
                raise
            raise ModelError(
                ErrorCode.MODEL_MISSING_EXTRA,
                f"Models of the family {self.name} need the library {error.name or error!s}.",
                f"Install Nightjar with its extra `{self.extra}` (docs/install.md).",
            ) from error


# Values of codec_language_id and spk_id in the published config.json. Dialects are left out, because each is
# spoken only by its own voices.
_LANGUAGES = (
    "auto",
    "chinese",
    "english",
    "german",
    "italian",
    "portuguese",
    "spanish",
    "japanese",
    "korean",
    "french",
    "russian",
)
_VOICES = ("serena", "vivian", "uncle_fu", "ryan", "aiden", "ono_anna", "sohee", "eric", "dylan")
_DESIGN = Capabilities(languages=_LANGUAGES, instruct=True, streaming=True, codes=True)
_CUSTOM = replace(_DESIGN, voices=_VOICES)
_BASE = replace(_DESIGN, instruct=False, cloning=True, needs_reference=True)
_QWEN3_TTS = {
    f"Qwen/Qwen3-TTS-12Hz-{name}": ModelCard(
        f"qwen3-tts-{name.lower()}",
        "qwen3_tts",
        "native",
        24_000,
        able,
        executors=("eager", "graph", "megakernel"),
    )
    for name, able in (
        ("0.6B-Base", _BASE),
        ("0.6B-CustomVoice", replace(_CUSTOM, instruct=False)),
        ("1.7B-Base", _BASE),
        ("1.7B-CustomVoice", _CUSTOM),
        ("1.7B-VoiceDesign", _DESIGN),
    )
}

#: Packages of models that need no checkpoint.
BUILT_IN = EntryPoints((EntryPoint("hibari", "pipelines.hibari", ENTRY_POINT_GROUP),))
#: Families of checkpoints; the first one that recognises a folder reads it.
FAMILIES = (
    Family(
        "qwen3_tts",
        "gpu",
        model_types=("qwen3_tts",),
        published=_QWEN3_TTS,
        frontend=True,
        encodes_speakers=True,
        options=frozenset({"streams", "text_first", "voice_cache"}),
    ),
    Family("speechlm", "vllm", model_types=("speechlm", "bagpiper"), vllm_model="SpeechLmForCausalLM"),
    Family("spark_tts", "gpu", subfolders=("LLM", "BiCodec"), options=frozenset({"streams"})),
    Family(
        "fish_speech",
        "gpu",
        model_types=("fish_qwen3_omni",),
        vllm_model="FishForCausalLM",
        options=frozenset({"streams"}),
    ),
)
PUBLISHED = {
    card.name: (family, hub_id, card) for family in FAMILIES for hub_id, card in family.published.items()
}


_registered: dict[str, Provider] = {}


def has_option(card: ModelCard, option: str) -> bool:
    """Whether a model on the native engine has this option of `Family.options`."""
    return any(option in family.options for family in FAMILIES if family.name == card.family)


def register_pipeline(
    name: str,
    card: ModelCard,
    factory: Callable[..., Pipeline],
    decoder: Callable[..., StageDecoder] | None = None,
) -> Callable[[], object]:
    """Adds a pipeline to this process under `name`, in place of any other with that name. Returns a function
    that removes it.

    `factory(**options)` is called by `open_pipeline(name, **options)`, `decoder` by `open_decoder`.
    """
    _registered[name] = Provider(name, lambda: card, factory, decoder=decoder)
    return lambda: _registered.pop(name, None)


def is_registered(model: str) -> bool:
    """Whether the model was added by `register_pipeline`; only this process can open it."""
    return model in _registered


def describe(model: str) -> ModelCard:
    """The card of a registry name or a checkpoint folder, without loading weights.

    Downloads the config files of a published checkpoint, unless the hub's cache has them. Raises
    `ModelError`: `model.unknown`, `model.bad_checkpoint`, `model.missing_extra` or `model.unreachable`.
    """
    provider = _found(model, _DESCRIPTION_FILES)
    return replace(provider.describe(), name=provider.name)


def open_pipeline(model: str, **options: Any) -> Pipeline:
    """Loads a model by registry name or checkpoint folder; `options` are those of its family.

    Downloads the weights (safetensors only) of a published checkpoint, unless the hub's cache has them.
    Raises `ModelError`: `model.unknown`, `model.bad_checkpoint`, `model.missing_extra` or `model.unreachable`.
    """
    return _found(model, _WEIGHT_FILES).load(**options)


def open_frontend(model: str) -> Frontend | None:
    """The frontend of a model, which prepares requests outside of the engine's process; None if its family
    has none.

    Raises like `open_pipeline`.
    """
    return _found(model, _WEIGHT_FILES).frontend()


def open_decoder(model: str, **options: Any) -> StageDecoder:
    """Loads the decoder of a model's codec alone, with the options of `open_pipeline`; raises like it, and
    `config.invalid` for a model without one."""
    decoder = _found(model, _WEIGHT_FILES).decoder
    if decoder is None:
        raise invalid(f"The model {_short(model)} has no codec of its own.", "Use the model of the codes.")
    return decoder(**options)


def speaker_encoder(model: str) -> Callable[[str], SpeakerVector]:
    """Opens the speaker encoder of a checkpoint folder alone, on a device. Raises `ModelError`, also for a model
    without one (`model.bad_checkpoint`)."""
    folder = _folder(model)
    family = recognise(folder, FAMILIES)
    if family.encodes_speakers and describe(model).capabilities.cloning:
        return partial(family.call, ".speaker", "open_speaker_encoder", folder)
    raise bad_checkpoint(
        f"The model {_short(model)} has no speaker encoder.", "Name the folder of one that clones."
    )


def model_names() -> list[str]:
    """All registry names; imports none of their modules."""
    return sorted({*PUBLISHED, *BUILT_IN.names, *_registered, *entry_points(group=ENTRY_POINT_GROUP).names})


def list_models() -> list[ModelCard]:
    """The cards of all registry names, sorted. Uses no network: published checkpoints have their published
    cards."""
    return [
        PUBLISHED[name][2] if name in PUBLISHED and name not in _registered else describe(name)
        for name in model_names()
    ]


def recognise(folder: Path, families: Sequence[Family]) -> Family:
    """The family of a checkpoint folder, by its config.json or its subfolders.

    Raises `ModelError` (`model.bad_checkpoint`) for an unknown or unreadable folder.
    """
    for family in families:
        if family.subfolders and all((folder / name).is_dir() for name in family.subfolders):
            return family
    model_type = read_table(folder / "config.json").get("model_type")
    for family in families:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(name for family in families for name in family.model_types))
    raise bad_checkpoint(
        f"The folder {_short(str(folder))} has the unknown model_type {str(model_type)[:80]!r}.",
        f"Supported are: {known}.",
    )


def _found(model: str, hub_files: Sequence[str]) -> Provider:
    """The provider of a registry name or a checkpoint folder. Of a published checkpoint, the files
    whose names match `hub_files` are downloaded."""
    if (registered := _registered.get(model)) is not None:
        return registered
    if model in PUBLISHED:
        family, hub_id, _ = PUBLISHED[model]
        try:
            # The hub's snapshot folder, whose name is the commit.
            folder = Path(
                family.call("huggingface_hub", "snapshot_download", hub_id, allow_patterns=list(hub_files))
            )
        except OSError as error:
            raise ModelError(
                ErrorCode.MODEL_UNREACHABLE,
                f"The checkpoint {hub_id} is not in the hub's cache and could not be fetched ({type(error).__name__}).",
                "Connect to the hub (or set HF_ENDPOINT to a mirror), or download the folder elsewhere and give its path as the model.",
            ) from error
        return _of_folder(model, family, folder, revision=folder.name)
    for entry in BUILT_IN.select(name=model) or entry_points(group=ENTRY_POINT_GROUP, name=model):
        try:
            found = entry.load()
            return Provider(model, found.describe, found.load)
        except (ImportError, AttributeError) as error:
            raise ModelError(
                ErrorCode.MODEL_MISSING_EXTRA,
                f"The pipeline {model!r} is registered as {entry.value!r}, which does not load: {error}.",
                "Install what it needs, or uninstall the package that registers it.",
            ) from error
    folder = _folder(model)
    return _of_folder(str(folder), recognise(folder, FAMILIES), folder)


def _of_folder(name: str, family: Family, folder: Path, **known: Any) -> Provider:
    """The provider of a checkpoint folder. `known`: fields of the card that replace those of the folder."""

    def read(module: str, function: str) -> Any:
        try:
            return family.call(module, function, folder)
        except OSError as error:
            raise bad_checkpoint(f"The folder {_short(str(folder))} cannot be read: {error}.") from error

    return Provider(
        name,
        lambda: replace(read(".config", "describe"), **known),
        partial(family.call, ".pipeline", "open_pipeline", folder),
        lambda: read(".prompt", "open_frontend") if family.frontend else None,
        partial(family.call, ".pipeline", "open_decoder", folder),
    )


def _folder(model: str) -> Path:
    """The checkpoint folder with the path `model`. Raises `model.unknown` if it is not a folder."""
    with suppress(OSError, ValueError, RuntimeError):
        if (folder := Path(model).expanduser().resolve()).is_dir():
            return folder
    names = model_names()
    given = f"Give the folder that holds a checkpoint's config.json, or one of: {', '.join(names)}."
    raise ModelError(
        ErrorCode.MODEL_UNKNOWN,
        f"There is no model and no readable folder {_short(model)}.",
        nearest(model, names).rstrip() or given,
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}...")
