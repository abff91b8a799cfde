"""The codec of Fish Speech S2: batches, streams and passes equal the whole; recordings of any rate."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch.nn.functional import pad

from pipelines.codec import blocks
from pipelines.codec import decoder as decoder_module
from pipelines.errors import ErrorCode, InputError, SynthesisError
from pipelines.fish_speech.codec import (
    Codec,
    CodecEncoder,
    ReferenceEncoder,
    codec_from,
    load_codec,
    open_codec,
    resample,
)
from pipelines.fish_speech.config import FishConfig
from pipelines.recording import Recording
from tests.support.fish_checkpoint import whole

CONFIG = FishConfig.from_folder(whole())
CPU = torch.device("cpu")
NEAR = 2e-5


@pytest.fixture(scope="module")
def codec() -> Iterator[Codec]:
    torch.set_num_threads(1)
    return load_codec(CONFIG)  # pyright: ignore[reportReturnType]


def some_codes(frames: int, seed: int = 0, most: int = 24) -> torch.Tensor:
    return torch.randint(0, most, (frames, 10), generator=torch.Generator().manual_seed(seed))


def test_a_batch_is_every_utterance_alone(codec: Codec) -> None:
    utterances = [some_codes(frames, frames) for frames in (3, 17, 1, 8)]
    alone = [codec.decoder.decode([codes])[0] for codes in utterances]
    for one, wave in zip(codec.decoder.decode(utterances), alone):
        assert torch.equal(one, wave)
    # As on a GPU: rows padded on the right to the longest.
    with torch.inference_mode():
        padded = codec.decoder.decode_padded(utterances, None)
    for row, wave in zip(padded, alone):
        assert (row[: len(wave)] - wave).abs().max() < NEAR


@pytest.mark.parametrize("chunks", [[1] * 25, [5, 20], [1, 2, 4, 8, 10], [25]])
def test_a_stream_is_the_whole_whatever_its_chunks(codec: Codec, chunks: list[int]) -> None:
    """Longer than the window of the transformers, so that what falls out of it matters."""
    codes, state = some_codes(25), codec.decoder.new_state()
    assert len(codes) > CONFIG.codec.post.window
    parts = [codec.decoder.decode_chunk([state], [part])[0] for part in codes.split(chunks)]
    assert (torch.cat(parts) - codec.decoder.decode([codes])[0]).abs().max() < NEAR
    assert state.frames == 25


def test_streams_side_by_side_keep_apart(codec: Codec) -> None:
    one, two = some_codes(9, 1), some_codes(9, 2)
    states = [codec.decoder.new_state(), codec.decoder.new_state()]
    heard: list[list[torch.Tensor]] = [[], []]
    for place in (0, 3, 6):
        pieces = codec.decoder.decode_chunk(states, [one[place : place + 3], two[place : place + 3]])
        for kept, piece in zip(heard, pieces):
            kept.append(piece)
    for codes, kept in zip((one, two), heard):
        assert (torch.cat(kept) - codec.decoder.decode([codes])[0]).abs().max() < NEAR


def test_long_utterances_go_through_in_passes(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = some_codes(20)
    wave = codec.decoder.decode([codes])[0]
    monkeypatch.setattr(decoder_module, "PASS_FRAMES", 6)
    assert (codec.decoder.decode([codes])[0] - wave).abs().max() < NEAR


def test_attention_in_pieces_is_attention(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = torch.randn(1, 40_000, generator=torch.Generator().manual_seed(0)) * 0.1
    codes = codec.encoder.encode(samples)
    latents = codec.encoder.features(samples)
    monkeypatch.setattr(blocks, "ATTENTION_STEPS", 7)
    assert (codec.encoder.features(samples) - latents).abs().max() < NEAR
    assert torch.equal(codec.encoder.encode(samples), codes)


def test_fused_ops_make_the_same_audio() -> None:
    codes = some_codes(12)
    plain, fused = (
        codec_from(CONFIG.codec, open_codec(CONFIG.folder), CPU, torch.float32, fused)
        for fused in (False, True)
    )
    wave = fused.decoder.decode([codes])[0]
    assert (wave - plain.decoder.decode([codes])[0]).abs().max() < NEAR
    assert wave.abs().max() > 0.1, "nothing was compared"
    state = fused.decoder.new_state()
    parts = [fused.decoder.decode_chunk([state], [part])[0] for part in codes.split([1, 4, 7])]
    assert (torch.cat(parts) - wave).abs().max() < NEAR


def test_codes_beyond_a_codebook_are_its_last_and_stay_as_they_were(codec: Codec) -> None:
    codes = some_codes(6, most=64)
    codes[2] = 63
    before = codes.clone()
    clamped = codes.clone()
    clamped[:, 1:] = clamped[:, 1:].clamp(max=23)
    assert torch.equal(codec.decoder.decode([codes])[0], codec.decoder.decode([clamped])[0])
    assert torch.equal(codes, before)


@pytest.mark.parametrize(
    "codes", [torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 10), torch.full((3, 10), -1)]
)
def test_codes_that_cannot_be_are_refused(codec: Codec, codes: torch.Tensor) -> None:
    with pytest.raises(SynthesisError) as caught:
        codec.decoder.decode([codes])
    assert caught.value.code is ErrorCode.SYNTH_ENGINE


def test_the_last_frame_of_a_recording_is_filled_with_silence(codec: Codec) -> None:
    samples = torch.randn(1, 2048 * 3 + 1, generator=torch.Generator().manual_seed(0)) * 0.1
    codes = codec.encoder.encode(samples)
    assert codes.shape == (1, 4, 10)
    assert torch.equal(codec.encoder.encode(pad(samples, (0, 2047))), codes)


@pytest.mark.parametrize("width", [0, 65_536, 70_001])
def test_recordings_of_a_padded_batch_have_the_codes_that_they_have_alone(codec: Codec, width: int) -> None:
    dice = torch.Generator().manual_seed(1)
    lengths = [22_050, 22_528, 22_529, 1, 2047, 2048, 60_000]
    rows = [0.1 * torch.randn(length, generator=dice) for length in lengths]
    alone = [codec.encoder.encode(row[None])[0] for row in rows]
    size = max(width, *lengths)
    together = codec.encoder.encode(torch.stack([pad(row, (0, size - len(row))) for row in rows]))
    for codes, found, length in zip(alone, together, lengths):
        assert len(codes) == -(-length // 2048)
        assert torch.equal(found[: len(codes)], codes)
    assert len(alone[-1].unique()) > 10, "nothing was compared"


def encoded(samples: np.ndarray, rate: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


def tone(rate: int, seconds: float = 0.6) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 48_000, 44_056])
def test_recordings_of_any_rate_are_heard_alike(codec: Codec, rate: int) -> None:
    references = ReferenceEncoder(codec.encoder)
    samples = references.read(Recording(encoded(tone(rate), rate)))
    want = tone(44_100)
    inside = slice(2000, min(len(samples), len(want)) - 2000)
    assert abs(len(samples) - len(want)) <= 3
    assert np.abs(samples.numpy()[inside] - want[inside]).max() < 2e-3


def test_resampling_is_exact_where_nothing_is_to_do() -> None:
    samples = torch.randn(100)
    assert torch.equal(resample(samples, 44_100, 44_100), samples)


class Counted:
    """An encoder that counts what it encodes."""

    def __init__(self, encoder: CodecEncoder) -> None:
        self.encoder, self.times = encoder, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)

    def encode(self, samples: torch.Tensor) -> torch.Tensor:
        self.times += 1
        return self.encoder.encode(samples)


def test_channels_are_averaged_and_codes_kept_by_content(codec: Codec) -> None:
    encoder = Counted(codec.encoder)
    references = ReferenceEncoder(encoder)  # pyright: ignore[reportArgumentType]
    mono = tone(44_100)
    stereo = Recording(encoded(np.stack([2 * mono, np.zeros_like(mono)], axis=1), 44_100))
    codes = references.prepare(stereo)
    assert np.array_equal(references.prepare(Recording(encoded(mono, 44_100))), codes)
    assert encoder.times == 2
    assert np.array_equal(references.prepare(stereo), codes)
    assert encoder.times == 2, "encoded again"


@pytest.mark.parametrize(
    ("recording", "code"),
    [
        (b"no audio", ErrorCode.INPUT_AUDIO_UNREADABLE),
        (encoded(tone(44_100, 0.2), 44_100), ErrorCode.INPUT_REFERENCE_LENGTH),
        (encoded(0 * tone(44_100), 44_100), ErrorCode.INPUT_REFERENCE_SILENT),
    ],
)
def test_recordings_that_show_no_voice_are_refused(codec: Codec, recording: bytes, code: ErrorCode) -> None:
    with pytest.raises(InputError) as caught:
        ReferenceEncoder(codec.encoder).prepare(Recording(recording))
    assert caught.value.code is code
