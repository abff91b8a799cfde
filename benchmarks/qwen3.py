"""What else is measured of Qwen3-TTS with random weights of the published sizes, beside its speed
(`benchmarks.engine`).

    python -m benchmarks.qwen3 bits --size 0b6 --slots 128
    python -m benchmarks.qwen3 soak --size 0b6 --slots 512 --count 10000
    NIGHTJAR_REFERENCE_SITE=reference python -m benchmarks.qwen3 reference --size 0b6 --batches 256 512
    python -m benchmarks.qwen3 soak --device cpu --tiny --count 40

`bits`: in reproducible mode a request has the same bits alone, in any mix and on a second run: codes and
audio, short prompts and long ones. `soak`: short utterances at full speed. Does anything leak, drift or go
wrong? Watched all along are utterances and frames made, memory of device and host, running requests, free
pages; at the end every slot and page must be free again.

`reference` is the reference implementation (`qwen-tts` 0.1.1): frames and audio a second by batch.
`NIGHTJAR_REFERENCE_SITE` is a folder with the packages of `requirements-reference.txt`, which pin an older
transformers than ours: a process of its own runs with that folder before all others. It favours the
reference: all rows of a batch have one length, contexts are short, the decoder runs in the better of two
batch sizes with cudnn.benchmark. Language model and decoder run one after the other, as in the package.
"""

# The reference's packages are not in our environment.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import gc
import importlib.machinery
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import checkpoint
from benchmarks.checkpoint import PUBLISHED_CODEC, TINY_CODEC, codec_values, dummy_decoder, dummy_model
from benchmarks.common import FRAMES_PER_SECOND, Bench, Row, environment_with, memory, parser, read
from benchmarks.engine import PAGE_SIZE, ROLE, ClosedLoop, Load, Throughput, prompt_of, requests
from pipelines.engine.core import EngineCore, EngineOptions
from pipelines.engine.executor import FrameExecutor
from pipelines.engine.opening import open_executor
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import SamplingParams
from pipelines.qwen3_tts.codec import CodecDecoder
from pipelines.qwen3_tts.model import Qwen3TTSModel

Codes = dict[str, NDArray[np.int64]]
CONTEXT = 1024


def varied_requests(model: Qwen3TTSModel, count: int, longest: int, most: int) -> list[GenerationRequest]:
    """Sampled requests whose prompts take every path of prefill: most of up to a page, every fourth up to
    `longest` positions."""
    draw, made = np.random.default_rng(5), list[GenerationRequest]()
    for index in range(count):
        prompt = prompt_of(model, draw, int(draw.integers(3, longest if index % 4 == 3 else 50)))
        sampling, frames = SamplingParams(top_p=1.0 if index % 2 else 0.9), int(draw.integers(3, most))
        made.append(GenerationRequest(str(index), prompt, sampling, index, frames))
    return made


def spoken(
    executor: FrameExecutor, options: EngineOptions, batch: Sequence[GenerationRequest], together: int
) -> Codes:
    """The codes of every request when at most `together` run at once. One that fails has none, so that a comparison
    fails."""
    heard, core = Codes(), EngineCore(executor, options)

    def receiver(name: str) -> Any:
        kept = SimpleNamespace(frames=lambda _codes: None, failed=lambda _error: None)
        kept.finished = lambda codes, *_: heard.update({name: codes})
        return kept

    for start in range(0, len(batch), together):
        for request in batch[start : start + together]:
            core.add(request, receiver(request.request_id))
        while core.busy:
            core.step()
    return heard


def differing(first: Codes, second: Codes) -> list[str]:
    """Requests of both whose codes are not the same."""
    return [name for name in first if name in second and not np.array_equal(first[name], second[name])]


def differing_audio(decoder: CodecDecoder, codes: Codes, alone: int) -> list[str]:
    """Utterances whose samples, decoded alone, are not those decoded with all others."""
    names = [name for name, one in codes.items() if len(one)]
    given = [torch.from_numpy(codes[name]) for name in names]
    together, backwards = decoder.decode(given), decoder.decode(given[::-1])[::-1]
    found = []
    for at, name in enumerate(names):
        waves = [backwards[at], *(decoder.decode([given[at]]) if at < alone else [])]
        if not all(torch.equal(together[at], wave) for wave in waves):
            found.append(name)
    return found


def bits(bench: Bench, size: str, slots: int) -> dict[str, Any]:
    """Every comparison: in one mix, alone, in another mix, and again."""
    count, few, longest, most = (6, 2, 80, 5) if size == "tiny" else (96, 24, 700, 40)

    def sizes(turn: int) -> EngineOptions:
        return EngineOptions(slots, slots * 13 + 40, PAGE_SIZE, CONTEXT, frames_per_turn=turn)

    def opened() -> FrameExecutor:
        return open_executor(model, sizes(1), reproducible=bench.on_gpu)

    codec = TINY_CODEC if size == "tiny" else PUBLISHED_CODEC
    with torch.inference_mode():
        model = dummy_model(size, bench.device, bench.dtype, CONTEXT)
        decoder = dummy_decoder(codec, bench.device, bench.dtype, reproducible=True)
        batch, began = varied_requests(model, count, longest, most), time.perf_counter()
        executor = opened()
        mix = spoken(executor, sizes(2), batch, len(batch))
        alone = spoken(executor, sizes(1), batch[:few], 1)
        other = spoken(executor, sizes(3), batch[::-1], 7)
        del executor
        again = spoken(opened(), sizes(2), batch, len(batch))
        assert len(mix) == len(other) == len(again) == len(batch)
        found = {
            "differ_alone": differing(alone, mix),
            "differ_in_another_mix": differing(other, mix),
            "differ_on_a_second_run": differing(again, mix),
            "differ_in_audio": differing_audio(decoder, mix, few),
        }
    counts = {"requests": len(batch), "alone": len(alone), "frames": sum(map(len, mix.values()))}
    seconds = time.perf_counter() - began
    return {**counts, **found, "same_bits": not any(found.values()), "seconds": seconds}


MIB = 2**20
#: Growth from the first third to the end that counts as a leak (MiB of the device and of the host), and the least
#: share of the first third's speed that the last third must keep.
MOST_DEVICE_GROWTH, MOST_HOST_GROWTH, LEAST_SPEED = 64.0, 256.0, 0.9


def sample(loop: ClosedLoop, device: torch.device, began: float) -> dict[str, float]:
    core, on_gpu = loop.engine.core, device.type == "cuda"
    return {
        "at_s": time.perf_counter() - began,
        "utterances": loop.tally.utterances,
        "frames": core.frames_made,
        "running": len(core.scheduler.running),
        "free_pages": len(core.executor.kv.free),
        "device_mib": torch.cuda.memory_allocated(device) / MIB if on_gpu else 0.0,
        "device_reserved_mib": torch.cuda.memory_reserved(device) / MIB if on_gpu else 0.0,
        "host_mib": psutil.Process().memory_info().rss / MIB,
    }


def verdict(
    samples: Sequence[dict[str, float]], count: int, slots: int, pages: int, end: dict[str, Any], timed: bool
) -> dict[str, Any]:
    """Figures of the samples, and the problems in words. `end` is the state after draining; `timed`: whether
    the speed means something."""
    third = max(len(samples) // 3, 1)
    early, late = samples[:third], samples[-third:]

    def speed(part: Sequence[dict[str, float]]) -> float:
        seconds = part[-1]["at_s"] - part[0]["at_s"]
        return (part[-1]["frames"] - part[0]["frames"]) / seconds if seconds > 0 else 0.0

    def growth(name: str) -> float:
        """Of what is always taken: a batch that is under way at one sample is no leak."""
        return min(one[name] for one in late) - min(one[name] for one in early)

    first, last, device, host = speed(early), speed(late), growth("device_mib"), growth("host_mib")
    slow = timed and first and len(samples) >= 9 and last < LEAST_SPEED * first
    problems = {
        f"{end['utterances']} of {count} utterances": end["utterances"] < count,
        f"{end['wrong']} utterances were wrong": end["wrong"],
        "not everything came out": not end["drained"],
        f"{slots - end['free_slots']} slots are lost": end["free_slots"] != slots,
        f"{pages - end['free_pages']} pages are lost": end["free_pages"] != pages,
        "the device's memory grew": device > MOST_DEVICE_GROWTH,
        "the host's memory grew": host > MOST_HOST_GROWTH,
        f"the last third ran at {last / (first or 1):.0%} of the first": slow,
    }
    return {
        "frames_per_s_first_third": first,
        "frames_per_s_last_third": last,
        "device_growth_mib": device,
        "host_growth_mib": host,
        **end,
        "problems": [problem for problem, there in problems.items() if there],
    }


def soak(bench: Bench, size: str, slots: int) -> dict[str, Any]:
    """Runs `--count` utterances and gives samples and verdict."""
    count, most_seconds = bench.options.count, bench.options.seconds
    load = Load(0.3, 0.6, 0) if size == "tiny" else Load(0.4, 2.0, 0)
    work = Throughput(bench, size, load)
    executor, options, _ = work.open(slots, load, wide=False)
    pool = requests(work.model, load, 4 * slots, min(256, options.pages * PAGE_SIZE - 64))
    loop = ClosedLoop(executor, options, pool, work.decoder)
    try:
        loop.settle(min(slots, count // 4), most_seconds / 2)  # kernels are built
        before, began = loop.tally.utterances, time.perf_counter()
        samples = [sample(loop, bench.device, began)]
        until = began + most_seconds
        while loop.tally.utterances - before < count and not loop.tally.wrong and time.perf_counter() < until:
            time.sleep(0.25)
            samples.append(sample(loop, bench.device, began))
        drained = loop.drain(30 if bench.on_gpu else 240)
        gc.collect()
        end = {
            "utterances": loop.tally.utterances - before,
            "wrong": loop.tally.wrong,
            "drained": drained,
            "free_slots": len(loop.engine.core.scheduler.free_slots),
            "free_pages": len(executor.kv.free),
        }
    finally:
        loop.close()
    seconds = samples[-1]["at_s"]
    rate = (samples[-1]["frames"] - samples[0]["frames"]) / seconds
    found = {"size": size, "slots": slots, "count": count, "seconds": seconds}
    found |= {"frames_per_s": rate, "utterances_per_s": end["utterances"] / seconds}
    return found | verdict(samples, count, slots, options.pages, end, size != "tiny") | {"samples": samples}


SITE = "NIGHTJAR_REFERENCE_SITE"
TAIL = [151645, 198, *ROLE]
#: What the package imports and the 12 Hz models never use.
STUBS = (
    "torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi", "sox", "onnxruntime", "librosa", "librosa.filters",
    "soundfile",
)  # fmt: skip


def reference_config(size: str) -> dict[str, Any]:
    """The package's keyword arguments of its config, for "0b6", "1b7" or "tiny"."""
    config = checkpoint.qwen3_config(size)
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
    config = checkpoint.decoder_keys(size)
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
    checkpoint.fill(model.eval(), codec_values)
    checkpoint.fill(decoder.eval(), codec_values, 1)
    with torch.no_grad():
        model.talker.codec_head.weight[config["talker_config"]["codec_eos_token_id"]] = 0
    return model, decoder


def generated(model: Any, batch: int, frames: int, text_tokens: int = 30) -> list[Tensor]:
    """Codes [frames, 16] of every row of a batch, by the package's own loop; the pad, which is suppressed,
    stands for the end."""
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


@torch.inference_mode()
def reference(bench: Bench, size: str) -> None:
    """One row a batch, smallest first; ends at the first that does not fit the device's memory."""
    batches, frames = ([1, 2], 4) if size == "tiny" else (sorted(bench.options.batches), bench.options.frames)
    model, decoder = open_reference(size, bench.device, bench.dtype)
    for batch in batches:
        row: Row = {"size": size, "part": "reference", "slots": batch}
        try:
            memory(bench.device)
            generated(model, batch, 2)
            bench.wait()
            began = time.perf_counter()
            codes = generated(model, batch, frames)
            bench.wait()
            lm_seconds = time.perf_counter() - began
            assert all(len(one) == frames for one in codes), sorted({len(one) for one in codes})
            us = min(codec_us(bench, decoder, codes, min(rows, batch), 0.5) for rows in (16, 64))
        except torch.OutOfMemoryError:
            bench.add({**row, "error": "out of memory"})
            return
        made = batch * frames
        seconds = lm_seconds + made * us / 1e6
        row |= {"frames": frames, "lm_ms_per_frame": 1000 * lm_seconds / frames}
        row |= {"lm_frames_per_s": made / lm_seconds, "codec_us_per_frame": us}
        row |= {"ms_per_frame": 1000 * seconds / frames, "frames_per_s": made / seconds}
        row |= {"audio_s_per_s": made / seconds / FRAMES_PER_SECOND}
        bench.add(row | {"peak_gib": memory(bench.device).get("peak_gib")})


def main() -> int:
    made = parser(__doc__)
    made.add_argument("part", choices=("bits", "soak", "reference"))
    options = read(made, size="0b6", slots=0, count=10_000, seconds=90.0, batches=[256, 512], frames=48)
    size, part = "tiny" if options.tiny else options.size, options.part
    if part == "reference":
        if find_spec("qwen_tts") is None:
            # Again, with the reference's packages before all others.
            site = os.environ.get(SITE, "")
            if not Path(site, "qwen_tts").is_dir():
                made.error(
                    f"{SITE} names no folder with the packages of benchmarks/requirements-reference.txt"
                )
            command = [sys.executable, "-m", "benchmarks.qwen3", *sys.argv[1:]]
            return subprocess.run(command, env=environment_with(site), check=False).returncode
        for name in STUBS:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = MagicMock(__path__=[], __spec__=spec)
        torch.backends.cudnn.benchmark = True
        # The loop is bound by launches, and tiny models by the hand-over between threads.
        torch.set_num_threads(1)
        bench = Bench("reference", options, transformers=version("transformers"))
        bench.attempt(size, reference, bench, size)
        return bench.end("size", "slots", "lm_ms_per_frame", "codec_us_per_frame", "audio_s_per_s")
    bench, slots = Bench(f"qwen3_tts_{part}", options), 8 if options.tiny else options.slots
    found = bits(bench, size, slots or 128) if part == "bits" else soak(bench, size, slots or 512)
    bench.keep(**found)
    print(json.dumps({key: value for key, value in found.items() if key != "samples"}, indent=1))
    return int(not found.get("same_bits", not found.get("problems")))


if __name__ == "__main__":
    raise SystemExit(main())
