"""Fish Speech S2 against a golden folder: audio in, codes, prompts, the dual AR by a plain loop and on
both engines, audio out."""

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
from torch import Tensor

from kernels.reference import draw_frame
from kernels.sampler import DrawFlags
from pipelines.fish_speech.codec import Codec, ReferenceEncoder, load_codec
from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.model import FishModel, drawn_ids, load_weights
from pipelines.fish_speech.prompt import Conversation, Reference, Vocabulary, clean, columns, groups
from pipelines.recording import Recording
from tests.conformance import fish_engines
from tests.conformance.listing import Case, Files
from tests.support.fish_checkpoint import whole
from tests.support.fish_oracle import OracleLm, Trace, choose, draw, probabilities
from tests.support.golden_arrays import Array, Arrays, check_near, flat

#: Largest differences in float32 of values up to about 10 (see `tests.support.golden_arrays.check_near` for
#: larger ones): what the golden folder's README suggests, unless it gives its own.
LIMITS = {
    "embeds": 1e-6,
    "hidden": 1e-4,
    "logits": 1e-4,
    "probabilities": 1e-5,
    "resampled": 1e-5,
    "state": 1e-4,
    "wav": 2e-5,
}
CHUNKS = (1, 2, 5)
#: The reference's own limit of a group of turns, where a case names none.
CHUNK_BYTES = 512

Item = dict[str, Any]


def cases(folder: Path, device: str = "cpu", dtype: str = "float32") -> Iterator[Case]:
    """Every case of a golden folder as (name, check); a check raises AssertionError with the measured
    difference."""
    if dtype != "float32":
        raise ValueError("the golden data of Fish Speech is in float32")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    golden = Golden(folder, torch.device(device))
    for case in golden.cases.values():
        yield f"{case['kind']} {case['name']}", partial(golden.check, case)
    yield from fish_engines.cases(golden, "native")
    if find_spec("vllm") is None or (device == "cpu" and find_spec("triton") is None):
        print("left out: the cases on vLLM, which is not installed (or Triton is not)")
    else:
        yield from fish_engines.cases(golden, "vllm")
    golden.arrays.report()


class Golden:
    """A golden folder, with what its checkpoint loads to."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        content = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
        self.folder = folder
        self.device = device
        self.limits = LIMITS | content.get("tolerances", {})
        self.cases: dict[str, Item] = {case["name"]: case for case in content["cases"]}
        self.arrays = Files(folder)
        self.trace = cache(self._trace)
        self._traces: dict[tuple[Any, ...], Trace] = {}

    @cached_property
    def checkpoint(self) -> Path:
        return whole(self.folder)

    @cached_property
    def config(self) -> FishConfig:
        return FishConfig.from_folder(self.checkpoint)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.from_folder(self.config)

    @cached_property
    def codec(self) -> Codec:
        return load_codec(self.config, self.device)

    @cached_property
    def references(self) -> ReferenceEncoder:
        return ReferenceEncoder(self.codec.encoder)

    @cached_property
    def oracle(self) -> OracleLm:
        return OracleLm(self.checkpoint)

    @cached_property
    def model(self) -> FishModel:
        return FishModel(self.config, load_weights(self.config, torch.float32, self.device), 2048)

    def wav(self, name: str) -> Recording:
        return Recording((self.folder / "wavs" / name).read_bytes())

    def near(self, what: str, got: Any, want: Array, limit: str) -> None:
        check_near(what, got, want, self.limits[limit])

    def check(self, case: Item) -> None:
        """Runs a case."""
        self.arrays.check(case)
        CHECKS[case["kind"]](self, case)

    def turns(self, case: Item) -> list[NDArray[np.int64]]:
        """The prompts of a case as columns, made of its text and recordings, each with the golden codes of
        the turns before."""
        arrays = self.arrays(case["file"])
        references = [
            Reference(clean(one["text"]), self.references.prepare(self.wav(one["wav"])))
            for one in case["references"]
        ]
        for index, reference in enumerate(references):
            same(f"codes of reference {index}", reference.codes.T, arrays[f"reference_codes_{index}"])
        conversation = Conversation(self.vocabulary, self.config.codebooks, references)
        texts = groups(
            clean(case["text"]), case.get("chunk_length", CHUNK_BYTES), self.config.sampling.chunk_turns
        )
        assert len(texts) == len(case["ended_by_im_end"]), (
            f"{len(texts)} turns, expected {len(case['ended_by_im_end'])}"
        )
        found = []
        for index, text in enumerate(texts):
            found.append(columns(conversation.ask(text), self.config.semantic))
            conversation.answer(arrays[f"codes_{index}"].T)
        return found

    def columns(self, hidden: Tensor) -> Tensor:
        """The columns [1 + codebooks, n] that our frame finds likeliest behind states [n, dim] of the slow
        AR."""
        rows, flags = (
            torch.arange(len(hidden), device=self.device),
            DrawFlags(0, any_top_p=False, all_greedy=True),
        )
        state = self.model.make_state(len(hidden), 1, 0).tensors
        with torch.inference_mode():
            codes = draw_frame(
                self.model.tensors, state, rows, hidden.to(self.device), flags, flags
            ).codes.cpu()
        return torch.cat((torch.tensor(drawn_ids(self.config))[codes[:, :1]], codes), 1).T

    def _trace(self, name: str, turn: int) -> Trace:
        """The plain loop over a case's prompt; cases of one prompt share it."""
        case = self.cases[name]
        prompt, sampling = self.arrays(case["file"])[f"prompt_{turn}"], case["sampling"]
        key = (prompt.tobytes(), *sorted(sampling.items()))
        if key not in self._traces:
            self._traces[key] = self.oracle.run(
                torch.from_numpy(prompt), sampling["max_new_tokens"], sampling
            )
        return self._traces[key]


def same(what: str, got: Any, want: NDArray[Any]) -> None:
    """Raises AssertionError that names the first place where two arrays of whole numbers differ."""
    found = got.cpu().numpy() if isinstance(got, Tensor) else np.asarray(got)
    assert found.shape == want.shape, f"{what}: shape {found.shape}, expected {want.shape}"
    for place in map(tuple, np.argwhere(found != want)):
        raise AssertionError(f"{what}: {found[place]} at {tuple(map(int, place))}, expected {want[place]}")


def _tokenize(golden: Golden, case: Item) -> None:
    for index, text in enumerate(case["texts"]):
        same(text, golden.vocabulary.encode(text), golden.arrays(case["file"])[f"ids_{index}"])


def _resample(golden: Golden, case: Item) -> None:
    golden.near(
        "audio",
        golden.references.read(golden.wav(case["wav"])),
        golden.arrays(case["file"])["audio"],
        "resampled",
    )


def _encode(golden: Golden, case: Item) -> None:
    arrays, encoder = golden.arrays(case["file"]), golden.codec.encoder
    resampled = [
        one for one in golden.cases.values() if one["kind"] == "resample" and one["wav"] == case["wav"]
    ]
    samples = golden.references.read(golden.wav(case["wav"]))
    if resampled:
        samples = torch.from_numpy(golden.arrays(resampled[0]["file"])["audio"])
    same("codes", encoder.encode(samples[None])[0].T, arrays["codes"])
    if not case.get("intermediates"):
        return
    with torch.inference_mode():
        features = encoder.features(samples[None])
        latents = encoder.latents(features)
        semantic = encoder.codebooks[0].choose(latents)[1]
        golden.near("encoder_out", features[0].T, arrays["encoder_out"], "state")
        golden.near("downsample_out", encoder.downsampled(features)[0].T, arrays["downsample_out"], "state")
        golden.near("pre_module_out", latents[0].T, arrays["pre_module_out"], "state")
        golden.near("semantic_z", semantic[0].T, arrays["semantic_z"], "state")


def _decode(golden: Golden, case: Item) -> None:
    """Whole, and as a stream in chunks."""
    arrays, decoder = golden.arrays(case["file"]), golden.codec.decoder
    codes = torch.from_numpy(next(iter(golden.arrays(case["codes_file"]).values()))).T
    wave = decoder.decode([codes])[0]
    golden.near("wav", wave, flat(arrays["wav"]), "wav")
    golden.near("streamed", streamed(golden, codes), flat(arrays["wav"]), "wav")
    if case.get("intermediates"):
        with torch.inference_mode():
            latents = decoder.latents(codes[None].to(golden.device))
            golden.near("z_q", latents[0].T, arrays["z_q"], "state")
            latents = decoder.post(latents, None)
            golden.near("post_module_out", latents[0].T, arrays["post_module_out"], "state")
            for layer in decoder.upsample:
                latents = layer(latents, None)
            golden.near("upsample_out", latents[0].T, arrays["upsample_out"], "state")


def streamed(golden: Golden, codes: Tensor) -> Tensor:
    """The audio of codes [frames, codebooks] that come in chunks of several sizes."""
    decoder, parts, place = golden.codec.decoder, [], 0
    state = decoder.new_state()
    while place < len(codes):
        size = CHUNKS[len(parts) % len(CHUNKS)]
        parts += decoder.decode_chunk([state], [codes[place : place + size]])
        place += size
    return torch.cat(parts)


def _greedy(golden: Golden, case: Item) -> None:
    """The prompt from text and recordings, the plain loop, and our step on the loop's states."""
    arrays = golden.arrays(case["file"])
    for turn, prompt in enumerate(golden.turns(case)):
        same(f"prompt {turn}", prompt, arrays[f"prompt_{turn}"])
        trace, want = golden.trace(case["name"], turn), arrays[f"columns_{turn}"]
        same(f"columns {turn}", trace.columns, want)
        same(f"codes {turn}", trace.columns[1:, :-1], arrays[f"codes_{turn}"])
        assert trace.ended is case["ended_by_im_end"][turn], f"turn {turn} ended: {trace.ended}"
        _ours(golden, trace, want)
    if "hidden" in case["arrays"]:
        _teacher_forced(golden, arrays, golden.trace(case["name"], 0))


def _ours(golden: Golden, trace: Trace, want: NDArray[Any]) -> None:
    """Our frame on the loop's states. No frame follows the end, and nothing hears the codes beside it."""
    found = golden.columns(trace.hidden)
    same("tokens of our frame", found[0], want[0])
    spoken = want[0] != golden.config.end
    same("columns of our frame", found[:, spoken], want[:, spoken])


def _teacher_forced(golden: Golden, arrays: Arrays, trace: Trace) -> None:
    oracle, prompt, spoken = golden.oracle, torch.from_numpy(arrays["prompt_0"]), trace.columns
    golden.near("embeds", oracle.embed(prompt), arrays["embeds"], "embeds")
    with torch.inference_mode():
        hidden = oracle.slow(oracle.embed(torch.cat((prompt, spoken), dim=1)))
        golden.near("hidden", hidden, arrays["hidden"], "hidden")
        golden.near("slow_logits", trace.logits, arrays["slow_logits"], "logits")
        first = hidden[:4] @ oracle.slow.weight("embeddings").T
        golden.near("slow_logits_prompt_first4", first, arrays["slow_logits_prompt_first4"], "logits")
        plain = [
            oracle.fast_logits(state, column[1:].tolist()) for state, column in zip(trace.hidden, spoken.T)
        ]
        golden.near(
            "fast_logits", torch.stack(plain)[:, : golden.config.codebooks], arrays["fast_logits"], "logits"
        )


def _batch(golden: Golden, case: Item) -> None:
    """Steps of several sequences in one of ours; the engines' batches are cases of their own."""
    members = [golden.cases[name] for name in case["members"]]
    traces = [golden.trace(member["name"], 0) for member in members]
    want = np.concatenate([golden.arrays(member["file"])["columns_0"] for member in members], axis=1)
    together = golden.columns(torch.cat([trace.hidden for trace in traces]))
    spoken = want[0] != golden.config.end
    same("columns", together[:, spoken], want[:, spoken])


def _sampling(golden: Golden, case: Item) -> None:
    """The plain loop's own probabilities; those of our sampler are a case of the native engine."""
    arrays = golden.arrays(case["file"])
    for kind in ("slow", "fast"):
        logits = torch.from_numpy(arrays[f"{kind}_logits"])
        logits = golden.oracle.masked(logits) if kind == "slow" else logits
        for index, (temperature, top_p, top_k) in enumerate(case["settings"]):
            found = probabilities(logits, float(temperature), float(top_p), int(top_k))
            golden.near(f"{kind} settings {index}", found, arrays[f"{kind}_probs_{index}"], "probabilities")


def _draw(golden: Golden, case: Item) -> None:
    arrays = golden.arrays(case["file"])
    chances = torch.from_numpy(golden.arrays(case["probs_file"])[case["probs_key"]])
    uniform = torch.from_numpy(arrays["uniform"])
    same(
        "tokens",
        [draw(chances, lambda step, *_: uniform[step], step, 0) for step in range(case["n"])],
        arrays["token"],
    )


def _ras(golden: Golden, case: Item) -> None:
    semantic = golden.config.semantic
    found = [
        choose(one["token_a"], one["token_b"], one["window"], semantic.start, semantic.stop - 1)
        for one in case["examples"]
    ]
    same("tokens", found, golden.arrays(case["file"])["token"])


def _replay(golden: Golden, case: Item) -> None:
    """The plain loop with the recorded noise; the probabilities of our frame are a case of the native
    engine."""
    arrays = golden.arrays(case["file"])
    prompt = torch.from_numpy(golden.arrays(case["prompt_file"])["prompt_0"])
    slow, fast = torch.from_numpy(arrays["uniform_slow"]), torch.from_numpy(arrays["uniform_fast"])
    trace = golden.oracle.run(
        prompt,
        case["max_new_tokens"],
        case["sampling"],
        lambda step, what, _: slow[step, what] if what < 2 else fast[step, what - 2],
    )
    same("columns", trace.columns, arrays["columns"])
    same("first draws", [step.token_a for step in trace.steps], arrays["token_a"])
    same("second draws", [step.token_b for step in trace.steps], arrays["token_b"])
    same("windows", [step.window for step in trace.steps[1:]], arrays["ras_window"])


def _end_to_end(golden: Golden, case: Item) -> None:
    _greedy(golden, case)
    arrays = golden.arrays(case["file"])
    turns = [arrays[f"codes_{turn}"] for turn in range(len(case["ended_by_im_end"]))]
    codes = torch.from_numpy(np.concatenate(turns, axis=1)).T
    golden.near("wav", golden.codec.decoder.decode([codes])[0], flat(arrays["wav"]), "wav")
    golden.near("streamed", streamed(golden, codes), flat(arrays["wav"]), "wav")


CHECKS: dict[str, Callable[[Golden, Item], None]] = {
    "tokenize": _tokenize,
    "resample": _resample,
    "codec_encode": _encode,
    "codec_decode": _decode,
    "greedy": _greedy,
    "batch": _batch,
    "sampling_distribution": _sampling,
    "draw": _draw,
    "ras_unit": _ras,
    "stochastic_replay": _replay,
    "end_to_end": _end_to_end,
}
