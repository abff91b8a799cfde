"""SparkTTS against a golden folder: audio in, tokens, prompts, the LM by a plain loop and on both engines,
audio out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.sampler import WEIGHT_BITS
from pipelines.audio import decode, normalize_volume
from pipelines.recording import Recording
from pipelines.spark_tts.bicodec import load_bicodec
from pipelines.spark_tts.config import LLM, WAV2VEC2, SparkConfig
from pipelines.spark_tts.prompt import Vocabulary, clone_prompt, creation_prompt
from pipelines.spark_tts.reference import (
    LAYERS,
    Reference,
    ReferenceEncoder,
    SemanticFeatures,
    reference_clip,
)
from tests.conformance import spark_engines
from tests.conformance.listing import Case, Files
from tests.conformance.spark_native import golden_row, native_weights
from tests.support.golden_arrays import Array, Arrays, check_near, flat
from tests.support.golden_checkpoint import whole
from tests.support.spark_oracle import OracleLm, Trace

#: Largest differences in float32 of values up to about 10 (see `tests.support.golden_arrays.check_near` for
#: larger ones): what the golden folder's README suggests, unless it gives its own.
LIMITS = {
    "audio": 2e-6,
    "features": 1e-4,
    "hidden": 1e-4,
    "logits": 5e-4,
    "mel": 2e-5,
    "state": 1e-4,
    "wav": 2e-5,
    "resampled": 1e-5,
}
#: Of probabilities.
PROBABILITY_LIMIT = 1e-5

Item = dict[str, Any]


def cases(folder: Path, device: str = "cpu", dtype: str = "float32") -> Iterator[Case]:
    """Every case of a golden folder as (name, check); a check raises AssertionError with the measured
    difference."""
    if dtype != "float32":
        raise ValueError("the golden data of SparkTTS is in float32")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    golden = Golden(folder, torch.device(device))
    for case in golden.cases.values():
        yield f"{case['kind']} {case['name']}", partial(golden.check, case)
    yield from spark_engines.cases(golden, "native")
    if find_spec("vllm") is None:
        print("left out: the cases on vLLM, which is not installed")
    else:
        yield from spark_engines.cases(golden, "vllm")
    golden.arrays.report()


class Golden:
    """A golden folder, with what its checkpoint loads to."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        content = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
        self.folder = folder
        self.device = device
        self.limits = LIMITS | content.get("tolerances", {})
        self.checkpoint = whole(folder / "checkpoint")
        self.cases: dict[str, Item] = {case["name"]: case for case in content["cases"]}
        self.arrays = Files(folder)
        self.reference = cache(self._reference)
        self.trace = cache(self._trace)

    @cached_property
    def config(self) -> SparkConfig:
        return SparkConfig.from_folder(self.checkpoint)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        sizes = self.config.bicodec
        return Vocabulary.from_folder(self.checkpoint / LLM, sizes.codebook_size, sizes.global_codes)

    @cached_property
    def encoder(self) -> ReferenceEncoder:
        return ReferenceEncoder(
            self.config, self.codecs[0], SemanticFeatures(self.checkpoint / WAV2VEC2, self.device)
        )

    @cached_property
    def codecs(self) -> Any:
        return load_bicodec(self.config, self.device)

    @cached_property
    def oracle(self) -> OracleLm:
        return OracleLm(self.checkpoint / LLM)

    def wav(self, name: str) -> Recording:
        return Recording((self.folder / "wavs" / name).read_bytes())

    def near(self, what: str, got: Any, want: Array, limit: str | float) -> None:
        check_near(what, got, want, self.limits[limit] if isinstance(limit, str) else limit)

    def check(self, case: Item) -> None:
        """Runs a case."""
        self.arrays.check(case)
        CHECKS[case["kind"]](self, case)

    def prompt(self, case: Item) -> list[int]:
        """The prompt of a case from its text and its recording or its labels."""
        if "gender" in case:
            return creation_prompt(
                self.vocabulary, case["text"], f"{case['gender']}/{case['pitch']}/{case['speed']}"
            )
        reference = self.reference(case["wav"])
        return clone_prompt(
            self.vocabulary, case["text"], reference.voice, case.get("ref_text"), reference.semantic
        )

    def _reference(self, wav: str) -> Reference:
        return self.encoder.prepare(self.wav(wav), with_semantic=True)

    def _trace(self, name: str) -> Trace:
        case = self.cases[name]
        return self.oracle.greedy(self.arrays(case["file"])["input_ids"].tolist(), case["max_new_tokens"])


def same(what: str, got: Any, want: NDArray[Any]) -> None:
    """Raises AssertionError that names the first position where two lists of ids differ."""
    ids, wanted = list(map(int, got)), want.tolist()
    for index, (one, other) in enumerate(zip(ids, wanted)):
        assert one == other, f"{what}: {one} at {index}, expected {other}"
    assert len(ids) == len(wanted), f"{what}: {len(ids)} ids, expected {len(wanted)}"


def _tokenize(golden: Golden, case: Item) -> None:
    for index, text in enumerate(case["texts"]):
        same(text, golden.vocabulary.encode(text), golden.arrays(case["file"])[f"ids_{index}"])


def _volume(golden: Golden, case: Item) -> None:
    arrays = golden.arrays(case["file"])
    for index in range(len(arrays) // 2):
        golden.near(
            f"example {index}", normalize_volume(arrays[f"in_{index}"]), arrays[f"out_{index}"], 1e-12
        )


def _audio_prep(golden: Golden, case: Item) -> None:
    arrays, rate = golden.arrays(case["file"]), golden.config.sample_rate
    if "resampled" in arrays:
        golden.near(
            "resampled",
            decode(golden.wav(case["wav"]).data, rate, channel=0, quality="VHQ")[0],
            arrays["resampled"],
            "resampled",
        )
        golden.near("audio", normalize_volume(arrays["resampled"]), arrays["audio"], "audio")
    samples = golden.encoder.read(golden.wav(case["wav"]))
    golden.near("audio", samples, arrays["audio"], "resampled" if "resampled" in arrays else "audio")
    raw = decode(golden.wav(case["wav"]).data, rate, channel=0, quality="VHQ")[0]
    golden.near("gain", np.abs(samples).max() / np.abs(raw).max(), arrays["gain"], "features")
    clip = reference_clip(arrays["audio"], golden.config.clip_samples)
    same("lengths", [len(samples), len(samples), len(clip)], arrays["lengths"])
    if "ref_clip" in arrays:
        golden.near("ref_clip", clip, arrays["ref_clip"], 0.0)


def _audio_tokens(golden: Golden, case: Item) -> None:
    arrays = golden.arrays(case["file"])
    if "audio_file" in case:
        reference = golden.encoder.encode(golden.arrays(case["audio_file"])["audio"])
    else:
        reference = golden.reference(case["wav"])
    same("semantic ids", reference.semantic, arrays["semantic_ids"])
    same("global ids", reference.voice, arrays["global_ids"])
    if "features_mean_abs" in case["arrays"]:
        samples = (
            golden.arrays(case["audio_file"])["audio"]
            if "audio_file" in case
            else golden.encoder.read(golden.wav(case["wav"]))
        )
        features = golden.encoder.features
        mean = features(torch.as_tensor(features.values(samples))[None])[0].abs().mean()
        golden.near("mean of the features", mean, arrays["features_mean_abs"], "features")
    if case.get("intermediates"):
        _intermediates(golden, case, arrays)


def _intermediates(golden: Golden, case: Item, arrays: Arrays) -> None:
    samples = golden.encoder.read(golden.wav(case["wav"]))
    features = golden.encoder.features
    golden.near("input_values", features.values(samples), arrays["input_values"], "state")
    states = features.states(torch.from_numpy(arrays["input_values"])[None])
    for layer in LAYERS:
        golden.near(f"hidden_{layer}", states[layer][0], arrays[f"hidden_{layer}"], "features")
    golden.near(
        "features",
        features(torch.from_numpy(arrays["input_values"])[None])[0],
        arrays["features"],
        "features",
    )
    tokenizer = golden.codecs[0]
    with torch.inference_mode():
        encoded = tokenizer.encoder(torch.from_numpy(arrays["features"])[None].to(golden.device))[0]
        golden.near("encoder_out", encoded.T, arrays["encoder_out"], "state")
        clip = torch.from_numpy(reference_clip(samples, golden.config.clip_samples))[None].to(golden.device)
        mel = tokenizer.mel(clip)
        golden.near("mel", mel[0], arrays["mel"], "mel")
        speaker = tokenizer.speaker
        latents = speaker.perceiver_sampler(speaker.context(mel))
        golden.near("perceiver_out", latents[0], arrays["perceiver_out"], "state")
        golden.near(
            "fsq_project_in", speaker.quantizer.project_in(latents)[0], arrays["fsq_project_in"], "state"
        )


def _prompt(golden: Golden, case: Item) -> None:
    arrays = golden.arrays(case["file"])
    same("input ids", golden.prompt(case), arrays["input_ids"])
    same("ids of the prompt's string", golden.vocabulary.encode(case["prompt"]), arrays["input_ids"])
    if "wav" in case:
        same("global ids", golden.reference(case["wav"]).voice, arrays["global_ids"])


def _greedy(golden: Golden, case: Item) -> None:
    """The plain loop over transformers, then its tokens as audio."""
    arrays, trace = golden.arrays(case["file"]), golden.trace(case["name"])
    same("input ids", golden.prompt(case), arrays["input_ids"])
    same("output ids", trace.ids, arrays["output_ids"])
    golden.near("hidden", trace.hidden, arrays["hidden"], "hidden")
    golden.near("logits", trace.logits[arrays["logits_steps"]], arrays["logits"], "logits")
    _heard(golden, case, trace.ids)


def _heard(golden: Golden, case: Item, ids: list[int]) -> None:
    arrays, codes = golden.arrays(case["file"]), golden.vocabulary.parse(ids)
    same("semantic ids", codes.semantic, arrays["semantic_ids"])
    voice = codes.voice if "gender" in case else golden.reference(case["wav"]).voice
    same("global ids", voice, arrays["global_ids"])
    wave = golden.codecs[1].decode([torch.tensor(codes.semantic)], [torch.tensor(voice)])[0]
    golden.near("wav", wave, flat(arrays["wav"]), "wav")


def _parse(golden: Golden, case: Item) -> None:
    for index, text in enumerate(case["texts"]):
        codes = golden.vocabulary.parse(golden.vocabulary.encode(text))
        same(f"semantic ids of {text}", codes.semantic, golden.arrays(case["file"])[f"semantic_{index}"])
        same(f"global ids of {text}", codes.voice, golden.arrays(case["file"])[f"global_{index}"])


def _tokens_of(golden: Golden, case: Item) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = golden.arrays(case.get("ids_file") or case["file"])
    return tuple(
        torch.from_numpy(arrays[name].reshape(-1).astype(np.int64)) for name in ("semantic_ids", "global_ids")
    )


def _detokenize(golden: Golden, case: Item) -> None:
    arrays, codec = golden.arrays(case["file"]), golden.codecs[1]
    semantic, voice = _tokens_of(golden, case)
    with torch.inference_mode():
        vector = codec.speaker.vector(voice[None].to(golden.device))
        golden.near("d_vector", vector[0], arrays["d_vector"], "state")
        if case["intermediates"]:
            z_q = codec.quantizer.vectors(semantic[None].to(golden.device))
            golden.near("z_q", z_q[0], arrays["z_q"], "state")
            golden.near("prenet_out", codec.prenet(z_q, vector)[0], arrays["prenet_out"], "state")
    golden.near("wav", codec.decode([semantic], [voice])[0], flat(arrays["wav"]), "wav")


def _batch(golden: Golden, case: Item) -> None:
    """BiCodec on rows of different lengths at once; the LM's batches are cases of the engines."""
    members = [golden.cases[name] for name in case["members"]]
    tokens = [_tokens_of(golden, member) for member in members]
    waves = golden.codecs[1].decode([semantic for semantic, _ in tokens], [voice for _, voice in tokens])
    for member, wave in zip(members, waves):
        golden.near(f"wav of {member['name']}", wave, flat(golden.arrays(member["file"])["wav"]), "wav")


def _chances(golden: Golden, case: Item) -> None:
    """The probabilities from which our own sampler draws."""
    logits, rules, drawable = golden_row(golden, case)
    for index, settings in enumerate(case["settings"]):
        chances = golden.arrays(case["file"])[f"probs_{index}"]
        weights = native_weights(logits, rules, settings)[0, : len(drawable.ids)]
        made = np.zeros(len(chances))
        made[drawable.ids] = weights.double() / (1 << WEIGHT_BITS)
        golden.near(f"settings {index}", made, chances, PROBABILITY_LIMIT)


CHECKS: dict[str, Callable[[Golden, Item], None]] = {
    "tokenize": _tokenize,
    "volume_unit": _volume,
    "audio_prep": _audio_prep,
    "audio_tokens": _audio_tokens,
    "prompt_clone": _prompt,
    "prompt_control": _prompt,
    "greedy": _greedy,
    "greedy_control": _greedy,
    "parse_ids": _parse,
    "detokenize": _detokenize,
    "batch": _batch,
    "sampling_distribution": _chances,
}
