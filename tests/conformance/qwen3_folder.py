"""A golden folder of Qwen3-TTS: its cases, its arrays, and its models in our code."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.nn.checkpoint import Checkpoint
from pipelines.qwen3_tts.config import Qwen3TTSConfig
from pipelines.qwen3_tts.model import Qwen3TTSModel, take_weights
from pipelines.qwen3_tts.prompt import (
    REFERENCE_TAIL,
    ROLE_TOKENS,
    TARGET_TAIL,
    Prompt,
    TextTokenizer,
    TokenizedTask,
    build_prompt,
)
from tests.support.golden_arrays import Array, Thinned, largest_difference, read_arrays
from tests.support.golden_checkpoint import whole

#: Positions that an engine holds at least.
LEAST_CONTEXT = 2048
GREEDY = SamplingParams(temperature=0.0, residual_temperature=0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One item of a case, with the keys of its arrays."""

    golden: Golden
    case: dict[str, Any]
    index: int

    @property
    def name(self) -> str:
        return f"{self.case['name']}.{self.index}"

    @property
    def item(self) -> dict[str, Any]:
        return self.case["rows"][self.index]

    def array(self, field: str) -> Any:
        """An array of this row, `Thinned` where the folder has it so."""
        return self.golden.arrays(self.case["arrays"])[f"{self.name}.{field}"]

    @property
    def tokens(self) -> int:
        """max_new_tokens: draws of codebook 0, of which the last makes no frame."""
        return (
            self.case["generation"].get("max_new_tokens")
            or self.golden.config(self.case).sampling.max_new_tokens
        )

    @property
    def reference_text(self) -> str | None:
        """What the reference says; None where only its voice is taken, which drops the text."""
        return None if self.item.get("x_vector_only_mode") else self.item.get("ref_text")

    def wave(self, samples_per_frame: int) -> Array:
        """The expected audio [samples]. The reference cuts its recording off in floating point, at times
        one sample early."""
        wave = self.array("wave")
        early = len(wave) - len(self.array("codes")) * samples_per_frame
        if early == 1 and self.item.get("ref_frames"):
            assert not isinstance(wave, Thinned), f"{self.name}.wave must be whole to be cut"
            return wave[1:]
        return wave

    def prompt(self, config: Qwen3TTSConfig) -> Prompt:
        """The prompt of this row from the token ids, voice vectors and reference codes of the golden data."""
        item, clone = self.item, self.case["mode"] == "clone"
        ids, text_first = item["text_ids"], self.case["non_streaming_mode"]
        in_context = clone and not item["x_vector_only_mode"]
        task = TokenizedTask(
            ids[:ROLE_TOKENS],
            ids[ROLE_TOKENS:-TARGET_TAIL],
            instruct_ids=(config.takes_instructions and item.get("instruct_ids")) or [],
            language=item.get("language") or "auto",
            speaker=item.get("speaker"),
            reference_ids=item["ref_text_ids"][ROLE_TOKENS:-REFERENCE_TAIL] if in_context else None,
        )
        return build_prompt(
            config,
            task,
            self.array("speaker_embedding") if clone else None,
            self.array("ref_codes").astype(np.int64) if in_context else None,
            not clone if text_first is None else text_first,
        )

    def request(self, config: Qwen3TTSConfig) -> GenerationRequest:
        penalty = self.case["generation"].get("repetition_penalty", config.sampling.repetition_penalty)
        return GenerationRequest(
            self.name, self.prompt(config), replace(GREEDY, repetition_penalty=penalty), 0, self.tokens
        )


class Golden:
    """A golden folder, with its models loaded on first use."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        self.folder = folder
        self._changed = tempfile.TemporaryDirectory()
        self.device = device
        self.dtype = dtype
        self.content: dict[str, Any] = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
        self.arrays: Callable[[str], Any] = cache(lambda name: read_arrays(folder / name))
        self.model: Callable[[Path], Qwen3TTSModel] = cache(self._model)
        self.tokenizer: Callable[[str], TextTokenizer] = cache(
            lambda checkpoint: TextTokenizer.from_folder(folder / checkpoint)
        )

    def rows(self, case: dict[str, Any]) -> list[Row]:
        return [Row(self, case, index) for index in range(len(case["rows"]))]

    def row(self, name: str, index: int) -> Row:
        return Row(self, next(case for case in self.content["cases"] if case["name"] == name), index)

    def config(self, case: dict[str, Any]) -> Qwen3TTSConfig:
        return self.model(self.checkpoint(case)).config

    def checkpoint(self, case: dict[str, Any]) -> Path:
        """The folder of the case's checkpoint, or of its double with the changes that the case makes to
        the config."""
        folder, override = whole(self.folder / case["checkpoint"]), case.get("config_override")
        if not override:
            return folder
        double = Path(self._changed.name) / str(self.content["cases"].index(case))
        if not double.exists():
            double.mkdir()
            for path in folder.resolve().iterdir():
                (double / path.name).symlink_to(path)
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            (double / "config.json").unlink()
            (double / "config.json").write_text(json.dumps(config | override), encoding="utf-8")
        return double

    def context(self, config: Qwen3TTSConfig) -> int:
        """Positions that an engine needs for the longest row of the folder."""
        lengths = [
            row.get("prompt_len", 0) + case.get("generation", {}).get("max_new_tokens", 0)
            for case in self.content["cases"]
            for row in case.get("rows", [])
        ]
        return min(max(LEAST_CONTEXT, *lengths), config.talker.max_positions)

    @torch.inference_mode()
    def _model(self, folder: Path) -> Qwen3TTSModel:
        config = Qwen3TTSConfig.from_folder(folder)
        with Checkpoint(folder) as source:
            weights = take_weights(source, config, self.dtype, self.device)
            for others in ("speaker_encoder.*", "*rotary_emb*"):
                source.ignore(others)
            source.finish()
        return Qwen3TTSModel(config, weights, self.context(config))


def near(measured: Tensor, wanted: Array, limit: float, what: str) -> None:
    """Fails with the largest absolute difference when it is above `limit`."""
    difference = largest_difference(measured.double().cpu().numpy(), wanted, what)
    assert difference <= limit, f"{what}: largest difference {difference:.2e}, limit {limit:.0e}"
