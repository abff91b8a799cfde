"""The reference implementation that Nightjar is compared with, on random weights of the published sizes: frames and audio
a second by batch.

    NIGHTJAR_REFERENCE_SITE=reference python -m benchmarks.reference qwen3 --sizes 0b6 1b7 --batches 256 512

`qwen3` is the reference implementation (`qwen-tts` 0.1.1). `NIGHTJAR_REFERENCE_SITE` is a folder with the packages of
`requirements-reference.txt`, which pin an older transformers than ours: a process of its own runs with that folder
before all others. It favours the reference: all rows of a batch have one length, contexts are short, the decoder runs
in the better of two batch sizes with cudnn.benchmark. Language model and decoder run one after the other, as in the
package.
"""

# The reference's packages are not in our environment.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import importlib.machinery
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from benchmarks.checkpoint import codec_values, decoder_keys, fill, qwen3_config
from benchmarks.common import FRAMES_PER_SECOND, Bench, Row, environment_with, parser, read

SITE = "NIGHTJAR_REFERENCE_SITE"
ROLE, TAIL = [151644, 77091, 198], [151645, 198, 151644, 77091, 198]
#: What the package imports and the 12 Hz models never use.
STUBS = (
    "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi", "sox", "onnxruntime", "librosa", "librosa.filters",
    "soundfile",
)  # fmt: skip


def reference_config(size: str) -> dict[str, Any]:
    """The package's keyword arguments of its config, for "0b6", "1b7" or "tiny"."""
    config = qwen3_config(size)
    for key in ("model_type", "assistant_token_id"):
        del config[key]
    talker = config["talker_config"]
    half = talker["head_dim"] // 2
    part = half * 5 // 16
    rope = {"rope_type": "default", "type": "default", "interleaved": True}
    talker["rope_scaling"] = rope | {"mrope_section": [half - 2 * part, part, part]}
    talker["pad_token_id"] = talker["codec_pad_id"]
    talker["code_predictor_config"] = {**talker["code_predictor_config"], "rope_scaling": None}
    return {**config, "speaker_encoder_config": {}}


def decoder_config(size: str) -> dict[str, Any]:
    """The package's keyword arguments of its codec decoder's config, which knows three of ours by itself."""
    config = decoder_keys(size)
    for ours in ("rms_norm_eps", "upsample_rates", "upsampling_ratios"):
        del config[ours]
    return config | {"num_semantic_quantizers": 1, "vector_quantization_hidden_dimension": 512}


def open_reference(size: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """The package's model with random weights that never draw the end, and its codec decoder."""
    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration
    from qwen_tts.core.tokenizer_12hz import configuration_qwen3_tts_tokenizer_v2 as configuration
    from qwen_tts.core.tokenizer_12hz import modeling_qwen3_tts_tokenizer_v2 as modeling
    from transformers.modeling_utils import no_init_weights

    config = reference_config(size)
    codec = configuration.Qwen3TTSTokenizerV2DecoderConfig(**decoder_config(size))
    how = {"attn_implementation": "sdpa", "dtype": dtype}
    with device, no_init_weights():
        model = Qwen3TTSForConditionalGeneration._from_config(Qwen3TTSConfig(**config), **how)
        decoder = modeling.Qwen3TTSTokenizerV2Decoder._from_config(codec, **how)
    fill(model.eval(), codec_values)
    fill(decoder.eval(), codec_values, 1)
    with torch.no_grad():
        model.talker.codec_head.weight[config["talker_config"]["codec_eos_token_id"]] = 0
    return model, decoder


def generated(model: Any, batch: int, frames: int, text_tokens: int = 30) -> list[Tensor]:
    """Codes [frames, 16] of every row of a batch, by the package's own loop; the pad, which is suppressed, stands for
    the end."""
    draw, device = torch.Generator().manual_seed(0), model.talker.device
    bodies = torch.randint(0, 150_000, (batch, text_tokens), generator=draw).tolist()
    codes, _ = model.generate(
        input_ids=[torch.tensor([[*ROLE, *body, *TAIL]], device=device) for body in bodies],
        languages=["English"] * batch,
        speakers=["ryan"] * batch,
        non_streaming_mode=True,
        max_new_tokens=frames + 1,
        eos_token_id=model.config.talker_config.codec_pad_id,
    )
    return codes


def codec_us(bench: Bench, decoder: Any, codes: Sequence[Tensor], rows: int, least_seconds: float) -> float:
    """Microseconds a frame of the package's whole-utterance decoding, `rows` utterances at a time."""
    batch = torch.stack(list(codes[:rows])).transpose(1, 2)
    decoder.chunked_decode(batch)
    bench.wait()
    began, rounds = time.perf_counter(), 0
    while rounds == 0 or time.perf_counter() - began < least_seconds:
        decoder.chunked_decode(batch).float().cpu()
        rounds += 1
    return 1e6 * (time.perf_counter() - began) / (rounds * batch.shape[0] * batch.shape[2])


def reference_row(batch: int, frames: int, lm_seconds: float, decode_us: float) -> Row:
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
def qwen3(bench: Bench, size: str, batches: Sequence[int], frames: int) -> None:
    """One row a batch, smallest first; ends at the first that does not fit the device's memory."""
    model, decoder = open_reference(size, bench.device, bench.dtype)
    for batch in sorted(batches):
        try:
            if bench.on_gpu:
                torch.cuda.reset_peak_memory_stats(bench.device)
            generated(model, batch, 2)
            bench.wait()
            began = time.perf_counter()
            codes = generated(model, batch, frames)
            bench.wait()
            seconds = time.perf_counter() - began
            assert all(len(one) == frames for one in codes), sorted({len(one) for one in codes})
            us = min(codec_us(bench, decoder, codes, min(rows, batch), 0.5) for rows in (16, 64))
        except torch.OutOfMemoryError:
            bench.add({"size": size, "part": "reference", "slots": batch, "error": "out of memory"})
            return
        peak = torch.cuda.max_memory_allocated(bench.device) / 2**30 if bench.on_gpu else None
        bench.add({"size": size, **reference_row(batch, frames, seconds, us), "peak_gib": peak})


def in_its_own_site(arguments: Sequence[str]) -> int:
    """Runs this module again with the reference's packages before all others."""
    site = os.environ.get(SITE, "")
    if not Path(site, "qwen_tts").is_dir():
        print(
            f"{SITE} names no folder with the packages of benchmarks/requirements-reference.txt",
            file=sys.stderr,
        )
        return 2
    command = [sys.executable, "-m", "benchmarks.reference", *arguments, "--here"]
    return subprocess.run(command, env=environment_with(site), check=False).returncode


def main() -> int:
    made = parser(__doc__)
    made.add_argument("model", choices=("qwen3",))
    made.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = read(made, sizes=["0b6", "1b7"], batches=[256, 512], frames=48)
    batches, frames = ([1, 2], 4) if options.tiny else (options.batches, options.frames)
    if not options.here:
        return in_its_own_site(sys.argv[1:])
    for name in STUBS:
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = MagicMock(__path__=[], __spec__=spec)
    import transformers

    torch.backends.cudnn.benchmark = True
    # The loop is bound by launches, and tiny models by the hand-over between threads.
    torch.set_num_threads(1)
    bench = Bench("reference", options, transformers=transformers.__version__)
    for size in ["tiny"] if options.tiny else options.sizes:
        bench.attempt(size, qwen3, bench, size, batches, frames)
    return bench.end("size", "slots", "lm_ms_per_frame", "codec_us_per_frame", "audio_s_per_s")


if __name__ == "__main__":
    raise SystemExit(main())
