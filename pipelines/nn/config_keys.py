"""Reads the configs of a checkpoint folder into annotated dataclasses, with errors that name file and key,
and computes digests of checkpoints.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_type_hints

import msgspec

from pipelines.errors import ErrorCode, ModelError
from pipelines.request import CodecIdentity

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROBES = 16
_PROBE_BYTES = 1 << 16
#: Maximum size of a config file.
_CONFIG_BYTES = 4 << 20

#: Types of values. An error says that the value must be the `description` of its type.
Size = Annotated[int, msgspec.Meta(ge=1, description="a whole number above 0")]
Whole = Annotated[int, msgspec.Meta(ge=0, description="a whole number that is not negative")]
Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max, description="a number above 0")]
NotNegative = Annotated[
    float, msgspec.Meta(ge=0, le=sys.float_info.max, description="a number that is not negative")
]
Sizes = Annotated[tuple[Size, ...], msgspec.Meta(min_length=1, description="a list of whole numbers above 0")]
#: The advice for most faults.
DOWNLOAD_AGAIN = "Download the checkpoint again, or check that it belongs to this model family."

T = TypeVar("T")


def bad_checkpoint(message: str, advice: str = DOWNLOAD_AGAIN) -> ModelError:
    """The error for a checkpoint that cannot be used; `message` names the tensor, or the file and its key."""
    return ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, message, advice)


@dataclass(frozen=True, slots=True)
class StackShape:
    """The shape of a stack of decoder layers, with the config keys of transformers."""

    hidden: Annotated[Size, "hidden_size"]
    intermediate: Annotated[Size, "intermediate_size"]
    layers: Annotated[Size, "num_hidden_layers"]
    heads: Annotated[Size, "num_attention_heads"]
    kv_heads: Annotated[Size, "num_key_value_heads"]
    head_dim: Size
    eps: Annotated[Positive, "rms_norm_eps"]
    rope_theta: Positive

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def cached_values(self) -> int:
        """The number of key and value elements that are cached for a position, in all layers."""
        return 2 * self.layers * self.kv_width


@dataclass(frozen=True, slots=True)
class StackConfig(StackShape):
    """The shape of an LM with the layers of Qwen2 or Qwen3."""

    vocab: Annotated[Size, "vocab_size"]
    max_positions: Annotated[Size, "max_position_embeddings"]


@dataclass(frozen=True, slots=True)
class BaseSamplingDefaults:
    """A model's default sampling: the settings that all families have."""

    temperature: NotNegative = 1.0
    top_k: Whole = 0
    top_p: NotNegative = 1.0
    repetition_penalty: NotNegative = 1.0
    #: Maximum tokens or frames of an utterance or a turn; the last possible one is not speech.
    max_new_tokens: Size = 2048


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one section of a JSON or YAML file. Every method raises `ModelError`
    (`model.bad_checkpoint`) that names file and key.

        config = Keys.read(folder / "config.json").section("text_config").take(StackConfig)

    A key that is null is absent.
    """

    path: Path
    table: Mapping[str, Any]
    #: The sections around this one, each with a dot.
    prefix: str = ""

    @classmethod
    def read(cls, path: Path) -> Keys:
        """The top level of a file."""
        return cls(path, read_table(path))

    def __contains__(self, key: str) -> bool:
        return self.table.get(key) is not None

    def section(self, key: str) -> Keys:
        return Keys(self.path, self.value(key, dict[str, Any]), f"{self.prefix}{key}.")

    def value(self, key: str, kind: Any, default: Any = MISSING) -> Any:
        """The value of a key, converted to this type by msgspec; dots separate sections; `default`: the value
        of an absent key."""
        section, _, rest = key.partition(".")
        if rest:
            return self.section(section).value(rest, kind, default)
        found = self.table.get(key)
        if found is None:
            if default is MISSING:
                raise self.error(key, "is missing")
            return default
        try:
            return msgspec.convert(found, kind)
        except msgspec.ValidationError as error:
            descriptions = [
                meta.description
                for meta in getattr(kind, "__metadata__", ())
                if isinstance(meta, msgspec.Meta)
            ]
            what = f"must be {descriptions[0]}" if descriptions else f"is {found!r}: {error}"
            raise self.error(key, what) from error

    def take(self, kind: type[T], **known: Any) -> T:
        """Reads a dataclass whose fields are keys of this section. A field whose type is a dataclass is a
        section of its own.

        A key has the name of its field, or the one in its annotation: `width: Annotated[Size, "sizes.width"]`.
        It can be absent if the field has a default. `known`: values of fields that are not read from the
        file.
        """
        types = get_type_hints(kind, include_extras=True)
        for one in fields(cast("Any", kind)):
            if one.name not in known:
                wanted = types[one.name]
                name = next(
                    (key for key in getattr(wanted, "__metadata__", ()) if isinstance(key, str)), one.name
                )
                section: Any = getattr(wanted, "__origin__", wanted)
                known[one.name] = (
                    self.section(name).take(cast("type[Any]", section))
                    if is_dataclass(section)
                    else self.value(name, wanted, one.default)
                )
        return kind(**known)

    def expect(self, **values: object) -> None:
        """Raises the error for keys with values other than the supported ones; they can be absent."""
        for key, value in values.items():
            if (found := self.table.get(key)) not in (None, value):
                raise self.error(key, f"is {found!r}; only {value!r} is supported")

    def rope_theta(self) -> float:
        """The base of a rope that is not scaled, from the keys that different releases of transformers use
        for it."""
        name = next((name for name in ("rope_scaling", "rope_parameters") if self.table.get(name)), None)
        rope = self.section(name) if name else Keys(self.path, {}, self.prefix)
        if rope.value("rope_type", str, rope.value("type", str, "default")) != "default":
            raise self.error("rope_scaling", "asks for a scaled rope, which is not supported")
        return (self if "rope_theta" in self else rope).value("rope_theta", Positive)

    def error(self, key: str, what: str) -> ModelError:
        """The error of a wrong key."""
        return bad_checkpoint(f"{self.path}: {self.prefix}{key} {what}.")

    def require(self, holds: bool, what: str) -> None:
        """Raises an error about this section with the text `what`, unless `holds`: a relation of its values
        that the code relies on."""
        if not holds:
            section = f" {self.prefix[:-1]}:" if self.prefix else ""
            raise bad_checkpoint(f"{self.path}:{section} {what}.")


def revision(folder: Path, suffixes: Sequence[str]) -> str:
    """A digest of a checkpoint's files: of their names and sizes, and of samples of their contents, since
    weights have gigabytes."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\n".encode())
        with path.open("rb") as file:
            for probe in range(_PROBES):
                file.seek(probe * size // _PROBES)
                digest.update(file.read(_PROBE_BYTES))
    return digest.hexdigest()[:16]


def codec_identity(
    name: str, paths: Iterable[Path], frame_samples: int, sample_rate: int, codebook_sizes: Sequence[int]
) -> CodecIdentity:
    """The identity of a codec: the SHA-256 of its file; of several, that of their digests. Raises `ModelError`
    (`model.bad_checkpoint`)."""
    digests = list[str]()
    for path in sorted(paths):
        try:
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise bad_checkpoint(f"{path} cannot be read: {error}.") from error
    sha256 = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    return CodecIdentity(name, sha256, sample_rate / frame_samples, sample_rate, tuple(codebook_sizes))


def read_table(path: Path) -> dict[str, Any]:
    """Reads a JSON or YAML file that holds a table of keys. Raises `ModelError` (`model.bad_checkpoint`) that
    names the file."""
    # A FIFO or a device would block or never end, so only a plain file is opened.
    if not path.is_file():
        raise bad_checkpoint(f"{path} is missing.")
    try:
        with path.open("rb") as file:
            data = file.read(_CONFIG_BYTES + 1)
        if len(data) > _CONFIG_BYTES:
            raise ValueError(f"it has over {_CONFIG_BYTES >> 20} MiB")
        values = json.loads(data) if path.suffix == ".json" else _yaml(data)
    except (OSError, ValueError, RecursionError) as error:
        raise bad_checkpoint(f"{path} cannot be read as {path.suffix[1:].upper()}: {error}.") from error
    if not isinstance(values, dict):
        raise bad_checkpoint(f"{path} does not hold a table of keys.")
    return values


def read_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer from one file. Raises `ModelError` (`model.bad_checkpoint`) that names the file."""
    from tokenizers import Tokenizer  # imported here, because `describe` does not need it

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise bad_checkpoint(f"{path} cannot be read as a tokenizer: {error}.") from error


def _yaml(data: bytes) -> Any:
    import yaml  # an optional library, which only families with such configs need

    try:
        return yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
