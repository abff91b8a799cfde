"""Every setting of a request for SpeechLM is that of the draws it is named after, and of no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.request import Generation, Message, SynthesisRequest
from pipelines.speechlm.config import CAPABILITIES, SpeechLmConfig
from pipelines.speechlm.lm import TextCoder
from pipelines.speechlm.pipeline import SpeechLmOptions, SpeechLmPipeline
from tests.support.field_tables import changed, fields_of

CONFIG = SpeechLmConfig.from_folder(Path(__file__).parents[2] / "golden" / "speechlm" / "checkpoint")
CODER = TextCoder(CONFIG)
#: Settings and the parts of the engine's request that they change, if any.
TABLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.5}, {"text.temperature": 0.5, "audio.temperature": 0.5}),
    ({"text_temperature": 0.5}, {"text.temperature": 0.5}),
    ({"audio_temperature": 0.5}, {"audio.temperature": 0.5}),
    (
        {"temperature": 0.1, "text_temperature": 0.5, "audio_temperature": 0.3},
        {"text.temperature": 0.5, "audio.temperature": 0.3},
    ),
    ({"top_k": 7}, {"text.top_k": 7, "audio.top_k": 7}),
    ({"audio_top_k": 7}, {"audio.top_k": 7}),
    ({"top_k": 3, "audio_top_k": 7}, {"text.top_k": 3, "audio.top_k": 7}),
    ({"audio_top_k": 0}, {"audio.top_k": 0}),
    ({"top_p": 0.5}, {"text.top_p": 0.5, "audio.top_p": 0.5}),
    ({"cfg": 2.5}, {"cfg": 2.5}),
    ({"max_tokens": 9}, {"max_tokens": 9}),
    ({"max_seconds": 0.2}, {"max_rows": 10 + CONFIG.delay}),
]
#: Read elsewhere: by the prompt, the mode of the request, its seed, and the check that refuses what SpeechLM
#: cannot do.
ELSEWHERE = {"voice", "language", "instruct", "reference_text", "seed", "repetition_penalty", "mode", "roles"}


def script_of(**settings: Any) -> dict[str, Any]:
    model = object.__new__(SpeechLmPipeline)
    model.config, model.coder, model.capabilities, model.sample_rate = CONFIG, CODER, CAPABILITIES, 16_000
    model._options, model._frames_per_second, model._context, model._meta = SpeechLmOptions(), 50.0, 4000, {}
    _, info = model._prepare(
        SynthesisRequest("one", (Message("user", "text", "Hello."),), Generation(**settings), 5)
    )
    return fields_of(info.script)


@pytest.mark.parametrize(("said", "expected"), TABLE, ids=lambda part: ",".join(part))
def test_a_setting_is_that_of_its_draws(said: dict[str, Any], expected: dict[str, Any]) -> None:
    plain = script_of()
    assert (plain["seed"], plain["audio.top_k"], plain["text.top_k"]) == (
        5,
        CONFIG.audio_topk,
        CONFIG.text_topk,
    )
    assert changed(plain, script_of(**said)) == expected


def test_no_setting_is_missing_in_the_table() -> None:
    assert {name for said, _ in TABLE for name in said} | ELSEWHERE == set(Generation.__struct_fields__)
