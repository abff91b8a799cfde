"""The reference implementation (`qwen-tts` 0.1.1) on random weights of the published shapes: frames and audio a second by batch.

    NIGHTJAR_REFERENCE_SITE=reference python -m benchmarks.qwen3_tts_reference --sizes 0b6 1b7 --batches 256 512 --json reference.json
    NIGHTJAR_REFERENCE_SITE=reference python -m benchmarks.qwen3_tts_reference --device cpu --tiny --golden tests/golden/qwen3_tts

`NIGHTJAR_REFERENCE_SITE` is a folder with the packages of `requirements-reference.txt`, which pin an older transformers than ours: a
process of its own runs with that folder before all others. It favours the reference: all rows of a batch have one length, contexts
are short, the decoder runs in the better of two batch sizes with cudnn.benchmark. Language model and decoder run one after the
other, as in the package.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines.qwen3_tts.dummy import published_config

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


class _Stub(types.ModuleType):
    """A module whose every name is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def stub_modules(names: Sequence[str] = STUBS) -> None:
    """Puts empty modules where the package imports what is not needed here."""
    for name in names:
        module = _Stub(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def reference_config(size: str) -> dict[str, Any]:
    """The package's keyword arguments of its config, for "0b6", "1b7" or "tiny"."""
    config = {key: value for key, value in published_config(size).items() if key not in ("model_type", "assistant_token_id")}
    talker = config["talker_config"]
    half = talker["head_dim"] // 2
    sections = [half - 2 * (half * 5 // 16), half * 5 // 16, half * 5 // 16]
    talker["rope_scaling"] = {"rope_type": "default", "type": "default", "interleaved": True, "mrope_section": sections}
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


@torch.no_grad()
def fill(module: torch.nn.Module, seed: int) -> None:
    """Random weights: norms and scales around one, matrices that keep the variance."""
    generator: dict[torch.device, torch.Generator] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not tensor.is_floating_point() or "inv_freq" in name:
            continue
        draw = generator.setdefault(tensor.device, torch.Generator(tensor.device).manual_seed(seed))
        noise = torch.randn(tensor.shape, generator=draw, device=tensor.device)
        fan = tensor[0].numel() if tensor.dim() > 1 else 1
        if name.endswith("cluster_usage"):
            noise = noise.abs() + 0.5
        elif name.endswith(("alpha", "beta", "bias")):
            noise = 0.1 * noise
        elif tensor.dim() == 1:
            noise = 1 + 0.1 * noise
        elif not name.endswith("embedding_sum"):
            noise = noise * fan**-0.5
        tensor.copy_(noise)


def open_talker(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """The package's model with random weights that never draw the end."""
    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration
    from transformers.modeling_utils import no_init_weights

    with _made_in(device, dtype), no_init_weights():
        model = Qwen3TTSForConditionalGeneration._from_config(Qwen3TTSConfig(**config), attn_implementation="sdpa")
    model.eval()
    fill(model, 0)
    with torch.no_grad():
        model.talker.codec_head.weight[config["talker_config"]["codec_eos_token_id"]] = 0
    return model


def open_decoder(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """The package's codec decoder with random weights."""
    from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2DecoderConfig
    from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Decoder
    from transformers.modeling_utils import no_init_weights

    with _made_in(device, dtype), no_init_weights():
        decoder = Qwen3TTSTokenizerV2Decoder._from_config(Qwen3TTSTokenizerV2DecoderConfig(**config), attn_implementation="sdpa")
    decoder.eval()
    fill(decoder, 1)
    return decoder


def generated(model: Any, batch: int, frames: int, text_tokens: int) -> list[Tensor]:
    """Codes [frames, 16] of every row of a batch, by the package's own loop; the pad, which is suppressed, stands for the end."""
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


def best(rows: Sequence[dict[str, Any]], size: str) -> dict[str, Any] | None:
    """The row of this size with the most audio a second."""
    return max(
        (one for one in rows if one.get("size") == size and "audio_s_per_s" in one), key=lambda one: one["audio_s_per_s"], default=None
    )


@torch.inference_mode()
def measure(size: str, batches: Sequence[int], frames: int, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
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


@torch.inference_mode()
def golden_differences(folder: Path) -> list[str]:
    """Cases of the CustomVoice golden checkpoint whose greedy codes differ from the recorded ones: the loader runs the real thing."""
    import numpy as np
    from safetensors.torch import load_file

    from tests.support.golden_arrays import read_arrays
    from tests.support.golden_checkpoint import whole

    content = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    checkpoint = whole(folder / "checkpoint-custom")
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "transformers_version", "dtype")}
    model = open_talker({**config, "speaker_encoder_config": {}}, torch.device("cpu"), torch.float32)
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()})
    arrays = read_arrays(folder / "arrays_custom.npz")
    named = [case for case in content["cases"] if case["name"] in ("custom_nonstreaming", "custom_streaming")]
    assert named, "the folder has other cases"
    differ = []
    for case in named:
        (wanted,) = case["rows"]
        ids = [torch.tensor([wanted["text_ids"]])]
        codes, _ = model.generate(
            input_ids=ids, languages=[wanted["language"]], speakers=[wanted["speaker"]],
            non_streaming_mode=case["non_streaming_mode"], **case["generation"],
        )  # fmt: skip
        if not np.array_equal(codes[0].numpy(), arrays[f"{case['name']}.0.codes"]):
            differ.append(case["name"])
    return differ


def in_its_own_site(arguments: Sequence[str]) -> int:
    """Runs this module again with the reference's packages before all others."""
    site = os.environ.get(SITE, "")
    if not Path(site, "qwen_tts").is_dir():
        print(f"{SITE} names no folder with the packages of benchmarks/requirements-reference.txt", file=sys.stderr)
        return 2
    paths = [site, str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "benchmarks.qwen3_tts_reference", "--here", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sizes", nargs="*", default=["0b6", "1b7"])
    parser.add_argument("--batches", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--frames", type=int, default=48, help="frames of each row")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try this on a CPU")
    parser.add_argument("--golden", type=Path, help="compare greedy codes with this golden folder first")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.here:
        return in_its_own_site(sys.argv[1:])
    stub_modules()
    import transformers

    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(1)  # the loop is bound by launches, and tiny models by the hand-over between threads
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    result: dict[str, Any] = {"commit": os.environ.get("NIGHTJAR_COMMIT", ""), "device": name, "torch": torch.__version__,
                              "transformers": transformers.__version__, "rows": []}  # fmt: skip
    failed = 0
    if options.golden:
        try:
            result["golden_differences"] = golden_differences(options.golden)
        except (OSError, RuntimeError, ValueError) as error:  # what follows is worth having all the same
            result["golden_differences"] = [f"{type(error).__name__}: {error}"[:500]]
        failed = len(result["golden_differences"])
        print(f"golden cases that differ: {result['golden_differences'] or 'none'}", flush=True)
    for size in ["tiny"] if options.tiny else options.sizes:
        for found in measure(size, [2, 4] if options.tiny else options.batches, 4 if options.tiny else options.frames, device, dtype):
            result["rows"].append(found)
            print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}), flush=True)
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
