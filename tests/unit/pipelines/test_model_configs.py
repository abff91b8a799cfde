"""Config classes of ours that `transformers` builds: what `config.json` says reaches the engine under every model type."""

from __future__ import annotations

import json
import pkgutil
from importlib import import_module
from inspect import unwrap
from pathlib import Path

import pytest
from transformers import AutoConfig, PreTrainedConfig, Qwen3Config

import pipelines
from pipelines.speechlm.config import MODEL_TYPES
from pipelines.speechlm.hf_config import SpeechLmHfConfig, register_configs
from tests.support.speechlm_checkpoint import GOLDEN, renamed

#: What a module of an engine that is not installed here needs.
EXTRAS = {"vllm", "triton"}


def import_all() -> None:
    """Imports every module of the models that speaks of `transformers`, as far as its extra is installed."""
    for module in pkgutil.walk_packages(pipelines.__path__, "pipelines."):
        path = Path(pipelines.__path__[0], *module.name.split(".")[1:]).with_suffix(".py")
        if path.is_file() and "transformers" in path.read_text(encoding="utf-8"):
            try:
                import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in EXTRAS:
                    raise


def ours(base: type[PreTrainedConfig] = PreTrainedConfig) -> list[type[PreTrainedConfig]]:
    """Config classes below `base` that a module of the models defines."""
    found = [one for one in base.__subclasses__() if one.__module__.startswith("pipelines.")]
    return [*found, *(below for one in base.__subclasses__() for below in ours(one))]


def test_no_config_class_loses_the_way_in_which_its_base_reads_a_checkpoint() -> None:
    """`transformers` generates an `__init__` for a subclass without one; the base's own must still be what runs."""
    import_all()
    classes = ours()
    assert {one.__name__ for one in classes} >= {"SpeechLmHfConfig", "BagpiperHfConfig"}
    for one in classes:
        if any(_is_ours(base) for base in one.__mro__):
            assert _is_ours(one), f"the __init__ of {one.__name__} was generated: it reads less than that of its base"


def _is_ours(config: type) -> bool:
    """Whether the `__init__` that runs for a class was written in a module of ours."""
    code = getattr(unwrap(config.__init__), "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(Path(pipelines.__path__[0]))


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_what_text_config_says_is_read_under_every_model_type(name: str, tmp_path: Path) -> None:
    content = renamed(json.loads((GOLDEN / "checkpoint" / "config.json").read_text()), name)
    (tmp_path / "config.json").write_text(json.dumps(content))
    register_configs()
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == name
    told = {key: value for key, value in content["text_config"].items() if key not in ("model_type", "rope_theta")}
    assert {key: getattr(config, key) for key in told} == told
    assert config.rope_parameters["rope_theta"] == content["text_config"]["rope_theta"]
    assert config.num_stream == content["num_stream"]


def test_a_model_type_to_come_reads_its_checkpoint_too() -> None:
    class Later(SpeechLmHfConfig):
        model_type = "later"

    class LaterStill(Later):
        model_type = "later_still"

    for config in (Later, LaterStill):
        assert config(text_config={"num_attention_heads": 7}).num_attention_heads == 7
    assert issubclass(LaterStill, Qwen3Config)
