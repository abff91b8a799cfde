"""BiCodec on the golden checkpoint: padded rows, batches, windows of streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pipelines.codec.batches import longest_first
from pipelines.codec.stage import CodecStage
from pipelines.spark_tts import bicodec
from pipelines.spark_tts.bicodec import BiCodec, BiCodecDecoder, Voice, load_bicodec
from pipelines.spark_tts.config import SparkConfig
from tests.support.vllm_kit import checkpoint

WAVE_LIMIT = 2e-5


@pytest.fixture(scope="module")
def codec() -> BiCodec:
    return load_bicodec(SparkConfig.from_folder(checkpoint()), torch.device("cpu"))[1]


def tokens(codec: BiCodec, length: int, seed: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    semantic = torch.randint(codec.config.codebook_size, (length,), generator=dice)
    return semantic, torch.randint(
        codec.config.global_codes, (codec.config.speaker.token_num,), generator=dice
    )


@pytest.mark.parametrize("pad_to", [0, 96])
def test_padded_rows_equal_rows_alone(codec: BiCodec, pad_to: int) -> None:
    rows = [tokens(codec, length, seed) for seed, length in enumerate((1, 2, 7, 30, 64, 64))]
    together = codec.decode([row for row, _ in rows], [voice for _, voice in rows], pad_to=pad_to)
    for (semantic, voice), wave in zip(rows, together):
        alone = codec.decode([semantic], [voice])[0]
        assert wave.shape == alone.shape == (320 * len(semantic),)
        assert (wave - alone).abs().max() <= WAVE_LIMIT


def test_the_mask_is_what_makes_them_equal(codec: BiCodec) -> None:
    semantic, voice = tokens(codec, 20, 1)
    alone = codec.decode([semantic], [voice])[0]
    zeros = torch.cat((semantic, torch.zeros(20, dtype=torch.long)))
    assert (codec.decode([zeros], [voice])[0][: len(alone)] - alone).abs().max() > 100 * WAVE_LIMIT


def test_a_row_on_the_cpu_is_the_same_bits_in_any_batch(codec: BiCodec) -> None:
    decoder = BiCodecDecoder(codec)
    rows = [tokens(codec, length, seed) for seed, length in enumerate((5, 40, 40, 11))]
    codes, voices = [row[:, None] for row, _ in rows], [Voice(voice) for _, voice in rows]
    together = decoder.decode(codes, voices)
    for index, wave in enumerate(together):
        assert torch.equal(wave, decoder.decode(codes[index : index + 1], voices[index : index + 1])[0])


def stream(decoder: BiCodecDecoder, semantic: Tensor, voice: Tensor, sizes: list[int]) -> Tensor:
    state, parts, at = Voice(voice), [], 0
    for size in [*sizes, 0]:
        parts.append(decoder.decode_chunk([state], [semantic[at : at + size, None]])[0])
        at += size
    assert at == len(semantic)
    return torch.cat(parts)


@pytest.mark.parametrize("sizes", [[100], [1] * 5 + [95], [20, 25, 55], [50, 49, 1]])
def test_a_stream_with_all_its_context_equals_the_whole(
    codec: BiCodec, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in (("LEFT_TOKENS", 200), ("RIGHT_TOKENS", 90)):
        monkeypatch.setattr(bicodec, name, count)
    semantic, voice = tokens(codec, 100, 3)
    whole = codec.decode([semantic], [voice])[0]
    heard = stream(BiCodecDecoder(codec), semantic, voice, sizes)
    assert (heard - whole).abs().max() <= 10 * WAVE_LIMIT


@pytest.mark.parametrize("sizes", [[100], [20, 25, 50, 5], [3] * 33 + [1]])
def test_a_stream_in_windows_has_the_length_of_the_whole_and_is_near_it(
    codec: BiCodec, sizes: list[int]
) -> None:
    semantic, voice = tokens(codec, 100, 4)
    whole = codec.decode([semantic], [voice])[0]
    heard = stream(BiCodecDecoder(codec), semantic, voice, sizes)
    assert heard.shape == whole.shape
    assert (heard - whole).square().mean().sqrt() < 0.1 * whole.square().mean().sqrt()


def test_windows_of_several_streams_share_a_call(codec: BiCodec) -> None:
    decoder = BiCodecDecoder(codec)
    rows = [tokens(codec, 60, seed) for seed in (5, 6)]
    states = [Voice(voice) for _, voice in rows]
    parts: list[list[Tensor]] = [[], []]
    for start in range(0, 80, 20):
        made = decoder.decode_chunk(states, [semantic[start : start + 20, None] for semantic, _ in rows])
        for part, wave in zip(parts, made):
            part.append(wave)
    for (semantic, voice), part in zip(rows, parts):
        assert torch.equal(torch.cat(part), stream(decoder, semantic, voice, [20, 20, 20]))


def test_the_stage_decodes_utterances_and_streams_of_any_mix(codec: BiCodec) -> None:
    stage: CodecStage = CodecStage(BiCodecDecoder(codec))
    heard: list[object] = []
    rows = [tokens(codec, length, length) for length in (3, 50, 8)]
    for semantic, voice in rows:
        stage.decode(semantic[:, None].numpy(), heard.append, Voice(voice))
    stage.close()
    assert sorted(len(wave) for wave in heard if isinstance(wave, np.ndarray)) == [960, 2560, 16000]


def test_batches_hold_neighbours_in_length_and_no_more_than_they_may() -> None:
    lengths = [5, 100, 7, 90, 1000, 3]
    found = longest_first(lengths, 200)
    assert sorted(index for batch in found for index in batch) == list(range(6))
    assert found == [[4], [1, 3], [2, 0, 5]]
    assert all(
        len(batch) == 1 or max(lengths[index] for index in batch) * len(batch) <= 200 for batch in found
    )
