"""The reference implementation (`qwen-tts` 0.1.1) on random weights of the published shapes: frames and
audio a second by batch.

    NIGHTJAR_REFERENCE_SITE=reference python -m benchmarks.qwen3_tts_reference --sizes 0b6 1b7 --batches 256 512 --json reference.json
    NIGHTJAR_REFERENCE_SITE=reference python -m benchmarks.qwen3_tts_reference --device cpu --tiny

`NIGHTJAR_REFERENCE_SITE` is a folder with the packages of `requirements-reference.txt`, which pin an older
transformers than ours: a process of its own runs with that folder before all others. It favours the
reference: all rows of a batch have one length, contexts are short, the decoder runs in the better of two
batch sizes with cudnn.benchmark. Language model and decoder run one after the other, as in the package.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from benchmarks.gpu import Bench, parser
from benchmarks.random_models.qwen3_tts import published_config
from benchmarks.random_models.weights import fill

SITE = "NIGHTJAR_REFERENCE_SITE"
FRAMES_PER_SECOND = 12.5
ROLE, TAIL = [151644, 77091, 198], [151645, 198, 151644, 77091, 198]
#: What the package imports and the 12 Hz models never use.
STUBS = (
    "torchaudio",
    "torchaudio.compliance",
    "torchaudio.compliance.kaldi",
    "sox",
    "onnxruntime",
    "librosa",
    "librosa.filters",
    "soundfile",
)
#: The published decoder, and a tiny one with its rates.
CODEC = {
    "codebook_size": 2048, "codebook_dim": 512, "hidden_size": 512, "latent_dim": 1024, "intermediate_size": 1024, "head_dim": 64,
    "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 8, "sliding_window": 72, "rope_theta": 10_000,
    "num_quantizers": 16, "num_semantic_quantizers": 1, "decoder_dim": 1536, "vector_quantization_hidden_dimension": 512,
}  # fmt: skip
TINY_CODEC = {**CODEC, "codebook_dim": 32, "hidden_size": 24, "latent_dim": 40, "intermediate_size": 32, "head_dim": 16,
              "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "decoder_dim": 64}  # fmt: skip


def stub_modules() -> None:
    """Puts empty modules where the package imports what is not needed here."""
    for name in STUBS:
        sys.modules[name] = MagicMock(
            __path__=[], __spec__=importlib.machinery.ModuleSpec(name, None, is_package=True)
        )


def reference_config(size: str) -> dict[str, Any]:
    """The package's keyword arguments of its config, for "0b6", "1b7" or "tiny"."""
    config = {
        key: value
        for key, value in published_config(size).items()
        if key not in ("model_type", "assistant_token_id")
    }
    talker = config["talker_config"]
    half = talker["head_dim"] // 2
    sections = [half - 2 * (half * 5 // 16), half * 5 // 16, half * 5 // 16]
    talker["rope_scaling"] = {
        "rope_type": "default",
        "type": "default",
        "interleaved": True,
        "mrope_section": sections,
    }
    talker["pad_token_id"] = talker["codec_pad_id"]
    talker["code_predictor_config"] = {**talker["code_predictor_config"], "rope_scaling": None}
    return {**config, "speaker_encoder_config": {}}


@contextmanager
def _made_in(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """New parameters are of this type on this device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def values(name: str, noise: Tensor) -> Tensor:
    """Random weights: norms and scales around one, matrices that keep the variance."""
    if name.endswith("cluster_usage"):
        return noise.abs() + 0.5
    if name.endswith(("alpha", "beta", "bias")):
        return 0.1 * noise
    if noise.dim() == 1:
        return 1 + 0.1 * noise
    return noise if name.endswith("embedding_sum") else noise * noise[0].numel() ** -0.5


def open_talker(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """The package's model with random weights that never draw the end."""
    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration
    from transformers.modeling_utils import no_init_weights

    with _made_in(device, dtype), no_init_weights():
        model = Qwen3TTSForConditionalGeneration._from_config(
            Qwen3TTSConfig(**config), attn_implementation="sdpa"
        )
    model.eval()
    fill(model, values)
    with torch.no_grad():
        model.talker.codec_head.weight[config["talker_config"]["codec_eos_token_id"]] = 0
    return model


def open_decoder(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """The package's codec decoder with random weights."""
    from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import (
        Qwen3TTSTokenizerV2DecoderConfig,
    )
    from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Decoder
    from transformers.modeling_utils import no_init_weights

    with _made_in(device, dtype), no_init_weights():
        decoder = Qwen3TTSTokenizerV2Decoder._from_config(
            Qwen3TTSTokenizerV2DecoderConfig(**config), attn_implementation="sdpa"
        )
    decoder.eval()
    fill(decoder, values, 1)
    return decoder


def generated(model: Any, batch: int, frames: int, text_tokens: int) -> list[Tensor]:
    """Codes [frames, 16] of every row of a batch, by the package's own loop; the pad, which is suppressed,
    stands for the end."""
    draw = torch.Generator().manual_seed(0)
    device = model.talker.device
    bodies = torch.randint(0, 150_000, (batch, text_tokens), generator=draw).tolist()
    ids = [torch.tensor([[*ROLE, *body, *TAIL]], device=device) for body in bodies]
    pad = model.config.talker_config.codec_pad_id
    codes, _ = model.generate(
        input_ids=ids,
        languages=["English"] * batch,
        speakers=["ryan"] * batch,
        non_streaming_mode=True,
        max_new_tokens=frames + 1,
        eos_token_id=pad,
    )
    return codes


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def codec_us(decoder: Any, codes: Sequence[Tensor], rows: int, least_seconds: float) -> float:
    """Microseconds a frame of the package's whole-utterance decoding, `rows` utterances at a time."""
    batch = torch.stack(list(codes[:rows])).transpose(1, 2)
    device = batch.device
    decoder.chunked_decode(batch)
    synchronize(device)
    began, rounds = time.perf_counter(), 0
    while rounds == 0 or time.perf_counter() - began < least_seconds:
        decoder.chunked_decode(batch).float().cpu()
        rounds += 1
    return 1e6 * (time.perf_counter() - began) / (rounds * batch.shape[0] * batch.shape[2])


def row(batch: int, frames: int, lm_seconds: float, decode_us: float) -> dict[str, Any]:
    """The figures of one batch: language model and decoder one after the other."""
    made = batch * frames
    seconds = lm_seconds + made * decode_us / 1e6
    return {
        "part": "reference",
        "slots": batch,
        "frames": frames,
        "lm_ms_per_frame": 1000 * lm_seconds / frames,
        "lm_frames_per_s": made / lm_seconds,
        "codec_us_per_frame": decode_us,
        "ms_per_frame": 1000 * seconds / frames,
        "frames_per_s": made / seconds,
        "audio_s_per_s": made / seconds / FRAMES_PER_SECOND,
    }


@torch.inference_mode()
def measure(
    size: str, batches: Sequence[int], frames: int, device: torch.device, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """One row a batch, smallest first; ends at the first that does not fit the device's memory."""
    model = open_talker(reference_config(size), device, dtype)
    decoder = open_decoder(TINY_CODEC if size == "tiny" else CODEC, device, dtype)
    for batch in sorted(batches):
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            generated(model, batch, 2, 30)
            synchronize(device)
            began = time.perf_counter()
            codes = generated(model, batch, frames, 30)
            synchronize(device)
            seconds = time.perf_counter() - began
            assert all(len(one) == frames for one in codes), sorted({len(one) for one in codes})
            decode_us = min(codec_us(decoder, codes, min(rows, batch), 0.5) for rows in (16, 64))
        except torch.OutOfMemoryError:
            yield {"size": size, "part": "reference", "slots": batch, "error": "out of memory"}
            return
        peak = {"peak_gib": torch.cuda.max_memory_allocated(device) / 2**30} if device.type == "cuda" else {}
        yield {"size": size, **row(batch, frames, seconds, decode_us), **peak}


def in_its_own_site(arguments: Sequence[str]) -> int:
    """Runs this module again with the reference's packages before all others."""
    site = os.environ.get(SITE, "")
    if not Path(site, "qwen_tts").is_dir():
        print(
            f"{SITE} names no folder with the packages of benchmarks/requirements-reference.txt",
            file=sys.stderr,
        )
        return 2
    paths = [site, str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "benchmarks.qwen3_tts_reference", "--here", *arguments]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False
    ).returncode


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--sizes", nargs="*", default=["0b6", "1b7"])
    made.add_argument("--batches", nargs="+", type=int, default=[256, 512])
    made.add_argument("--frames", type=int, default=48, help="frames of each row")
    made.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = made.parse_args()
    if not options.here:
        return in_its_own_site(sys.argv[1:])
    stub_modules()
    import transformers

    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(
        1
    )  # the loop is bound by launches, and tiny models by the hand-over between threads
    bench = Bench("qwen3_tts_reference", options, transformers=transformers.__version__)
    batches, frames = ([2, 4], 4) if options.tiny else (options.batches, options.frames)
    for size in ["tiny"] if options.tiny else options.sizes:
        for found in measure(size, batches, frames, bench.device, bench.dtype):
            bench.add(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
