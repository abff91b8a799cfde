"""SpeechLM against a golden folder: prompts, audio input, the plain loop, delay, codec; and vLLM's V2
runner where it can run."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from pipelines.audio import decode, encode
from pipelines.nn.checkpoint import Checkpoint
from pipelines.request import Message, Mode
from pipelines.speechlm.audio_encoder import SAMPLE_RATE, AudioEncoder, feature_count, load_tower
from pipelines.speechlm.codec import XcodecDecoder, load_codec
from pipelines.speechlm.config import SpeechLmConfig
from pipelines.speechlm.lm import (
    Prompt,
    Script,
    StreamSampling,
    TextCoder,
    build_prompt,
    chosen_messages,
    deinterleave,
)
from pipelines.speechlm.weights import check_names
from tests.conformance.listing import Case, listed
from tests.conformance.speechlm_oracle import Oracle, Written, drawn
from tests.support.golden_arrays import Arrays, check_near, read_arrays

#: Largest differences in float32 of values up to about 10; see `tests.support.golden_arrays.check_near` for
#: larger ones.
LIMITS = {
    "logits": 2e-4,
    "merged": 1e-3,
    "features": 2e-4,
    "mel": 1e-4,
    "waveform": 1e-4,
    "probabilities": 1e-4,
    "pcm16": 4,
}
#: Draws from which probabilities are read.
SPREAD = 4_096
Item = dict[str, Any]


def cases(folder: Path, device: str = "cpu", dtype: str = "float32") -> Iterator[Case]:
    """Every case of a golden folder as (name, check); a check raises AssertionError with the measured
    difference."""
    if dtype != "float32":
        raise ValueError("the golden data of SpeechLM is in float32")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    golden = Golden(folder, torch.device(device))
    yield from listed("cases", _all(golden))
    if find_spec("vllm") is None or (device == "cpu" and find_spec("triton") is None):
        print("left out: the cases on vLLM, which is not installed (with Triton)")
        return
    from tests.conformance import speechlm_vllm

    yield from speechlm_vllm.cases(golden)


def _all(golden: Golden) -> Iterator[Case]:
    for case in golden.cases.values():
        yield f"prompt {case['id']}", lambda case=case: golden.check_prompt(case)
        if case["audio"]:
            yield f"features {case['id']}", lambda case=case: golden.check_features(case)
        yield f"loop {case['id']}", lambda case=case: golden.check_loop(case)
        if case["expected"]["has_audio"]:
            yield f"codec {case['id']}", lambda case=case: golden.check_codec(case)
    for item in golden.content["delay"]:
        yield f"delay {item['id']}", lambda item=item: golden.check_delay(item)
    for item in golden.content["sampling"]:
        yield f"sampling {item['id']}", lambda item=item: golden.check_sampling(item)
    for item in golden.content["teacher_forced"]:
        yield f"forced {item['id']}", lambda item=item: golden.check_forced(item)
    yield "feature counts", golden.check_counts
    yield "embeddings", golden.check_embeddings
    for name in sorted(
        name.removesuffix("/waveform")
        for name in golden.arrays
        if name.startswith("codec") and name.endswith("/waveform")
    ):
        yield f"codec {name}", lambda name=name: golden.check_wave(name)


class Golden:
    """A golden folder, with what its checkpoint loads to."""

    def __init__(self, folder: Path, device: torch.device, checkpoint: Path | None = None) -> None:
        self.folder = folder
        self.device = device
        self.checkpoint = checkpoint or folder / "checkpoint"
        self.content = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
        self.cases: dict[str, Item] = {case["id"]: case for case in self.content["cases"]}
        self.arrays = Arrays(read_arrays(folder / "arrays.npz"))
        lines = (folder / "dialogues.jsonl").read_text(encoding="utf-8").splitlines()
        self.dialogues = {
            line["example_id"]: [Message(*message) for message in line["messages"]]
            for line in map(json.loads, lines)
        }
        self.bases = np.array(self.content["stream_base"])
        self.written = cache(self._written)
        self.encoder = cache(self._encoder)

    @cached_property
    def config(self) -> SpeechLmConfig:
        return SpeechLmConfig.from_folder(self.checkpoint)

    @property
    def model_type(self) -> str:
        return json.loads((self.checkpoint / "config.json").read_text(encoding="utf-8"))["model_type"]

    def under(self, checkpoint: Path) -> Golden:
        """The same cases on another copy of the checkpoint."""
        return Golden(self.folder, self.device, checkpoint)

    @cached_property
    def coder(self) -> TextCoder:
        return TextCoder(self.config)

    @cached_property
    def oracle(self) -> Oracle:
        return Oracle(self.config)

    @cached_property
    def decoder(self) -> XcodecDecoder:
        with Checkpoint(self.config.folder) as checkpoint:
            check_names(checkpoint, self.config)
            return XcodecDecoder(load_codec(checkpoint, self.config, self.device, torch.float32))

    def _encoder(self, normalise: bool) -> AudioEncoder:
        with Checkpoint(self.config.folder) as checkpoint:
            return load_tower(checkpoint, self.config, self.device, torch.float32, normalise)

    def array(self, name: str) -> NDArray[Any]:
        """A whole array. Raises AssertionError where the folder lacks it."""
        return self.arrays[name]

    def near(self, what: str, found: Any, name: str, limit: str) -> None:
        """Compares with an array. Raises AssertionError where the folder lacks it."""
        check_near(what, found, self.arrays[name], LIMITS[limit])

    def messages(self, case: Item) -> list[Message]:
        mode: Mode = "text_audio" if case["skip_assistant"] else "text_only"
        return chosen_messages(self.dialogues[case["example_id"]], mode)

    def samples(self, case: Item) -> list[NDArray[np.float32]]:
        return [decode((self.folder / item["file"]).read_bytes(), SAMPLE_RATE)[0] for item in case["audio"]]

    def prompt(self, case: Item) -> Prompt:
        encoder = self.encoder(case["do_normalize"]) if case["audio"] else None
        counts = [len(encoder.encode(one)) for one in self.samples(case)] if encoder is not None else []
        return build_prompt(self.config, self.coder, self.messages(case), counts)

    def script(self, case: Item) -> Script:
        """A case as the engine is asked for it."""
        prompt = self.prompt(case)
        encoder = self.encoder(case["do_normalize"]) if case["audio"] else None
        rows = [encoder.encode(one) for one in self.samples(case)] if encoder is not None else []
        return Script(
            case["id"],
            prompt.ids,
            case["max_tokens"],
            seed=0,
            text=StreamSampling(case["text_temperature"], 0),
            audio=StreamSampling(case["audio_temperature"], 0),
            with_audio=case["mode"] == "text_audio",
            cfg=case["cfg"] or 1.0,
            min_rows=case["audio_min_step"],
            features=[(position, one) for (position, _), one in zip(prompt.features, rows)],
        )

    def _written(self, name: str) -> Written:
        return self.oracle.write(self.script(self.cases[name]))

    def check_prompt(self, case: Item) -> None:
        prompt = self.prompt(case)
        same("prompt ids", prompt.ids, case["prompt_ids_expanded"])
        same(
            "feature positions",
            [first + n for first, count in prompt.features for n in range(count)],
            case["feature_positions"],
        )

    def check_features(self, case: Item) -> None:
        encoder = self.encoder(case["do_normalize"])
        for samples in self.samples(case):
            self.near("mel", encoder.mel(samples), f"{case['id']}/mel", "mel")
            self.near("tower", towered(encoder, samples), f"{case['id']}/tower", "features")
            self.near("features", encoder.encode(samples), f"{case['id']}/features", "features")

    def check_loop(self, case: Item) -> None:
        """The plain loop: what it wrote, and the states and logits that it wrote it from."""
        name, written = case["id"], self.written(case["id"])
        self.check_written(
            case, written.ids, np.array(written.rows, np.int64).reshape(-1, self.config.streams)
        )
        same("stream 0", written.ids, self.array(f"{name}/stream0").tolist())
        if case["expected"]["n_rows"]:
            rows = self.array(f"{name}/rows").astype(np.int64)
            same(
                "codes",
                deinterleave(rows - self.bases).tolist(),
                self.array(f"{name}/codes").astype(np.int64).tolist(),
            )
        if not case["expected"]["has_audio"]:
            self._check_silence(name, case["expected"]["n_rows"])
        self.near("embeddings of the prompt", written.prompt, f"{name}/prompt_embeds", "logits")
        steps = self.array(f"{name}/text_step").tolist()
        logits = torch.stack([written.states[step] for step in steps]) @ self.oracle.head.T
        self.near("text logits", logits, f"{name}/text_logits", "logits")
        if written.logits:
            self._check_rows(name, written)

    def _check_silence(self, name: str, rows: int) -> None:
        """What is stored of the audio of a case without any is empty."""
        kinds = ("codes", "waveform", "pcm16") if rows else ("rows", "codes", "waveform", "pcm16")
        for array in (f"{name}/{kind}" for kind in kinds):
            if array in self.arrays:
                same(array, self.array(array).size, 0)

    def _check_rows(self, name: str, written: Written) -> None:
        """Raw logits of all streams and of the ends, and hidden states, at the steps that are stored."""
        first = written.ids.index(self.config.specials.audio) + 1
        steps = [step - first for step in self.array(f"{name}/audio_step").tolist()]
        branches = ("main", "null", "merged") if written.null_states else ("main",)
        for place, branch in ((0, "main"), (1, "null"), (2, "merged")):
            if branch in branches:
                made = torch.stack([written.logits[step][place] for step in steps])
                limit = "merged" if branch == "merged" else "logits"
                self.near(f"{branch} logits", made[:, :, :-2], f"{name}/{branch}_logits", limit)
                self.near(f"{branch} logits of the ends", made[:, 0, -2:], f"{name}/{branch}_eos_eot", limit)
        states = written.states[first:]
        self.near(
            "main states", torch.stack([states[step] for step in steps]), f"{name}/main_hidden", "logits"
        )
        if written.null_states:
            self.near(
                "null states",
                torch.stack([written.null_states[step] for step in steps]),
                f"{name}/null_hidden",
                "logits",
            )

    def check_written(self, case: Item, ids: list[int], rows: NDArray[np.int64]) -> None:
        """Ids and rows of codec token ids, by whatever way they were made."""
        expected = case["expected"]
        same("stream-0 ids", ids, expected["stream0_ids"])
        same(
            "rows",
            rows.reshape(-1).tolist(),
            self.array(f"{case['id']}/rows").reshape(-1).tolist() if expected["n_rows"] else [],
        )
        same("codes", deinterleave(rows - self.bases).shape[0], expected["n_frames"])
        text = (
            ids[: ids.index(self.config.specials.assistant)] if self.config.specials.assistant in ids else ids
        )
        same("text", self.coder.decode(text), expected["text"])

    def check_codec(self, case: Item) -> None:
        codes = self.array(f"{case['id']}/codes").astype(np.int64)
        same(
            "codes",
            deinterleave(self.array(f"{case['id']}/rows").astype(np.int64) - self.bases).tolist(),
            codes.tolist(),
        )
        wave = self.decoder.decode([torch.from_numpy(codes)])[0]
        same("samples", len(wave), case["expected"]["n_samples"])
        self.near("waveform", wave.cpu(), f"{case['id']}/waveform", "waveform")
        self.near("PCM", pcm16(wave.cpu().numpy(), self.config.sample_rate), f"{case['id']}/pcm16", "pcm16")
        padded = self.decoder.decode_padded(
            [torch.from_numpy(codes), torch.zeros(len(codes) + 9, len(self.bases), dtype=torch.int64)]
        )[0]
        difference = float((padded - wave).abs().max())
        assert difference <= LIMITS["waveform"], f"in a padded batch the waveform differs by {difference:.3g}"

    def check_wave(self, name: str) -> None:
        """Codes of no case to their waveform."""
        codes = torch.from_numpy(self.array(f"{name}/codes").astype(np.int64))
        self.near("waveform", self.decoder.decode([codes])[0].cpu(), f"{name}/waveform", "waveform")

    def check_embeddings(self) -> None:
        rows = torch.from_numpy(self.array("embed/rows").astype(np.int64))
        self.near("sums", self.oracle.embed(rows), "embed/sum", "logits")

    def check_delay(self, item: Item) -> None:
        rows = self.array(f"{item['id']}/rows").astype(np.int64).reshape(-1, len(self.bases))
        codes = self.array(f"{item['id']}/codes").astype(np.int64).reshape(-1, len(self.bases))
        same("codes", deinterleave(rows - self.bases).tolist(), codes.tolist())
        if item["kind"] == "round_trip":
            same("rows", (interleave(codes) + self.bases).tolist() if len(codes) else [], rows.tolist())

    def check_sampling(self, item: Item) -> None:
        """Probabilities of every stream, by the share of 4,096 evenly spread draws that falls on each
        place."""
        source = "merged" if item["source"] == "merged" else "main"
        logits = torch.from_numpy(self.array(f"{item['case']}/{source}_logits"))
        ends = torch.from_numpy(self.array(f"{item['case']}/{source}_eos_eot"))
        first = self.array(f"{item['id']}/probs_stream0")
        others = self.array(f"{item['id']}/probs_streams1to7")
        how = StreamSampling(item["temperature"], item["top_k"])
        for step in range(len(others)):
            # The first stream may also draw one of the ends.
            rows = [(torch.cat((logits[step, 0], ends[step])), first[step])]
            rows += [(logits[step, stream], others[step, stream - 1]) for stream in range(1, logits.shape[1])]
            for stream, (one, expected) in enumerate(rows):
                share = drawn_share(one, how)
                difference = float(np.abs(share - expected).max())
                assert difference <= 2 / SPREAD, (
                    f"probabilities of step {step}, stream {stream} differ by {difference:.3g}"
                )

    def check_forced(self, item: Item) -> None:
        """Given ids and rows in one pass: states and logits of every row, main and null, and merged."""
        rows = torch.from_numpy(self.array(f"{item['id']}/rows").astype(np.int64))
        same(
            "codes",
            deinterleave(rows.numpy() - self.bases).tolist(),
            self.array(f"{item['id']}/codes").astype(np.int64).tolist(),
        )
        count = len(rows)
        made: dict[str, torch.Tensor] = {}
        for name in ("main", "null"):
            ids = torch.tensor(item[f"{name}_ids"])
            full = torch.nn.functional.pad(ids[:, None], (0, rows.shape[1] - 1))
            full[-count:] = rows
            hidden = self.oracle.hidden(self.oracle.embed(full), DynamicCache())[-count - 1 :]
            made[name] = torch.stack([self.oracle.stream_logits(one) for one in hidden])
            self.near(f"{name} states", hidden, f"{item['id']}/h_{name}", "logits")
        made["merged"] = item["cfg"] * made["main"] + (1 - item["cfg"]) * made["null"]
        for name, logits in made.items():
            limit = "merged" if name == "merged" else "logits"
            self.near(name, logits[:, :, :-2], f"{item['id']}/{name}", limit)
            self.near(f"{name} logits of the ends", logits[:, 0, -2:], f"{item['id']}/{name}_eos_eot", limit)

    def check_counts(self) -> None:
        table = self.content["feature_length"]
        for window in (50, 100):
            same(
                f"n_window {window}",
                [feature_count(frames, window) for frames in table["frames"]],
                table[f"n_window_{window}"],
            )


def interleave(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Codes [frames, streams] in 0.. -> rows [frames + streams - 1, streams]; 0 is the pad, code c is 1 +
    c."""
    frames, streams = codes.shape
    rows = np.zeros((frames + streams - 1 if frames else 0, streams), np.int64)
    for stream in range(streams):
        rows[stream : stream + frames, stream] = codes[:, stream] + 1
    return rows


def drawn_share(logits: torch.Tensor, how: StreamSampling) -> NDArray[np.float64]:
    """The share of evenly spread draws that falls on each place of logits [places]."""
    noise = (torch.arange(SPREAD) * 2 + 1) * ((1 << 32) // (2 * SPREAD))
    places = drawn(logits.expand(SPREAD, -1), noise, how)
    return torch.bincount(places, minlength=logits.shape[-1]).double().numpy() / SPREAD


def towered(encoder: AudioEncoder, samples: NDArray[np.float32]) -> torch.Tensor:
    """What the tower hands to the adaptor for a recording: [features, output]."""
    seen: list[torch.Tensor] = []
    hook = encoder.adaptor.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        encoder.encode(samples)
    finally:
        hook.remove()
    return seen[0]


def pcm16(samples: NDArray[np.float32], rate: int) -> NDArray[np.int16]:
    """The samples of the WAV file that is made of a speech."""
    return np.asarray(soundfile.read(io.BytesIO(encode(samples, rate, "wav")), dtype="int16")[0], np.int16)


def same(what: str, found: Any, expected: Any) -> None:
    """Raises AssertionError that shows the first difference."""
    if found == expected:
        return
    if isinstance(found, list) and isinstance(expected, list):
        place = next(
            (n for n, (one, other) in enumerate(zip(found, expected)) if one != other),
            min(len(found), len(expected)),
        )
        raise AssertionError(
            f"{what}: {found[place : place + 3]} at {place}, expected {expected[place : place + 3]}"
        )
    raise AssertionError(f"{what}: {found!r}, expected {expected!r}")
