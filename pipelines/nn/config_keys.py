"""The configs of a checkpoint folder, read with errors that name file and key; and what tells checkpoints apart. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pipelines.errors import ErrorCode, ModelError

_PROBES = 16
_PROBE_BYTES = 1 << 16


class Keys:
    """The keys of one section of a JSON or YAML file. Every method raises `ModelError` (`model.bad_checkpoint`).

    A `default` stands for a key that is absent or null.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], advice: str, prefix: str = "") -> None:
        self._path = path
        self._values = values
        self._advice = advice
        self._prefix = prefix

    @classmethod
    def read(cls, path: Path, advice: str) -> Keys:
        """The top of a file; `advice` is what to do about any fault in it."""

        def bad(what: str) -> ModelError:
            return ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, f"{path} {what}.", advice)

        try:
            values = _load(path)
        except FileNotFoundError as error:
            raise bad("is missing") from error
        except (OSError, ValueError) as error:
            raise bad(f"cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise bad("does not hold a table of keys")
        return cls(path, cast("dict[str, Any]", values), advice)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any) -> Any:
        return self._values.get(key, default)

    def section(self, key: str) -> Keys:
        return Keys(self._path, self.table(key), self._advice, f"{self._prefix}{key}.")

    def table(self, key: str) -> dict[str, Any]:
        return cast("dict[str, Any]", self._typed(key, dict, "a table of keys"))

    def ids(self, key: str) -> dict[str, int]:
        """A table of names, in lower case, and whole numbers."""
        table = self.table(key)
        if not all(type(value) is int for value in table.values()):
            raise self.error(key, "must map names to whole numbers")
        return {name.lower(): value for name, value in table.items()}

    def whole(self, key: str) -> int:
        """A whole number that is not negative."""
        value = self._typed(key, int, "a whole number")
        if value < 0:
            raise self.error(key, "must not be negative")
        return int(value)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self._typed(key, int, "a whole number", default)
        if value < 1:
            raise self.error(key, "must be at least 1")
        return int(value)

    def wholes(self, key: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """A list of whole numbers above 0."""
        values = self._typed(key, (list, tuple), "a list of whole numbers", default)
        if not values or not all(type(value) is int and value > 0 for value in values):
            raise self.error(key, "must be a list of whole numbers above 0")
        return tuple(values)

    def number(self, key: str) -> float:
        return float(self._typed(key, (int, float), "a number"))

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = float(self._typed(key, (int, float), "a number", default))
        if not 0 < value < math.inf:
            raise self.error(key, "must be above 0")
        return value

    def rope_theta(self) -> float:
        """The base of a rope that is not scaled, from the keys that releases of transformers have for it."""
        rope = self.get("rope_scaling", None) or self.get("rope_parameters", None) or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
        if kind != "default":
            raise self.error("rope_scaling", "asks for a scaled rope, which is not supported")
        theta = self.number("rope_theta") if "rope_theta" in self else rope.get("rope_theta")
        if not isinstance(theta, int | float) or not 0 < theta < math.inf:
            raise self.error("rope_theta", "is missing or not above 0")
        return float(theta)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._found(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """One of the words that the code can run."""
        value = self._found(key, default)
        if value not in allowed:
            raise self.error(key, f"is {value!r}; it must be {' or '.join(allowed)}")
        return value

    def text(self, key: str) -> str:
        return str(self._typed(key, str, "text"))

    def error(self, key: str, what: str) -> ModelError:
        """The error that says of a key what is wrong with it."""
        return ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, f"{self._path}: {self._prefix}{key} {what}.", self._advice)

    def require(self, holds: bool, what: str) -> None:
        """Raises the error that says `what` of this section, unless a relation holds that the code relies on."""
        if not holds:
            section = f" {self._prefix[:-1]}:" if self._prefix else ""
            raise ModelError(ErrorCode.MODEL_BAD_CHECKPOINT, f"{self._path}:{section} {what}.", self._advice)

    def _found(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if key not in self._values:
            raise self.error(key, "is missing")
        return value

    def _typed(self, key: str, types: type | tuple[type, ...], words: str, default: Any = None) -> Any:
        value = self._found(key, default)
        if not isinstance(value, types) or isinstance(value, bool):
            raise self.error(key, f"must be {words}")
        return value


def revision(folder: Path, suffixes: Sequence[str]) -> str:
    """A digest that tells checkpoints apart: configs and sizes whole, weights by samples (they have gigabytes)."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\n".encode())
        with path.open("rb") as file:
            for probe in range(_PROBES):
                file.seek(probe * size // _PROBES)
                digest.update(file.read(_PROBE_BYTES))
    return digest.hexdigest()[:16]


def _load(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return json.loads(text)
    import yaml  # an extra, and only where a family has such configs

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
