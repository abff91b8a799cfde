"""SparkTTS on a CUDA device: the golden folder, and BiCodec on fused ops at its published size, with
random weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.checkpoint import dummy_bicodec, spark_config, wav2vec2
from pipelines.codec.stage import CodecStage
from pipelines.spark_tts.bicodec import BiCodec, BiCodecDecoder, Voice
from pipelines.spark_tts.reference import Reference, ReferenceEncoder
from pipelines.spark_tts.wave_generator import FusedWave
from tests.conformance.__main__ import main
from tests.support.vllm_kit import GOLDEN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

LENGTHS = (200, 37, 64, 1, 150)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Float32 without TF32, for what others are compared with."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def codec(dtype: torch.dtype, fused: bool | None = None) -> BiCodec:
    return dummy_bicodec(spark_config(Path()), torch.device("cuda"), dtype, fused)[1]


def tokens(lengths: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Semantic tokens and voices."""
    dice = torch.Generator().manual_seed(0)
    return [torch.randint(8192, (length,), generator=dice) for length in lengths], [
        torch.randint(4096, (32,), generator=dice) for _ in lengths
    ]


def rms(waves: list[Tensor]) -> float:
    return float(torch.cat(waves).square().mean().sqrt())


def apart(waves: list[Tensor], others: list[Tensor]) -> float:
    """The root mean square of the difference over that of `others`."""
    return rms([one - other for one, other in zip(waves, others, strict=True)]) / rms(others)


def test_conformance() -> None:
    assert main(["spark", str(GOLDEN), "--device", "cuda"]) == 0


@needs_triton
@pytest.mark.parametrize("lengths", [(200, 200), LENGTHS])
def test_fused_ops_round_no_worse_than_the_plain_generator(lengths: tuple[int, ...]) -> None:
    """Both in bfloat16 against float32; on rows of one length, and on rows that end early, where the
    kernels write zeros."""
    semantic, voices = tokens(lengths)
    exact = codec(torch.float32).decode(semantic, voices)
    errors = []
    for fused in (False, None):
        made = codec(torch.bfloat16, fused)
        assert isinstance(made.wave, FusedWave) is (fused is None)
        errors.append(apart(made.decode(semantic, voices, pad_to=224), exact))
    assert 0 < errors[1] < 1.5 * errors[0]


@needs_triton
def test_rows_of_a_mixed_batch_equal_themselves_alone() -> None:
    """Within a fiftieth of the wave: bfloat16 rounds by up to 1 in 256, and the prenet's products differ
    in order between batches."""
    made, (semantic, voices) = codec(torch.bfloat16), tokens(LENGTHS)
    together = made.decode(semantic, voices, pad_to=224)
    for one, voice, wave in zip(semantic, voices, together):
        assert len(wave) == 320 * len(one)
        assert apart([wave], made.decode([one], [voice])) < 0.02


@needs_triton
def test_decoding_does_not_make_the_host_wait() -> None:
    made, (semantic, voices) = codec(torch.bfloat16), tokens(LENGTHS)
    wanted = made.decode(semantic, voices, pad_to=224)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = made.decode(semantic, voices, pad_to=224)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert apart(again, wanted) < 0.02


@needs_triton
def test_the_stage_on_its_own_stream_hands_on_what_the_decoder_makes() -> None:
    """Whole utterances and a stream in windows, through the stage that the pipeline uses on a GPU."""
    made, (semantic, voices) = codec(torch.bfloat16), tokens(LENGTHS)
    wanted = [wave.cpu() for wave in made.decode(semantic, voices)]
    stage: CodecStage = CodecStage(BiCodecDecoder(made), device=made.device)
    heard: dict[int, Tensor] = {}
    streamed: list[Tensor] = []
    state = Voice(voices[0])
    for part in [*semantic[0].split(50), semantic[0][:0]]:
        stage.decode_chunk(part[:, None].numpy(), lambda wave: streamed.append(torch.as_tensor(wave)), state)
    for index, (one, voice) in enumerate(zip(semantic, voices)):
        stage.decode(
            one[:, None].numpy(),
            lambda wave, index=index: heard.update({index: torch.as_tensor(wave)}),
            Voice(voice),
        )
    stage.close()
    assert apart([heard[index] for index in range(len(wanted))], wanted) < 0.02
    assert torch.cat(streamed).shape == wanted[0].shape
    assert apart([torch.cat(streamed)], wanted[:1]) < 0.02


def test_a_recording_has_one_result_in_any_batch() -> None:
    """As part of batches, alone in a batch, and, except for near ties, without padding and op by op."""
    config, device = spark_config(Path()), torch.device("cuda")
    references = ReferenceEncoder(config, dummy_bicodec(config, device, torch.bfloat16)[0], wav2vec2(device))
    dice = np.random.default_rng(0)
    lengths = [8000, 8081, *dice.integers(40_000, 120_000, 30), 500_000]
    rows = [dice.normal(0, 0.1, length).astype(np.float32) for length in lengths]

    def encode(row: np.ndarray) -> Reference:
        return references.encode(row)

    alone = [encode(row) for row in rows]
    for _ in range(2):
        with ThreadPoolExecutor(32) as pool:
            assert list(pool.map(encode, rows)) == alone
    equal: list[Tensor] = []
    for row, reference in zip(rows, alone):
        values = torch.from_numpy(references.features.values(row))[None]
        plain = references.semantic_tokens(values.to(device), None)[0].cpu()
        assert len(plain) == len(reference.semantic)
        equal.append(plain == torch.tensor(reference.semantic))
    assert torch.cat(equal).float().mean() > 0.99
