"""`python -m tests.support.golden_spark REFERENCE SET TARGET [SHARE]`: a golden set of SparkTTS made with
the reference implementation.

REFERENCE is a checkout of Spark-TTS (commit 2f1ea90); it needs the packages einx, omegaconf and torchaudio
beside ours. With SHARE the ECAPA is first made such that it packs well: of each of its large tensors this
share of the values, the largest, keep their sign and become one size, and the others 0. Without SHARE the
set comes out as it was, but for rounding.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

_ECAPA = "speaker_encoder.speaker_encoder."
#: Of the checkpoint, but not of the reference's way to global tokens.
_UNUSED = (".pool.", f"{_ECAPA}bn.", f"{_ECAPA}linear.")
_LARGE = 10_000


class Maker:
    """A set that is made anew in its folder."""

    def __init__(self, reference: Path, folder: Path) -> None:
        sys.path.insert(0, str(reference))
        self.folder = folder
        self.model: Any = import_module("cli.SparkTTS").SparkTTS(folder / "checkpoint", torch.device("cpu"))
        self.model.model = self.model.model.float().eval()
        self.audio: Any = self.model.audio_tokenizer
        self.content = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
        self.files: dict[str, dict[str, Any]] = {}
        self._states: dict[str, Tensor] = {}
        speaker = self.audio.model.speaker_encoder
        for name, module in (
            ("perceiver_out", speaker.perceiver_sampler),
            ("fsq_project_in", speaker.quantizer.project_in),
        ):
            module.register_forward_hook(lambda _, __, out, name=name: self._states.__setitem__(name, out[0]))

    @torch.no_grad()
    def run(self) -> None:
        for case in self.content["cases"]:
            if case["kind"] == "audio_tokens":
                self._tokens(case)
            elif case["kind"] in ("prompt_clone", "prompt_control", "greedy", "greedy_control"):
                self._speech(case)
        for case in self.content["cases"]:
            if case["kind"] == "sampling_distribution":
                self._chances(case)
        for file, arrays in self.files.items():
            np.savez_compressed(self.folder / file, **arrays)
        (self.folder / "cases.json").write_text(
            json.dumps(self.content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )

    def _arrays(self, file: str) -> dict[str, Any]:
        if file not in self.files:
            self.files[file] = dict(np.load(self.folder / file))
        return self.files[file]

    def _put(self, case: dict[str, Any], **arrays: Any) -> None:
        """Arrays of a case in the types that they had; says how far they are from what they were."""
        held = self._arrays(case["file"])
        for key, value in arrays.items():
            old, new = held[key], np.asarray(value, held[key].dtype)
            moved = (
                f"{np.abs(new.astype(np.float64) - old).max(initial=0.0):.1e}"
                if new.shape == old.shape
                else f"{old.shape} to {new.shape}"
            )
            print(f"{case['name']} {key}: {moved}")
            held[key], case["arrays"][key] = new, [str(new.dtype), list(new.shape)]

    def _tokens(self, case: dict[str, Any]) -> None:
        if "audio_file" in case:
            samples = self._arrays(case["audio_file"])["audio"]
            clip = torch.from_numpy(self.audio.get_ref_clip(samples)).unsqueeze(0).float()
            batch = {
                "wav": torch.from_numpy(samples)[None],
                "ref_wav": clip,
                "feat": self.audio.extract_wav2vec2_features(samples),
            }
            semantic, voice = self.audio.model.tokenize(batch)
        else:
            voice, semantic = self.audio.tokenize(str(self.folder / "wavs" / case["wav"]))
        self._put(case, semantic_ids=semantic.reshape(-1), global_ids=voice.reshape(-1))
        self._put(case, **{name: state for name, state in self._states.items() if name in case["arrays"]})

    def _speech(self, case: dict[str, Any]) -> None:
        model, voice = self.model, None
        if "gender" in case:
            prompt = model.process_prompt_control(case["gender"], case["pitch"], case["speed"], case["text"])
        else:
            prompt, voice = model.process_prompt(
                case["text"], str(self.folder / "wavs" / case["wav"]), case["ref_text"]
            )
            self._put(case, global_ids=voice.reshape(-1))
        ids = model.tokenizer([prompt], return_tensors="pt")
        self._put(case, input_ids=ids.input_ids[0])
        if "prompt" in case:
            case["prompt"] = prompt
        if case["kind"].startswith("greedy"):
            self._greedy(case, ids, voice)

    def _greedy(self, case: dict[str, Any], ids: Any, voice: Tensor | None) -> None:
        model = self.model
        settings = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        wanted = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
        out = model.model.generate(**ids, max_new_tokens=case["max_new_tokens"], **settings, **wanted)
        written = out.sequences[0, ids.input_ids.shape[1] :]
        logits = torch.stack(out.logits)[:, 0]
        best = logits.topk(2).values
        case["ended_by_eos"] = bool(written[-1] == model.tokenizer.convert_tokens_to_ids("<|im_end|>"))
        case["min_margin"] = float((best[:, 0] - best[:, 1]).min())
        steps = self._arrays(case["file"])["logits_steps"].clip(max=len(written) - 1)
        hidden = torch.stack([states[-1][0, -1] for states in out.hidden_states])
        self._put(
            case,
            output_ids=written,
            hidden=hidden,
            logits_steps=steps,
            logits=logits[torch.from_numpy(steps)],
        )
        text = model.tokenizer.batch_decode([written], skip_special_tokens=True)[0]
        semantic = torch.tensor([int(found) for found in re.findall(r"bicodec_semantic_(\d+)", text)])[None]
        if voice is None:
            voice = torch.tensor([int(found) for found in re.findall(r"bicodec_global_(\d+)", text)])[
                None, None
            ]
            self._put(case, global_ids=voice.reshape(-1))
        self._put(
            case, semantic_ids=semantic[0], wav=self.audio.detokenize(voice.squeeze(0), semantic).reshape(-1)
        )

    def _chances(self, case: dict[str, Any]) -> None:
        logits = torch.from_numpy(self._arrays(case["logits_file"])["logits"][case["row"]])[None]
        for index, (temperature, top_k, top_p) in enumerate(case["settings"]):
            chain = LogitsProcessorList(
                [TemperatureLogitsWarper(temperature), TopKLogitsWarper(int(top_k)), TopPLogitsWarper(top_p)]
            )
            chances = chain(torch.zeros(1, 1, dtype=torch.long), logits.clone()).softmax(-1)[0]  # pyright: ignore[reportArgumentType]
            self._put(case, **{f"probs_{index}": chances})


def thin_out(path: Path, share: float) -> None:
    """Rewrites the ECAPA in a BiCodec's tensors."""
    tensors = {
        name: tensor
        for name, tensor in load_file(path).items()
        if not name.startswith(_ECAPA) or not _is_unused(name)
    }
    for name, tensor in tensors.items():
        if name.startswith(_ECAPA) and tensor.numel() > _LARGE:
            wide = tensor.float()
            kept = wide.abs() > wide.abs().flatten().kthvalue(int(wide.numel() * (1 - share))).values
            # Few bits, and the energy that it had.
            size = (wide.square().sum() / kept.sum()).sqrt().bfloat16().float()
            tensors[name] = (wide.sign() * kept * size).half()
    save_file(tensors, path, {"format": "pt"})


def _is_unused(name: str) -> bool:
    return any(part in name for part in _UNUSED)


def main(reference: Path, source: Path, target: Path, share: str = "") -> None:
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    if share:
        thin_out(target / "checkpoint" / "BiCodec" / "model.safetensors", float(share))
    Maker(reference, target).run()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *sys.argv[4:])
