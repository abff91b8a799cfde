"""Qwen3-TTS against a golden folder: tokens, prompts, logits, codes alone and in a mix, draws, and text to
speech."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.reference import ENDED, FrameOutput
from kernels.sampler import WEIGHT_BITS, process_first, token_weights
from pipelines.engine.core import EngineOptions
from pipelines.engine.executor import EagerExecutor, FrameSettings, PrefillRun
from pipelines.engine.scheduler import GenerationRequest
from pipelines.engine.state import Placement, SamplingParams
from pipelines.qwen3_tts.config import CONTROL_IDS
from pipelines.qwen3_tts.model import Qwen3TTSModel
from pipelines.qwen3_tts.prompt import Prompt
from tests.conformance.listing import Case, listed
from tests.conformance.qwen3_folder import GREEDY, Golden, Row, near
from tests.support.golden_arrays import aligned
from tests.support.listened import ListenedCore

PROMPT_LIMIT = 2e-5
LOGITS_LIMIT = 2e-4
PROBABILITY_LIMIT = 1e-6
#: How far a bf16 run may be from float32, in units of the reference's own bf16 error.
BF16_FACTOR = 2.0
#: Our runs for the lengths of drawn speech, and how unlikely a difference from the reference's counts must be
#: to fail.
LENGTH_RUNS = 384
LENGTH_ALPHA = 1e-5


def cases(folder: Path, device: str = "cpu", dtype: str = "float32") -> Iterator[Case]:
    """Every case of a golden folder as (name, check); a check raises AssertionError with the measured
    difference.

    In bfloat16 only the teacher-forced logits that the folder has in bfloat16 too are compared. What
    cannot even be listed is one case that fails, so that the others still run.
    """
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    golden = Golden(folder, device, getattr(torch, dtype))
    if dtype == "bfloat16":
        yield from listed("teacher-forced bfloat16", _bf16(golden))
        return
    yield from listed("tokenizer", _tokenizer(golden))
    for index, case in enumerate(golden.content.get("cases", [])):
        yield from listed(f"cases {index}", _prompts(golden, case))
        yield from listed(f"cases {index}", _codes(golden, case))
    yield from listed("mixes", _mixes(golden))
    yield from listed("teacher-forced", _teacher_forced(golden))
    yield from listed("sampling", _sampling(golden))
    yield from listed("lengths", _lengths(golden))
    if missing := [name for name in ("soundfile", "soxr", "pyloudnorm") if find_spec(name) is None]:
        print(f"left out: the cases of codec and speech, which need {', '.join(missing)}")
        return
    from tests.conformance import qwen3_codec, qwen3_speech

    yield from listed("codec", qwen3_codec.cases(folder, device))
    yield from listed("speech", qwen3_speech.cases(golden))


def _tokenizer(golden: Golden) -> Iterator[Case]:
    for index, entry in enumerate(golden.content.get("tokenizer", [])):

        def check(entry: dict[str, Any] = entry) -> None:
            got = golden.tokenizer(entry["checkpoint"]).encode(entry["wrapped"])
            assert got == entry["ids_wrapper"], f"ids {got}, expected {entry['ids_wrapper']}"

        yield f"tokenizer {entry['checkpoint'].removeprefix('checkpoint-')} {index}", check


def _prompts(golden: Golden, case: dict[str, Any]) -> Iterator[Case]:
    for row in golden.rows(case):

        @torch.inference_mode()
        def check(row: Row = row) -> None:
            model = golden.model(golden.checkpoint(case))
            prompt = row.prompt(golden.config(case))
            near(model.embed(prompt), row.array("prompt_embeds"), PROMPT_LIMIT, "prompt")
            trailing = torch.from_numpy(
                prompt.trailing
                if len(prompt.trailing)
                else np.array([model.config.text_ids.tts_pad_token_id])
            )
            near(
                model.text.rows[trailing.to(model.device)],
                row.array("trailing_embeds"),
                PROMPT_LIMIT,
                "trailing text",
            )

        yield f"prompt {row.name}", check


def _codes(golden: Golden, case: dict[str, Any]) -> Iterator[Case]:
    for row in golden.rows(case):
        yield f"codes {row.name} alone", lambda row=row: _run_together(golden, [row])
    if len(case["rows"]) > 1:
        yield f"codes {case['name']} together", lambda: _run_together(golden, golden.rows(case))


def _mixes(golden: Golden) -> Iterator[Case]:
    checkpoints: dict[Path, list[Row]] = {}
    for case in golden.content.get("cases", []):
        checkpoints.setdefault(golden.checkpoint(case), []).extend(golden.rows(case))
    for rows in checkpoints.values():
        name = f"codes of all {len(rows)} rows of {rows[0].case['checkpoint']} in one mix"
        if len(rows) > 1:
            yield name, lambda rows=rows: _run_together(golden, rows, arrival_steps=3)


class _Heard:
    """Codes and finish by request id."""

    def __init__(self) -> None:
        self.codes: dict[str, NDArray[np.int64]] = {}
        self.finish: dict[str, str] = {}
        self.errors: dict[str, Exception] = {}

    def frames(self, request: GenerationRequest, codes: NDArray[np.int64]) -> None:
        """Only whole utterances are compared."""

    def finished(self, request: GenerationRequest, codes: NDArray[np.int64], finish: str) -> None:
        self.codes[request.request_id], self.finish[request.request_id] = codes, finish

    def failed(self, request: GenerationRequest, error: Exception) -> None:
        self.errors[request.request_id] = error


def _engine(golden: Golden, model: Qwen3TTSModel, slots: int, heard: _Heard) -> ListenedCore:
    context = golden.context(model.config)
    options = EngineOptions(slots=slots, pages=-(-slots * context // 64), page_size=16, max_context=context)
    return ListenedCore(EagerExecutor(model, options), options, heard)


def _run_together(golden: Golden, rows: list[Row], arrival_steps: int = 0) -> None:
    """Greedy codes of rows that share an engine, one arriving every few steps, in few slots."""
    heard = _Heard()
    model = golden.model(golden.checkpoint(rows[0].case))
    core = _engine(golden, model, 8, heard)
    for row in rows:
        core.add(row.request(golden.config(row.case)))
        for _ in range(arrival_steps):
            core.step()
    while core.busy:
        core.step()
    assert not heard.errors, f"{heard.errors}"
    for row in rows:
        got, want = heard.codes[row.name], row.array("codes")
        assert got.shape == want.shape, f"{row.name}: {got.shape[0]} frames, expected {want.shape[0]}"
        wrong = np.flatnonzero((got != want).any(axis=1))
        assert not len(wrong), f"{row.name}: codes differ from frame {wrong[0]} on"
        # With all frames made the golden data does not say what the last draw was.
        if len(want) < row.tokens - 1:
            assert heard.finish[row.name] == "eos", f"{row.name}: finish {heard.finish[row.name]!r}"


@torch.inference_mode()
def forced_frames(
    model: Qwen3TTSModel, prompt: Prompt, codes: NDArray[Any], sampling: SamplingParams = GREEDY
) -> list[FrameOutput]:
    """Frames with the given codes [frames, codebooks] fed back, and one frame more for its codebook-0
    logits."""
    page_size = 16
    pages = -(-(len(prompt) + len(codes) + 1) // page_size)
    kv, state = model.make_kv(pages, page_size), model.make_state(1, pages, len(prompt.trailing))
    embeddings = model.embed(prompt)
    state.place(
        [
            Placement(
                0,
                [kv.free.pop() for _ in range(pages)],
                0,
                sampling,
                prompt.trailing,
                embeddings[-1],
                len(prompt) - 1,
            )
        ]
    )
    if len(prompt) > 1:
        model.prefill([PrefillRun(0, 0, embeddings[:-1])], state, kv)
    row = torch.tensor([0], device=model.device)
    outputs = []
    for index, frame in enumerate([*codes.astype(np.int64), np.zeros(model.codebooks, np.int64)]):
        settings = FrameSettings(len(prompt) + index, ())
        outputs.append(model.frame(row, settings, state, kv, torch.from_numpy(frame)[None].to(model.device)))
    return outputs


def _forced_logits(golden: Golden, entry: dict[str, Any]) -> tuple[Row, Tensor, Tensor, Tensor]:
    """(row, codebook-0 logits [frames + 1, vocab], hidden [frames + 1, width], residual logits [frames,
    residuals, codes])."""
    row = golden.row(entry["case"], entry["row"])
    frames = entry["frames"]
    model = golden.model(golden.checkpoint(row.case))
    outputs = forced_frames(model, row.prompt(model.config), row.array("codes")[:frames])
    first = torch.cat([output.first_logits for output in outputs])
    hidden = torch.cat([output.hidden for output in outputs])
    residual = torch.stack([output.residual_logits[:, 0] for output in outputs[:frames]])
    return row, first, hidden, residual


def _teacher_forced(golden: Golden) -> Iterator[Case]:
    for entry in golden.content.get("teacher_forced", []):

        def check(entry: dict[str, Any] = entry) -> None:
            _, first, hidden, residual = _forced_logits(golden, entry)
            arrays, stem = golden.arrays(entry["arrays"]), entry["keys"].removesuffix("*")
            near(first, arrays[f"{stem}logits_codebook0"], LOGITS_LIMIT, "codebook-0 logits")
            near(hidden, arrays[f"{stem}hidden"], LOGITS_LIMIT, "hidden")
            near(residual, arrays[f"{stem}logits_residual"], LOGITS_LIMIT, "residual logits")

        yield f"teacher-forced {entry['case']}.{entry['row']}", check


def _bf16(golden: Golden) -> Iterator[Case]:
    for entry in golden.content.get("teacher_forced", []):
        if "bf16_vs_float32" not in entry:
            continue

        def check(entry: dict[str, Any] = entry) -> None:
            arrays, stem = golden.arrays(entry["arrays"]), entry["keys"].removesuffix("*")
            _, first, _, residual = _forced_logits(golden, entry)
            for name, got in (("logits_codebook0", first), ("logits_residual", residual)):
                made = got.float().cpu().numpy()
                ours, want = aligned(made, arrays[f"{stem}{name}"], name)
                _, theirs = aligned(made, arrays[f"{stem}bf16.{name}"], name)
                mine = float(np.sqrt(np.square(ours - want).mean()))
                reference = float(np.sqrt(np.square(theirs - want).mean()))
                assert mine <= BF16_FACTOR * reference, (
                    f"{name}: error {mine:.2e}, the reference's own is {reference:.2e}"
                )

        yield f"teacher-forced {entry['case']}.{entry['row']} bfloat16", check


def _sampling(golden: Golden) -> Iterator[Case]:
    for entry in golden.content.get("sampling", []):
        yield f"distributions {entry['name']}", lambda entry=entry: _check_first(golden, entry)
        yield f"residual distributions {entry['name']}", lambda entry=entry: _check_residual(golden, entry)
        yield f"raw logits {entry['name']}", lambda entry=entry: _check_raw(golden, entry)


def _field(golden: Golden, entry: dict[str, Any], field: str) -> NDArray[Any]:
    return golden.arrays(entry["arrays"])[f"{entry['keys'].removesuffix('*')}{field}"]


def _check_first(golden: Golden, entry: dict[str, Any]) -> None:
    """Processed distributions of codebook 0, from the stored raw logits."""
    steps, tokens = _field(golden, entry, "steps"), _field(golden, entry, "codebook0_tokens").astype(np.int64)
    logits = torch.from_numpy(_field(golden, entry, "raw_logits")).to(golden.device)
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    for row, step in enumerate(steps):
        seen[row, torch.from_numpy(tokens[:step])] = True
    settings = entry["generation"]
    penalty = torch.full((len(steps),), settings["repetition_penalty"], device=golden.device)
    ban = (torch.from_numpy(steps) < entry["min_new_tokens"]).to(golden.device)
    suppress = logits.shape[1] - CONTROL_IDS
    processed = process_first(logits, seen.to(golden.device), penalty, ban, (entry["eos_id"],), suppress)
    _near_distribution(processed, settings, "", _field(golden, entry, "probs"))


def _check_residual(golden: Golden, entry: dict[str, Any]) -> None:
    logits = torch.from_numpy(_field(golden, entry, "residual_raw_logits")).to(golden.device)
    _near_distribution(logits, entry["generation"], "subtalker_", _field(golden, entry, "residual_probs"))


def _near_distribution(logits: Tensor, settings: dict[str, Any], prefix: str, want: NDArray[Any]) -> None:
    rows = len(logits)
    top_k, top_p = settings[f"{prefix}top_k"], settings[f"{prefix}top_p"]
    weights = token_weights(
        logits,
        torch.full((rows,), settings[f"{prefix}temperature"], device=logits.device),
        torch.full((rows,), top_k, device=logits.device),
        torch.full((rows,), top_p, device=logits.device),
        top_k,
        top_p < 1,
    )
    near(weights.double() / (1 << WEIGHT_BITS), want, PROBABILITY_LIMIT, "probabilities")


def _check_raw(golden: Golden, entry: dict[str, Any]) -> None:
    """Raw logits along a sampled run, its codes given."""
    row = golden.row(entry["prompt_of_case"], entry["row"])
    model = golden.model(golden.checkpoint(row.case))
    outputs = forced_frames(model, row.prompt(model.config), _field(golden, entry, "frames"))
    first = torch.cat([outputs[step].first_logits for step in _field(golden, entry, "steps")])
    near(first, _field(golden, entry, "raw_logits"), LOGITS_LIMIT, "codebook-0 logits")
    residual = outputs[entry["residual_frame"]].residual_logits[:, 0]
    near(residual, _field(golden, entry, "residual_raw_logits"), LOGITS_LIMIT, "residual logits")
    assert not any(int(output.flags[0]) & ENDED and step < 2 for step, output in enumerate(outputs)), (
        "ended within two draws"
    )


def _lengths(golden: Golden) -> Iterator[Case]:
    for entry in golden.content.get("lengths", []):
        yield f"lengths {entry['name']}", lambda entry=entry: _check_lengths(golden, entry)


def _check_lengths(golden: Golden, entry: dict[str, Any]) -> None:
    """How many frames drawn speech has, against the reference's counts: Fisher's exact test of every
    length, and chi-square of all.

    Seeds are 0, 1, ... An end that is banned one draw too long leaves no speech of two frames, of which
    the reference has 81 and 51 in 1,024 runs: the chance of none in `LENGTH_RUNS` of ours is 6e-12 and
    9e-8, so that fault is always found. One draw too short makes speech of one frame, of which the
    reference has none: as likely found.
    """
    from scipy import stats

    row = golden.row(entry["prompt_of_case"], entry["row"])
    model, settings = golden.model(golden.checkpoint(row.case)), entry["generation"]
    sampling = SamplingParams(
        temperature=settings["temperature"],
        top_k=settings["top_k"],
        top_p=settings["top_p"],
        repetition_penalty=settings["repetition_penalty"],
        residual_temperature=settings["subtalker_temperature"],
        residual_top_k=settings["subtalker_top_k"],
        residual_top_p=settings["subtalker_top_p"],
        min_new_tokens=entry["min_new_tokens"],
    )
    heard, prompt = _Heard(), row.prompt(model.config)
    core = _engine(golden, model, 128, heard)
    for seed in range(LENGTH_RUNS):
        core.add(GenerationRequest(str(seed), prompt, sampling, seed, settings["max_new_tokens"]))
    while core.busy:
        core.step()
    assert not heard.errors, f"{heard.errors}"
    wanted = np.array(entry["counts"])
    assert wanted.sum() == entry["runs"], f"{wanted.sum()} lengths of {entry['runs']} runs"
    counts = np.bincount([len(codes) for codes in heard.codes.values()], minlength=len(wanted))
    both = np.stack((wanted, counts))
    both = both[:, both.sum(axis=0) > 0]
    told = f"lengths {counts.tolist()}, the reference's {wanted.tolist()}"
    chance = float(stats.chi2_contingency(both).pvalue)
    assert chance > LENGTH_ALPHA, f"{told}: chance {chance:.1e}"
    for column in both.T:
        chance = float(stats.fisher_exact(np.stack((column, both.sum(axis=1) - column))).pvalue)
        assert chance > LENGTH_ALPHA / len(both.T), f"{told}: chance {chance:.1e}"
