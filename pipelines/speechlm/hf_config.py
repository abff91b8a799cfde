"""The checkpoint's config.json as vLLM wants it: its `text_config` is a Qwen3's."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from pipelines.speechlm.config import MODEL_TYPES


class SpeechLmHfConfig(Qwen3Config):
    """A Qwen3 config with the keys of the streams; the tower and the codec are not vLLM's."""

    model_type = "speechlm"

    def __init_subclass__(cls, **keys: Any) -> None:
        # transformers 5 generates an `__init__` for every config class without one of its own, which would not read `text_config`.
        cls.__init__ = cls.__init__
        super().__init_subclass__(**keys)

    def __init__(self, text_config: dict[str, Any] | None = None, audio_config: dict[str, Any] | None = None, **keys: Any) -> None:
        text = {name: value for name, value in (text_config or {}).items() if name not in ("model_type", "architectures")}
        super().__init__(**{**text, **keys})


class BagpiperHfConfig(SpeechLmHfConfig):
    model_type = "bagpiper"


def register_configs() -> None:
    """Makes the model types known to `transformers` in this process. May be called more than once."""
    for name, config in zip(MODEL_TYPES, (SpeechLmHfConfig, BagpiperHfConfig)):
        AutoConfig.register(name, config, exist_ok=True)
