"""SpeechLM against a golden folder: prompts, audio input, the plain loop, delay, codec; and vLLM's V2 runner where it can run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from pipelines.audio import decode
from pipelines.nn.checkpoint import Checkpoint
from pipelines.request import Message, Mode
from pipelines.speechlm.codec import XcodecDecoder, load_codec
from pipelines.speechlm.config import SpeechLmConfig
from pipelines.speechlm.delay import deinterleave, interleave
from pipelines.speechlm.lm import Draw, Script
from pipelines.speechlm.names import check_names
from pipelines.speechlm.prompt import Prompt, TextCoder, build_prompt, chosen_messages
from pipelines.speechlm.tower import SAMPLE_RATE, AudioEncoder, feature_count, load_tower
from tests.conformance.listing import Case, listed
from tests.conformance.speechlm_oracle import Oracle, Written, drawn

#: Largest differences in float32.
LIMITS = {"logits": 2e-4, "merged": 1e-3, "features": 2e-4, "mel": 1e-4, "waveform": 1e-4, "probabilities": 1e-4}
Item = dict[str, Any]


def cases(folder: Path, device: str = "cpu", dtype: str = "float32") -> Iterator[Case]:
    """Every case of a golden folder as (name, check); a check raises AssertionError with the measured difference."""
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


class Golden:
    """A golden folder, with what its checkpoint loads to."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self.device = device
        self.content = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
        self.cases: dict[str, Item] = {case["id"]: case for case in self.content["cases"]}
        self.arrays = np.load(folder / "arrays.npz")
        self.held = set(self.arrays.files)
        lines = (folder / "dialogues.jsonl").read_text(encoding="utf-8").splitlines()
        self.dialogues = {line["example_id"]: [Message(*message) for message in line["messages"]] for line in map(json.loads, lines)}
        self.bases = np.array(self.content["stream_base"])
        self.written = cache(self._written)
        self.encoder = cache(self._encoder)

    @cached_property
    def config(self) -> SpeechLmConfig:
        return SpeechLmConfig.from_folder(self.folder / "checkpoint")

    @cached_property
    def coder(self) -> TextCoder:
        return TextCoder(self.config)

    @cached_property
    def oracle(self) -> Oracle:
        return Oracle(self.config)

    @cached_property
    def decoder(self) -> XcodecDecoder:
        with Checkpoint.open(self.config.folder) as checkpoint:
            check_names(checkpoint, self.config)
            return XcodecDecoder(load_codec(checkpoint, self.config, self.device, torch.float32))

    def _encoder(self, normalise: bool) -> AudioEncoder:
        with Checkpoint.open(self.config.folder) as checkpoint:
            return load_tower(checkpoint, self.config, self.device, torch.float32, None, None, normalise)

    def array(self, name: str) -> NDArray[Any]:
        return self.arrays[name]

    def near(self, what: str, found: Any, name: str, limit: str) -> None:
        """Compares with an array, where this folder holds it."""
        if name not in self.held:
            return
        expected = self.arrays[name]
        found = np.asarray(found)
        assert found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}"
        difference = float(np.abs(found - expected).max()) if expected.size else 0.0
        assert difference <= LIMITS[limit], f"{what} differs by {difference:.3g}, allowed are {LIMITS[limit]:.3g}"

    def messages(self, case: Item) -> list[Message]:
        mode: Mode = "text_audio" if case["skip_assistant"] else "text_only"
        return chosen_messages(self.dialogues[case["example_id"]], mode)

    def samples(self, case: Item) -> list[NDArray[np.float32]]:
        return [decode((self.folder / item["file"]).read_bytes(), SAMPLE_RATE)[0] for item in case["audio"]]

    def prompt(self, case: Item) -> Prompt:
        encoder = self.encoder(case["do_normalize"]) if case["audio"] else None
        counts = [encoder.count(len(one)) for one in self.samples(case)] if encoder is not None else []
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
            text=Draw(case["text_temperature"], 0),
            audio=Draw(case["audio_temperature"], 0),
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
        same("feature positions", [first + n for first, count in prompt.features for n in range(count)], case["feature_positions"])

    def check_features(self, case: Item) -> None:
        encoder = self.encoder(case["do_normalize"])
        for samples in self.samples(case):
            self.near("mel", encoder.mel(samples), f"{case['id']}/mel", "mel")
            self.near("features", encoder.encode(samples), f"{case['id']}/features", "features")

    def check_loop(self, case: Item) -> None:
        written = self.written(case["id"])
        self.check_written(case, written.ids, np.array(written.rows, np.int64).reshape(-1, self.config.streams))
        if f"{case['id']}/audio_step" not in self.held:
            return
        first = case["expected"]["stream0_ids"].index(self.config.specials.audio) + 1
        for number, step in enumerate(self.array(f"{case['id']}/audio_step").tolist()):
            main, null, merged = written.logits[step - first]
            for name, logits, limit in (("main", main, "logits"), ("null", null, "logits"), ("merged", merged, "merged")):
                array = f"{case['id']}/{name}_logits"
                if logits is None or array not in self.held:
                    continue
                difference = float(np.abs(logits[:, :-2].numpy() - self.array(array)[number]).max())
                assert difference <= LIMITS[limit], f"{name} logits of step {step} differ by {difference:.3g}"

    def check_written(self, case: Item, ids: list[int], rows: NDArray[np.int64]) -> None:
        """Ids and rows of codec token ids, by whatever way they were made."""
        expected = case["expected"]
        same("stream-0 ids", ids, expected["stream0_ids"])
        same("rows", rows.reshape(-1).tolist(), self.array(f"{case['id']}/rows").reshape(-1).tolist() if expected["n_rows"] else [])
        same("codes", deinterleave(rows - self.bases).shape[0], expected["n_frames"])
        text = ids[: ids.index(self.config.specials.assistant)] if self.config.specials.assistant in ids else ids
        same("text", self.coder.decode(text), expected["text"])

    def check_codec(self, case: Item) -> None:
        codes = self.array(f"{case['id']}/codes").astype(np.int64)
        same("codes", deinterleave(self.array(f"{case['id']}/rows").astype(np.int64) - self.bases).tolist(), codes.tolist())
        wave = self.decoder.decode([torch.from_numpy(codes)])[0]
        same("samples", len(wave), case["expected"]["n_samples"])
        self.near("waveform", wave.cpu(), f"{case['id']}/waveform", "waveform")
        padded = self.decoder.decode_padded([torch.from_numpy(codes), torch.zeros(len(codes) + 9, len(self.bases), dtype=torch.int64)])[0]
        difference = float((padded - wave).abs().max())
        assert difference <= LIMITS["waveform"], f"in a padded batch the waveform differs by {difference:.3g}"

    def check_delay(self, item: Item) -> None:
        rows = self.array(f"{item['id']}/rows").astype(np.int64).reshape(-1, len(self.bases))
        codes = self.array(f"{item['id']}/codes").astype(np.int64).reshape(-1, len(self.bases))
        same("codes", deinterleave(rows - self.bases).tolist(), codes.tolist())
        if item["kind"] == "round_trip":
            same("rows", (interleave(codes) + self.bases).tolist() if len(codes) else [], rows.tolist())

    def check_sampling(self, item: Item) -> None:
        """Probabilities, by the share of 4,096 evenly spread draws that falls on each place."""
        source = "merged" if item["source"] == "merged" else "main"
        logits = torch.from_numpy(self.array(f"{item['case']}/{source}_logits"))
        expected = self.array(f"{item['id']}/probs_streams1to7")
        spread = 4096
        noise = (torch.arange(spread) * 2 + 1) * ((1 << 32) // (2 * spread))
        how = Draw(item["temperature"], item["top_k"])
        for step, stream in ((0, 1), (len(expected) - 1, logits.shape[1] - 1)):
            places = drawn(logits[step, stream].expand(spread, -1), noise, how)
            share = torch.bincount(places, minlength=logits.shape[-1]) / spread
            difference = float(np.abs(share.numpy() - expected[step, stream - 1]).max())
            assert difference <= 2 / spread, f"probabilities of step {step}, stream {stream} differ by {difference:.3g}"

    def check_forced(self, item: Item) -> None:
        """Given ids and rows in one pass: logits of every row, main and null, and merged."""
        rows = torch.from_numpy(self.array(f"{item['id']}/rows").astype(np.int64))
        count = len(rows)
        made: dict[str, torch.Tensor] = {}
        for name in ("main", "null"):
            ids = torch.tensor(item[f"{name}_ids"])
            full = torch.nn.functional.pad(ids[:, None], (0, rows.shape[1] - 1))
            full[-count:] = rows
            hidden = self.oracle.hidden(self.oracle.embed(full), DynamicCache())[-count - 1 :]
            made[name] = torch.stack([self.oracle.stream_logits(one)[:, :-2] for one in hidden])
            self.near(name, made[name], f"{item['id']}/{name}", "logits")
        merged = item["cfg"] * made["main"] + (1 - item["cfg"]) * made["null"]
        self.near("merged", merged, f"{item['id']}/merged", "merged")

    def check_counts(self) -> None:
        table = self.content["feature_length"]
        for window in (50, 100):
            same(f"n_window {window}", [feature_count(frames, window) for frames in table["frames"]], table[f"n_window_{window}"])


def same(what: str, found: Any, expected: Any) -> None:
    """Raises AssertionError that shows the first difference."""
    if found == expected:
        return
    if isinstance(found, list) and isinstance(expected, list):
        place = next((n for n, (one, other) in enumerate(zip(found, expected)) if one != other), min(len(found), len(expected)))
        raise AssertionError(f"{what}: {found[place : place + 3]} at {place}, expected {expected[place : place + 3]}")
    raise AssertionError(f"{what}: {found!r}, expected {expected!r}")
