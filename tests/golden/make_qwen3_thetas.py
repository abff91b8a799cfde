"""Makes the golden folder `qwen3_tts/thetas` with the published package: two rope thetas, long speech, and
lengths of drawn speech.

    PYTHONPATH=$REFERENCE:. OMP_NUM_THREADS=1 python tests/golden/make_qwen3_thetas.py tests/golden/qwen3_tts/thetas

$REFERENCE is a folder with the packages of `benchmarks/requirements-reference.txt`, which says how to fill
it; torch is 2.13.0 for CPU. Everything is drawn from fixed seeds. What the folder proves stands in the
README of `tests/golden/qwen3_tts`.
"""

from __future__ import annotations

import importlib.machinery
import json
import shutil
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from pipelines.qwen3_tts.prompt import TextTokenizer
from tests.support.golden_arrays import Array, thinned, write_arrays

NEIGHBOUR = Path(__file__).parent / "qwen3_tts"
CHECKPOINT = "checkpoint-thetas"
#: Unlike each other and unlike those of the published models (1e6, 1e6, 1e4).
TALKER_THETA, PREDICTOR_THETA, CODEC_THETA = 20_000, 300, 700
CODEC_WINDOW = 16
#: Prime to the factors by which the codec upsamples.
THIN = 7
#: What the codec's last product is scaled by, so that nothing is clipped.
LOUDNESS = 0.02
#: The spread of all logits, and what the end's are on the average: likely enough for speech of a dozen
#: frames.
LOGITS, END_LOGIT = 2.0, 4.1
ROWS_AT_ONCE = 256
TEXTS = {
    "short": "One of two.",
    "middle": "The ferry leaves at nine.",
    "long": "The ferry leaves at nine, and the lighthouse keeper waves to every boat.",
}
GREEDY = {"do_sample": False, "subtalker_dosample": False}
CASES: list[dict[str, Any]] = [
    {"name": "thetas_nonstreaming", "non_streaming_mode": True, "texts": ["middle"], "max_new_tokens": 42},
    {"name": "thetas_streaming", "non_streaming_mode": False, "texts": ["long"], "max_new_tokens": 34},
    {
        "name": "thetas_batch",
        "non_streaming_mode": True,
        "texts": ["short", "long", "middle"],
        "max_new_tokens": 26,
    },
]
FORCED = {"thetas_nonstreaming": 20, "thetas_streaming": 8}
LENGTHS: list[dict[str, Any]] = [
    {"name": "default", "prompt_of_case": "thetas_nonstreaming", "max_new_tokens": 12, "runs": 1024,
     "temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05,
     "subtalker_temperature": 0.9, "subtalker_top_k": 50, "subtalker_top_p": 1.0},
    {"name": "other", "prompt_of_case": "thetas_streaming", "max_new_tokens": 12, "runs": 1024,
     "temperature": 1.2, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.4,
     "subtalker_temperature": 1.3, "subtalker_top_k": 5, "subtalker_top_p": 0.8},
]  # fmt: skip
CODEC_FRAMES = (1, 16, 17, 40)
CODEC_BATCH = (9, 33)

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


class _Stub(types.ModuleType):
    """A module whose every name is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def stub_modules() -> None:
    """Puts empty modules where the package imports what is not needed here."""
    for name in STUBS:
        module = _Stub(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


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


def talker_config() -> dict[str, Any]:
    """The neighbour's design checkpoint, narrower and with thetas of its own; a voice by name, so that no
    encoder is needed."""
    config = json.loads((NEIGHBOUR / "checkpoint-design" / "config.json").read_text(encoding="utf-8"))
    config.update(tts_model_type="custom_voice", speaker_encoder_config={"enc_dim": 32, "sample_rate": 24000})
    talker = config["talker_config"]
    predictor = talker["code_predictor_config"]
    talker.update(
        hidden_size=32,
        intermediate_size=64,
        text_hidden_size=32,
        head_dim=32,
        vocab_size=64 + 1024,
        rope_theta=TALKER_THETA,
    )
    # Ids of the last 1,024 of the vocabulary lie where the vocabulary ends.
    shift = talker["vocab_size"] - 1280
    for key in [key for key, value in talker.items() if key.startswith("codec_") and isinstance(value, int)]:
        talker[key] += shift
    talker["codec_language_id"] = {name: token + shift for name, token in talker["codec_language_id"].items()}
    talker["spk_id"], talker["spk_is_dialect"] = {"ryan": 900}, {"ryan": False}
    predictor.update(
        hidden_size=32, intermediate_size=64, head_dim=32, vocab_size=64, rope_theta=PREDICTOR_THETA
    )
    return config


def codec_config() -> dict[str, Any]:
    config = json.loads(
        (NEIGHBOUR / "checkpoint-design" / "speech_tokenizer" / "config.json").read_text(encoding="utf-8")
    )
    config["decoder_config"].update(
        codebook_size=64,
        decoder_dim=32,
        latent_dim=24,
        num_hidden_layers=2,
        sliding_window=CODEC_WINDOW,
        rope_theta=CODEC_THETA,
    )
    return config


@torch.no_grad()
def rounded(module: torch.nn.Module) -> dict[str, Tensor]:
    """Rounds the weights to bfloat16, of which the folder holds them; returns them so."""
    for tensor in module.state_dict().values():
        tensor.copy_(tensor.bfloat16())
    return {
        name: tensor.bfloat16().contiguous()
        for name, tensor in module.state_dict().items()
        if "rotary" not in name
    }


class Reference:
    """The package's talker and codec with random weights, and the folder that holds them."""

    def __init__(self, folder: Path) -> None:
        from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
        from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration
        from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import (
            Qwen3TTSTokenizerV2DecoderConfig,
        )
        from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Decoder

        self.config, codec = talker_config(), codec_config()
        names = ("model_type", "architectures", "transformers_version", "dtype")
        known = {key: value for key, value in self.config.items() if key not in names}
        talker = {**known["talker_config"], "pad_token_id": known["talker_config"]["codec_pad_id"]}
        self.model = Qwen3TTSForConditionalGeneration._from_config(
            Qwen3TTSConfig(**{**known, "talker_config": talker}), attn_implementation="eager"
        ).eval()
        fill(self.model, 11)
        self.decoder = Qwen3TTSTokenizerV2Decoder._from_config(
            Qwen3TTSTokenizerV2DecoderConfig(**codec["decoder_config"]), attn_implementation="eager"
        ).eval()
        fill(self.decoder, 12)
        with torch.no_grad():
            for head in (self.model.talker.codec_head, *self.model.talker.code_predictor.lm_head):
                head.weight *= LOGITS
            self.decoder.decoder[-1].conv.weight *= LOUDNESS
        self.eos = talker["codec_eos_token_id"]
        checkpoint = folder / CHECKPOINT
        for name in (
            "vocab.json",
            "merges.txt",
            "tokenizer_config.json",
            "generation_config.json",
            "preprocessor_config.json",
        ):
            checkpoint.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(NEIGHBOUR / "checkpoint-design" / name, checkpoint / name)
        self.tokenizer = TextTokenizer.from_folder(checkpoint)
        self._make_the_end_likely()
        (checkpoint / "speech_tokenizer").mkdir(exist_ok=True)
        _write(checkpoint / "config.json", self.config)
        _write(checkpoint / "speech_tokenizer" / "config.json", codec)
        name = "preprocessor_config.json"
        shutil.copyfile(
            NEIGHBOUR / "checkpoint-design" / "speech_tokenizer" / name,
            checkpoint / "speech_tokenizer" / name,
        )
        kept = {
            name: tensor
            for name, tensor in rounded(self.model).items()
            if not name.startswith("speaker_encoder.")
        }
        save_file(kept, checkpoint / "model.safetensors", {"format": "pt"})
        made = {f"decoder.{name}": tensor for name, tensor in rounded(self.decoder).items()}
        save_file(made, checkpoint / "speech_tokenizer" / "model.safetensors", {"format": "pt"})
        # The encoder's sizes are the neighbour's, and neither folder holds it.
        shutil.copyfile(NEIGHBOUR / "checkpoint-design" / "left_out.json", checkpoint / "left_out.json")

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n")

    def generate(self, texts: list[str], non_streaming: bool, **generation: Any) -> list[NDArray[np.int16]]:
        """Codes [frames, 16] of every text."""
        codes, _ = self.model.generate(
            input_ids=[torch.tensor([self.ids(text)]) for text in texts], languages=["English"] * len(texts),
            speakers=["ryan"] * len(texts), non_streaming_mode=non_streaming, **generation,
        )  # fmt: skip
        return [one.numpy().astype(np.int16) for one in codes]

    def wave(self, codes: NDArray[Any]) -> NDArray[np.float32]:
        return self.waves([codes])[0]

    @torch.no_grad()
    def waves(self, codes: list[NDArray[Any]]) -> list[NDArray[np.float32]]:
        """As the package decodes: rows padded on the right with code 0, and cut."""
        longest = max(map(len, codes))
        padded = np.stack([np.pad(one.astype(np.int64), ((0, longest - len(one)), (0, 0))) for one in codes])
        made = self.decoder.chunked_decode(torch.from_numpy(padded).transpose(1, 2))
        return [wave[0, : 1920 * len(one)].numpy().copy() for wave, one in zip(made, codes)]

    @torch.no_grad()
    def _make_the_end_likely(self) -> None:
        """Turns the end's row of the head towards the talker's mean state, so that drawn speech ends
        within a dozen frames."""
        with self.watched() as seen:
            for text in TEXTS.values():
                self.generate([text], True, max_new_tokens=10, **GREEDY)
        mean = torch.stack(seen["hidden"]).mean(0)
        self.model.talker.codec_head.weight[self.eos] *= 0.5
        self.model.talker.codec_head.weight[self.eos] += END_LOGIT * mean / mean.square().sum()

    @contextmanager
    def watched(self) -> Iterator[dict[str, list[Tensor]]]:
        """What passes while a row is generated: prompt, trailing text, states, and logits of every step."""
        seen: dict[str, list[Tensor]] = {
            "hidden": [],
            "first": [],
            "residual": [],
            "prompt": [],
            "trailing": [],
            "pad": [],
        }
        talker = self.model.talker
        hooks = [talker.codec_head.register_forward_hook(lambda _m, inputs, out: _keep(seen, inputs[0], out))]
        hooks += [
            head.register_forward_hook(
                lambda _m, _i, out: seen["residual"].append(out[0, -1].float().clone())
            )
            for head in talker.code_predictor.lm_head
        ]
        generate = talker.generate

        def generate_watched(**kwargs: Any) -> Any:
            seen["prompt"].append(kwargs["inputs_embeds"][0].clone())
            seen["trailing"].append(kwargs["trailing_text_hidden"][0].clone())
            seen["pad"].append(kwargs["tts_pad_embed"].reshape(-1).clone())
            return generate(**kwargs)

        talker.generate = generate_watched
        try:
            yield seen
        finally:
            talker.generate = generate
            for hook in hooks:
                hook.remove()


def _keep(seen: dict[str, list[Tensor]], hidden: Tensor, logits: Tensor) -> None:
    seen["hidden"].append(hidden[0, -1].clone())
    seen["first"].append(logits[0, -1].float().clone())


def margin(logits: list[Tensor]) -> float:
    """The smallest gap between the best and the second best."""
    pairs = [one.topk(2).values for one in logits]
    return min(float(best - second) for best, second in pairs)


def make_case(
    reference: Reference, case: dict[str, Any], arrays: dict[str, Array]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A case of cases.json with its arrays, and its teacher-forced entry."""
    name, limit, mode = case["name"], case["max_new_tokens"], case["non_streaming_mode"]
    rows, forced, margins = [], [], []
    texts = [TEXTS[text] for text in case["texts"]]
    together = reference.generate(texts, mode, max_new_tokens=limit, **GREEDY)
    for index, text in enumerate(texts):
        with reference.watched() as seen:
            (codes,) = reference.generate([text], mode, max_new_tokens=limit, **GREEDY)
        assert np.array_equal(codes, together[index]), f"{name}.{index}: a batch says something else"
        ended = len(codes) < limit - 1
        suppressed = torch.arange(len(seen["first"][0])) >= len(seen["first"][0]) - 1024
        suppressed[reference.eos] = False
        processed = [_penalized(logits.masked_fill(suppressed, float("-inf")), codes[:step, 0], step, reference.eos)
                     for step, logits in enumerate(seen["first"])]  # fmt: skip
        margins += [margin(processed[: len(codes) + ended]), margin(seen["residual"])]
        prompt, trailing = seen["prompt"][0], seen["trailing"][0]
        stem = f"{name}.{index}"
        wave = reference.wave(codes)
        arrays.update({f"{stem}.prompt_embeds": prompt.numpy(), f"{stem}.trailing_embeds": trailing.numpy(), f"{stem}.codes": codes,
                       f"{stem}.wave": thinned(wave, THIN)})  # fmt: skip
        arrays["tts_pad_embed"] = seen["pad"][0].numpy()
        rows.append({"text": text, "speaker": "ryan", "language": "English", "instruct": "", "text_ids": reference.ids(text),
                     "frames": len(codes), "samples": len(wave), "stopped_by_eos": ended, "prompt_len": len(prompt),
                     "trailing_len": len(trailing)})  # fmt: skip
        if frames := FORCED.get(name):
            assert len(codes) >= frames, f"{name} has {len(codes)} frames"
            residual = torch.stack(seen["residual"]).view(-1, 15, seen["residual"][0].shape[0])
            key = f"teacher_forced.{name}"
            arrays[f"{key}.logits_codebook0"] = torch.stack(seen["first"])[: frames + 1].numpy()
            arrays[f"{key}.hidden"] = torch.stack(seen["hidden"])[: frames + 1].numpy()
            arrays[f"{key}.logits_residual"] = residual[:frames].numpy()
            forced.append({"checkpoint": CHECKPOINT, "arrays": "arrays.npz", "case": name, "row": index,
                           "frames": frames, "keys": f"{key}.*"})  # fmt: skip
    entry = {"name": name, "mode": "custom_voice", "non_streaming_mode": mode, "generation": {**GREEDY, "max_new_tokens": limit},
             "rows": rows, "checkpoint": CHECKPOINT, "arrays": "arrays.npz", "min_greedy_margin": min(margins),
             "sample_rate": 24000}  # fmt: skip
    return entry, forced


def _penalized(logits: Tensor, drawn: NDArray[Any], step: int, eos: int) -> Tensor:
    """The logits that a greedy choice of codebook 0 sees."""
    seen = torch.zeros(len(logits), dtype=torch.bool)
    seen[torch.from_numpy(drawn.astype(np.int64))] = True
    logits = torch.where(seen, torch.where(logits > 0, logits / 1.05, logits * 1.05), logits)
    if step < 2:
        logits[eos] = float("-inf")
    return logits


def make_lengths(reference: Reference, entry: dict[str, Any], cases: list[dict[str, Any]]) -> dict[str, Any]:
    """How many frames drawn speech has: counts by number of frames, from 0 to max_new_tokens - 1."""
    case = next(case for case in cases if case["name"] == entry["prompt_of_case"])
    settings = {key: value for key, value in entry.items() if key not in ("name", "prompt_of_case", "runs")}
    torch.manual_seed(5)
    lengths: list[int] = []
    while len(lengths) < entry["runs"]:
        texts = [case["rows"][0]["text"]] * ROWS_AT_ONCE
        lengths += map(
            len,
            reference.generate(
                texts, case["non_streaming_mode"], do_sample=True, subtalker_dosample=True, **settings
            ),
        )
    counts = np.bincount(lengths, minlength=entry["max_new_tokens"]).tolist()
    return {"name": entry["name"], "checkpoint": CHECKPOINT, "prompt_of_case": entry["prompt_of_case"], "row": 0,
            "generation": {"do_sample": True, "subtalker_dosample": True, **settings}, "min_new_tokens": 2,
            "runs": len(lengths), "counts": counts}  # fmt: skip


def make_codec(reference: Reference, arrays: dict[str, Array]) -> list[dict[str, Any]]:
    draw = np.random.default_rng(13)
    items: list[dict[str, Any]] = []
    for frames in CODEC_FRAMES:
        codes = draw.integers(0, 64, (frames, 16)).astype(np.int16)
        wave = reference.wave(codes)
        arrays.update(
            {f"decode.thetas.{frames}.codes": codes, f"decode.thetas.{frames}.wave": thinned(wave, THIN)}
        )
        items.append({"kind": "decode", "checkpoint": CHECKPOINT, "frames": frames, "keys": f"decode.thetas.{frames}.*",
                      "peak": float(np.abs(wave).max()), "rms": float(np.sqrt(np.square(wave).mean()))})  # fmt: skip
    source = arrays[f"decode.thetas.{CODEC_FRAMES[-1]}.codes"]
    assert isinstance(source, np.ndarray)
    for frames, wave in zip(CODEC_BATCH, reference.waves([source[:frames] for frames in CODEC_BATCH])):
        arrays[f"decode_batch.thetas.{frames}.wave"] = thinned(wave, THIN)
    note = f"one call with two items: the first frames of decode.thetas.{CODEC_FRAMES[-1]}.codes"
    items.append({"kind": "decode_batch", "checkpoint": CHECKPOINT, "frames": list(CODEC_BATCH),
                  "keys": "decode_batch.thetas.<frames>.wave", "note": note})  # fmt: skip
    return items


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(target: Path) -> None:
    stub_modules()
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(1)
    reference = Reference(target)
    arrays: dict[str, Array] = {}
    made = [make_case(reference, case, arrays) for case in CASES]
    cases = [case for case, _ in made]
    content = {
        "format": 1,
        "reference": f"qwen-tts 0.1.1, transformers {transformers.__version__}, torch {torch.__version__} float32, random tiny weights",
        "cases": cases,
        "teacher_forced": [entry for _, forced in made for entry in forced],
        "sampling": [],
        "lengths": [make_lengths(reference, entry, cases) for entry in LENGTHS],
        "codec": {"arrays": "arrays.npz", "items": make_codec(reference, arrays)},
        "tokenizer": [],
    }
    write_arrays(target / "arrays.npz", arrays)
    _write(target / "cases.json", content)
    for case in cases:
        print(
            case["name"],
            [(row["frames"], row["stopped_by_eos"]) for row in case["rows"]],
            case["min_greedy_margin"],
        )
    for entry in content["lengths"]:
        print(entry["name"], entry["counts"])
    for item in content["codec"]["items"]:
        print(item)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
