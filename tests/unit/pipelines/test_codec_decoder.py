"""The codec decoder: alone equals in a batch, chunks equal the whole, states are independent, bad input
and files are named."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelines.codec.blocks import Past, window_masks
from pipelines.codec.decoder import PASS_FRAMES, CodecState
from pipelines.errors import ErrorCode, ModelError, SynthesisError
from pipelines.qwen3_tts.codec import CodecDecoder, load_codec

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen3_tts"
FOLDER = GOLDEN / "checkpoint-base" / "speech_tokenizer"
CLOSE = 3e-5


@lru_cache(maxsize=1)
def decoder() -> CodecDecoder:
    torch.set_num_threads(1)
    return load_codec(FOLDER).decoder


class Passes(CodecDecoder):
    """The decoder, which keeps the frames of its passes."""

    def __init__(self) -> None:
        self.__dict__.update(decoder().__dict__)
        self.frames: list[int] = []

    def run(self, codes: Tensor, past: Past | None, lengths: Sequence[int] | None = None) -> Tensor:
        self.frames.append(codes.shape[1])
        return super().run(codes, past, lengths)


def codes(frames: int, seed: int) -> Tensor:
    config = decoder().config
    return torch.randint(
        config.codebook_size, (frames, config.num_quantizers), generator=torch.Generator().manual_seed(seed)
    )


def chunked(states: list[CodecState], streams: list[Tensor], plan: random.Random) -> list[Tensor]:
    """Decodes several streams in chunks of random length, some streams idle in some rounds."""
    done, waves = [0] * len(streams), [[torch.empty(0)] for _ in streams]
    while any(at < len(stream) for at, stream in zip(done, streams)):
        turn = [i for i, stream in enumerate(streams) if done[i] < len(stream) and plan.random() < 0.8]
        parts = [streams[i][done[i] : done[i] + plan.choice((1, 1, 2, 3, 5, 9, 20))] for i in turn]
        for i, part, wave in zip(turn, parts, decoder().decode_chunk([states[i] for i in turn], parts)):
            assert wave.shape == (len(part) * decoder().samples_per_frame,)
            waves[i].append(wave)
            done[i] += len(part)
    return [torch.cat(wave) for wave in waves]


def test_alone_equals_in_a_batch_bit_for_bit() -> None:
    plan = random.Random(1)
    for trial in range(20):
        batch = [codes(plan.randint(1, 40), 100 * trial + i) for i in range(plan.randint(2, 6))]
        for item, wave in zip(batch, decoder().decode(batch)):
            assert wave.dtype == torch.float32
            assert wave.shape == (len(item) * decoder().samples_per_frame,)
            assert torch.equal(wave, decoder().decode([item])[0])


def test_streams_in_a_batch_equal_streams_alone_bit_for_bit() -> None:
    streams = [codes(frames, frames) for frames in (4, 9, 17)]
    together = [decoder().new_state() for _ in streams]
    alone = [decoder().new_state() for _ in streams]
    for start in range(0, 16, 4):
        parts = [stream[start : start + 4] for stream in streams]
        for wave, part, state in zip(decoder().decode_chunk(together, parts), parts, alone):
            assert torch.equal(wave, decoder().decode_chunk([state], [part])[0])
    for left, right in zip(together, alone):
        assert left.frames == right.frames
        assert torch.equal(left.values, right.values)


@pytest.mark.parametrize("seed", range(8))
def test_any_chunk_schedule_equals_the_whole(seed: int) -> None:
    plan = random.Random(seed)
    streams = [codes(plan.randint(1, 60), seed * 10 + i) for i in range(4)]
    waves = chunked([decoder().new_state() for _ in streams], streams, plan)
    for wave, whole in zip(waves, decoder().decode(streams)):
        torch.testing.assert_close(wave, whole, atol=CLOSE, rtol=0)


def test_first_chunk_comes_after_the_first_frame() -> None:
    stream = codes(3, 5)
    (first,) = decoder().decode_chunk([decoder().new_state()], [stream[:1]])
    torch.testing.assert_close(
        first, decoder().decode([stream])[0][: decoder().samples_per_frame], atol=CLOSE, rtol=0
    )


def test_right_padding_cannot_be_heard() -> None:
    """What batches on a GPU rely on: later frames, whatever they are, leave earlier samples alone."""
    short, other = codes(11, 1), codes(32, 2)
    padded = torch.stack((torch.cat((short, codes(21, 3))), other))
    wave = decoder().run(padded, None)
    torch.testing.assert_close(
        wave[0, : 11 * decoder().samples_per_frame], decoder().decode([short])[0], atol=CLOSE, rtol=0
    )
    torch.testing.assert_close(wave[1], decoder().decode([other])[0], atol=CLOSE, rtol=0)


def test_long_utterances_pass_in_parts() -> None:
    long, passes = codes(PASS_FRAMES + 18, 9), Passes()
    (whole,) = decoder().run(long[None], None)
    torch.testing.assert_close(passes.decode([long])[0], whole, atol=CLOSE, rtol=0)
    assert passes.frames == [PASS_FRAMES, 18]


def test_a_warm_state_continues_the_reference_and_stays_as_it_is() -> None:
    reference, new = codes(13, 1), codes(8, 2)
    warm = decoder().new_state()
    decoder().decode_chunk([warm], [reference])
    kept = warm.values.clone()
    whole = decoder().decode([torch.cat((reference, new))])[0][13 * decoder().samples_per_frame :]
    torch.testing.assert_close(decoder().decode([new], [warm])[0], whole, atol=CLOSE, rtol=0)
    streams = [warm.copy(), warm.copy()]
    decoder().decode_chunk(streams[:1], [new])
    torch.testing.assert_close(decoder().decode_chunk(streams[1:], [new])[0], whole, atol=CLOSE, rtol=0)
    assert warm.frames == 13
    assert torch.equal(warm.values, kept)


def test_empty_input() -> None:
    assert decoder().decode([]) == []
    assert decoder().decode_chunk([], []) == []
    empty, full = decoder().decode([codes(0, 1), codes(2, 1)])
    assert empty.shape == (0,)
    assert full.shape == (2 * decoder().samples_per_frame,)
    state = decoder().new_state()
    assert decoder().decode_chunk([state], [codes(0, 1)])[0].shape == (0,)
    assert state.frames == 0


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(3, 15, dtype=torch.long),
        torch.zeros(16, dtype=torch.long),
        torch.zeros(3, 16),
        torch.full((3, 16), 256),
        torch.full((3, 16), -1),
    ],
)
def test_codes_that_cannot_be_are_refused(bad: Tensor) -> None:
    for call in (
        lambda: decoder().decode([bad]),
        lambda: decoder().decode_chunk([decoder().new_state()], [bad]),
    ):
        with pytest.raises(SynthesisError) as caught:
            call()
        assert caught.value.code is ErrorCode.SYNTH_ENGINE


def test_bfloat16_errs_no_more_than_the_reference() -> None:
    """The reference's own bfloat16 decoder is off by 10% of the RMS on this checkpoint of random weights."""
    low = load_codec(FOLDER, dtype=torch.bfloat16).decoder
    item = codes(20, 4)
    (wave,), (exact,) = low.decode([item]), decoder().decode([item])
    assert wave.dtype == torch.float32
    error = float((wave - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    assert 0.001 < error < 0.1


@pytest.mark.parametrize("position", [0, 1, 4, 7, 100])
def test_window_mask_sees_what_the_whole_sequence_sees(position: int) -> None:
    window, steps = 5, 4
    positions = torch.arange(position + steps)[None]
    ((_, _, whole),) = window_masks(positions, window, False, torch.float32)
    ((_, keys, chunk),) = window_masks(positions[:, position:], window, True, torch.float32)
    for query in range(steps):
        seen = {position - (window - 1) + keys.start + int(key) for key in chunk[0, 0, query].nonzero()}
        assert seen == {int(key) for key in whole[0, 0, position + query].nonzero()}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("missing", "decoder.decoder.2.block.3.act1.alpha"),
        ("missing", "encoder.encoder.layers.4.block.1.conv.weight"),
        ("extra", "decoder.decoder.7.conv.weight"),
        ("shape", "decoder.pre_transformer.layers.1.mlp.gate_proj.weight"),
        ("shape", "encoder.quantizer.acoustic_residual_vector_quantizer.layers.18.codebook.embed_sum"),
    ],
)
def test_every_tensor_is_accounted_for(tmp_path: Path, change: str, name: str) -> None:
    tensors = load_file(FOLDER / "model.safetensors")
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(3, 5)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    with pytest.raises(ModelError, match=name.replace(".", r"\.")) as caught:
        load_codec(tmp_path)
    assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT
