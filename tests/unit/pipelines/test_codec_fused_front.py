"""The fused front of the codec does the arithmetic of the plain modules: whole, in chunks, from warm
states, in a continuous batch."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.checkpoint import TINY_CODEC, dummy_decoder
from pipelines.codec.graphs import UtteranceGraphs
from pipelines.codec.stage import CodecStage
from pipelines.nn.checkpoint import Checkpoint
from pipelines.qwen3_tts.codec import CodecDecoder, fuses_front
from pipelines.qwen3_tts.config import CodecConfig
from tests.support.codec_stage_kit import Heard

FOLDER = Path(__file__).parents[2] / "golden" / "qwen3_tts" / "checkpoint-base" / "speech_tokenizer"
CLOSE = 3e-5


@lru_cache(maxsize=2)
def decoder(fused_front: bool) -> CodecDecoder:
    torch.set_num_threads(1)
    with Checkpoint(FOLDER) as source:
        return CodecDecoder(CodecConfig.load(FOLDER).decoder, source, fused_front=fused_front)


def codes(frames: int, seed: int) -> Tensor:
    return torch.randint(256, (frames, 16), generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, wanted: Tensor, by: float = CLOSE) -> None:
    torch.testing.assert_close(found, wanted, atol=by, rtol=0)


def test_whole_utterances_equal_the_plain_front() -> None:
    items = [codes(frames, frames) for frames in (1, 7, 90)]
    for wave, wanted in zip(decoder(True).decode(items), decoder(False).decode(items), strict=True):
        close(wave, wanted)


def test_the_plain_front_is_the_default() -> None:
    decoders = (decoder(False), decoder(True), dummy_decoder(TINY_CODEC, torch.device("cpu"), torch.float32))
    assert [one._front is not None for one in decoders] == [False, True, False]


@pytest.mark.parametrize(("first", "then"), [(True, True), (True, False), (False, True)])
def test_chunks_and_warm_states_equal_the_whole_and_states_fit_both(first: bool, then: bool) -> None:
    stream = codes(90, 1)
    (whole,) = decoder(False).decode([stream])
    state, waves = decoder(first).new_state(), []
    for at, part in enumerate(stream.split([1, 2, 30, 1, 16, 40])):
        waves.extend(decoder(first if at % 2 else then).decode_chunk([state], [part]))
    close(torch.cat(waves), whole)
    warm = decoder(first).new_state()
    decoder(first).decode_chunk([warm], [stream[:11]])
    close(decoder(then).decode([stream[11:]], [warm])[0], whole[11 * decoder(True).samples_per_frame :])


def test_in_a_continuous_batch_it_is_the_whole_decode() -> None:
    class Continuous(CodecDecoder):
        def __init__(self) -> None:
            self.__dict__.update(decoder(True).__dict__)
            self.utterances = UtteranceGraphs(self.run, self.shape, 3, 4)
            self.utterances.prepare()

    items, heard = [codes(frames, frames) for frames in (9, 1, 4, 13, 6, 80)], Heard()
    stage: CodecStage = CodecStage(Continuous())
    for at, item in enumerate(items):
        stage.decode(item.numpy(), heard.at(str(at)))
    for name, found in heard.take(len(items)):
        assert isinstance(found, np.ndarray)
        close(torch.from_numpy(found), decoder(False).decode([items[int(name)]])[0])
    stage.close()


def test_bfloat16_errs_no_more_than_the_plain_front() -> None:
    item = codes(40, 4)
    (exact,) = decoder(False).decode([item])
    errors: list[float] = []
    for front in (False, True):
        with Checkpoint(FOLDER) as source:
            low = CodecDecoder(
                CodecConfig.load(FOLDER).decoder, source, dtype=torch.bfloat16, fused_front=front
            )
        (wave,) = low.decode([item])
        errors.append(float((wave - exact).square().mean().sqrt() / exact.square().mean().sqrt()))
    assert 0.001 < errors[1] <= 1.2 * errors[0]


@pytest.mark.parametrize(
    ("device", "dtype", "reproducible", "rows", "fused"),
    [
        ("cuda", torch.bfloat16, False, 0, True),
        ("cuda:1", torch.bfloat16, False, 256, True),
        ("cuda", torch.bfloat16, True, 0, False),
        ("cuda", torch.bfloat16, True, 256, True),
        ("cuda", torch.float32, False, 0, False),
        ("cpu", torch.bfloat16, False, 0, False),
    ],
)
def test_it_serves_where_it_was_measured_or_compared_bit_by_bit(
    device: str, dtype: torch.dtype, reproducible: bool, rows: int, fused: bool
) -> None:
    assert fuses_front(device, dtype, reproducible, rows) is fused
