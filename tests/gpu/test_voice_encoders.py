"""The encoders of voices of Qwen3-TTS in graphs on a GPU: the codes of the CPU, and the same bits in any batch while
another stream keeps the GPU busy."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipelines.nn.checkpoint import Checkpoint
from pipelines.qwen3_tts.codec import load_codec
from pipelines.qwen3_tts.config import Qwen3TTSConfig
from pipelines.qwen3_tts.speaker import SpeakerEncoder, VoiceCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FOLDER = Path(__file__).parents[1] / "golden" / "qwen3_tts" / "checkpoint-base"
LENGTHS = [12_000, 47_999, 48_000, 48_001, 95_039, 95_040, 96_000, 131_071]


@pytest.fixture(scope="module")
def rows() -> list[NDArray[np.float32]]:
    dice = np.random.default_rng(0)
    return [(0.2 * dice.standard_normal(length)).astype(np.float32) for length in LENGTHS]


def voices(device: str) -> VoiceCache:
    config = Qwen3TTSConfig.from_folder(FOLDER)
    with Checkpoint(FOLDER) as source:
        speaker = SpeakerEncoder(config.speaker_encoder, source, device)
    return VoiceCache(config, speaker, load_codec(FOLDER / "speech_tokenizer", device), None, 0)


def test_any_batch_has_the_codes_of_the_cpu_and_the_bits_of_a_row_alone(
    rows: list[NDArray[np.float32]],
) -> None:
    on_gpu, on_cpu = voices("cuda"), voices("cpu")
    alone = [[on_gpu.batches(one, row).result() for row in rows] for one in (on_gpu.vectors, on_gpu.codes)]
    over = threading.Event()

    def keep_busy() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            values = torch.randn(1024, 1024, device="cuda")
            while not over.is_set():
                values = torch.tanh(values @ values)
                torch.cuda.current_stream().synchronize()

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        with ThreadPoolExecutor(16) as pool:
            for encoding, wanted in zip((on_gpu.vectors, on_gpu.codes), alone):
                made = pool.map(
                    lambda row, encoding=encoding: on_gpu.batches(encoding, row).result(), rows * 4
                )
                assert all(torch.equal(one, other) for one, other in zip(made, wanted * 4))
    finally:
        over.set()
        busy.join()
    for row, vector, codes in zip(rows, *alone):
        torch.testing.assert_close(vector, on_cpu.batches(on_cpu.vectors, row).result(), rtol=1e-3, atol=1e-3)
        exact = on_cpu.batches(on_cpu.codes, row).result()
        assert torch.equal(codes[: len(exact)], exact)


@pytest.mark.parametrize("reproducible", [False, True])
@torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
def test_states_after_codes_are_those_of_their_chunks(reproducible: bool) -> None:
    decoder = load_codec(
        FOLDER / "speech_tokenizer", "cuda", reproducible=reproducible, encodes=False
    ).decoder
    dice = torch.Generator().manual_seed(0)
    codes = [
        torch.randint(
            0, decoder.config.codebook_size, (length, decoder.config.num_quantizers), generator=dice
        )
        for length in (decoder.reach - 1, decoder.reach, 40, 37, 90)
    ]
    speech, starts = codes[2], [decoder.state_after(item) for item in codes]
    together = decoder.decode([speech] * len(codes), starts)
    for item, start, wave in zip(codes, starts, together):
        assert start.values is None, "a state of many utterances takes no memory"
        state = decoder.new_state()
        decoder.decode_chunk([state], [item])
        torch.testing.assert_close(wave, decoder.decode([speech], [state])[0], rtol=1e-3, atol=1e-3)
        if reproducible:
            assert torch.equal(wave, decoder.decode([speech], [decoder.state_after(item)])[0])
