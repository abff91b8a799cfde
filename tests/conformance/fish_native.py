"""What only our own engine shows of Fish Speech S2 against a golden folder: the numbers of each step, its
window, and its draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.reference import FrameOutput, draw_first
from kernels.sampler import WEIGHT_BITS, DrawFlags, frame_noise, nucleus_weights, process_first
from kernels.sampler import draw as draw_code
from pipelines.engine.executor import FrameSettings, PrefillRun
from pipelines.engine.state import Placement, SamplingParams
from pipelines.fish_speech.model import FishModel, load_weights
from pipelines.tokens import TokenPrompt
from tests.conformance.token_engines import check_share
from tests.support.fish_oracle import probabilities

if TYPE_CHECKING:
    from tests.conformance.fish import Case, Golden, Item

#: Draws a setting.
DRAWS = 100_000
#: Seeds among which one draws what a case of the window wants.
SEEDS = 4_000
GREEDY = SamplingParams(temperature=0.0, repetition_penalty=1.0, residual_temperature=0.0, min_new_tokens=0)


def cases(golden: Golden) -> Iterator[Case]:
    """The numbers of each step, its window, and the draws of the sampler."""
    model = cache(
        lambda device: FishModel(golden.config, load_weights(golden.config, torch.float32, device), 2048)
    )
    here, cpu = golden.device, torch.device("cpu")
    for case in golden.cases.values():
        name, kind = f"{case['kind']} {case['name']}", case["kind"]
        # Draws from given logits are the same on every device.
        if kind == "sampling_distribution":
            yield name, lambda case=case: _draws(golden, model(cpu), case)
        elif kind == "ras_unit":
            yield name, lambda case=case: _ras(golden, model(cpu), case)
        elif kind == "stochastic_replay":
            yield name, lambda case=case: _replay(golden, model(here), case)
        elif "hidden" in case.get("arrays", ()):
            yield f"trace {case['name']}", lambda case=case: _trace(golden, model(here), case)


def prompt_of(golden: Golden, columns: NDArray[np.int64]) -> TokenPrompt:
    """A prompt of columns [1 + codebooks, positions]."""
    semantic = golden.config.semantic
    return TokenPrompt(
        columns[0].tolist(),
        columns[1:, (columns[0] >= semantic.start) & (columns[0] < semantic.stop)].T.copy(),
    )


@torch.inference_mode()
def forced_frames(
    model: FishModel, prompt: TokenPrompt, codes: NDArray[np.int64]
) -> tuple[list[FrameOutput], list[list[int]]]:
    """Frames behind a prompt with these codes [frames, codebooks] fed back, and the codes that each of
    them looked back at."""
    page_size = 16
    pages = -(-(len(prompt) + len(codes)) // page_size)
    kv, state = model.make_kv(pages, page_size), model.make_state(1, pages, 0)
    embeddings = model.embed(prompt)
    state.place(
        [
            Placement(
                0,
                [kv.free.pop() for _ in range(pages)],
                0,
                GREEDY,
                prompt.trailing,
                embeddings[-1],
                len(prompt) - 1,
            )
        ]
    )
    model.prefill([PrefillRun(0, 0, embeddings[:-1])], state, kv)
    row, outputs, windows = torch.tensor([0], device=model.device), [], []
    for index, frame in enumerate(codes):
        windows.append([code for code in state.recent[0].tolist() if code >= 0])
        settings = FrameSettings(len(prompt) + index, ())
        outputs.append(
            model.frame(row, settings, state, kv, torch.from_numpy(frame[None].copy()).to(model.device))
        )
    return outputs, windows


def allowed(golden: Golden) -> Tensor:
    """The ids that can be drawn, in the order of their codes."""
    return torch.tensor([*golden.config.semantic, golden.config.end])


def _trace(golden: Golden, model: FishModel, case: Item) -> None:
    """The golden columns fed back: the embeddings of the prompt, and the state and the logits behind each
    column."""
    arrays, ids = golden.arrays(case["file"]), allowed(golden)
    columns, prompt = arrays["columns_0"], prompt_of(golden, arrays["prompt_0"])
    golden.near("embeds", model.embed(prompt), arrays["embeds"], "embeds")
    outputs, _ = forced_frames(model, prompt, columns[1:].T)
    # What no frame of ours computes (states inside the prompt, logits of text, code 0 again) is that of the
    # plain loop, which has passed.
    trace, spoken = (
        golden.trace(case["name"], 0),
        torch.from_numpy(np.concatenate((arrays["prompt_0"], columns), axis=1)),
    )
    with torch.inference_mode():
        hidden = golden.oracle.slow(golden.oracle.embed(spoken))
        hidden[len(prompt) - 1 : -1] = torch.cat([one.hidden for one in outputs]).cpu()
    golden.near("hidden", hidden, arrays["hidden"], "hidden")
    made, logits = torch.cat([one.first_logits for one in outputs]).cpu(), trace.logits.clone()
    logits[:, ids] = made[:, : len(ids)]
    golden.near("slow_logits", logits, arrays["slow_logits"], "logits")
    assert not bool(made[:, len(ids) :].any()), "a row that fills the head up is not zero"
    behind = torch.cat([one.residual_logits for one in outputs], dim=1).transpose(0, 1)
    golden.near("fast_logits", behind, arrays["fast_logits"][:, 1:], "logits")
    found = torch.cat([one.codes for one in outputs]).cpu()
    # Behind the end nothing is fed back or heard.
    ended = int(columns[0, -1] == golden.config.end)
    wanted = torch.from_numpy(
        np.concatenate(
            (np.where(columns[:1] == golden.config.end, len(ids) - 1, columns[1:2]), columns[2:])
        ).T
    )
    assert torch.equal(found[: len(found) - ended], wanted[: len(found) - ended]), (
        "other codes are the likeliest"
    )
    assert torch.equal(found[:, 0], wanted[:, 0]), "another code 0 is the likeliest"


def _settings(case: Item) -> tuple[float, int, float]:
    return case["temperature"], case["top_k"], case["top_p"]


def weights_of(logits: Tensor, settings: tuple[float, int, float], model: FishModel | None = None) -> Tensor:
    """The weights from which our sampler draws one row of logits, int64 [1, codes]; of code 0 with its
    `model`'s rules."""
    temperature, top_k, top_p = settings
    if model is not None:
        rules, nothing = model.tensors.draw, torch.zeros_like(logits, dtype=torch.bool)
        logits = process_first(
            logits, nothing, torch.ones(1), torch.zeros(1, dtype=torch.bool), rules.ends, rules.suppress_from
        )
    return nucleus_weights(logits, torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]))


def _head_logits(golden: Golden, model: FishModel, logits: NDArray[Any]) -> Tensor:
    """Logits of the vocabulary as the head gives them, [1, codes]."""
    ids = allowed(golden)
    made = torch.zeros(1, len(model.tensors.head))
    made[0, : len(ids)] = torch.from_numpy(logits)[ids]
    return made


def first_codes(
    model: FishModel, logits: Tensor, settings: tuple[float, int, float], window: Tensor, seeds: Tensor
) -> Tensor:
    """Code 0 as a frame draws it from these logits [1, codes], int64 [n]; window: int64 [n or 1, width];
    seeds: int64 [n]."""
    count, (temperature, top_k, top_p) = len(seeds), settings
    state, rows = model.make_state(count, 1, 0), torch.arange(count)
    state.recent[:count, : window.shape[1]] = window
    first = state.first
    first.temperature[rows], first.top_k[rows], first.top_p[rows], first.greedy[rows] = (
        temperature or 1.0,
        top_k,
        top_p,
        temperature == 0,
    )
    noise = frame_noise(seeds, torch.zeros_like(seeds), model.codebooks + 1)
    flags = DrawFlags.of([settings])
    return draw_first(model.tensors, state.tensors, rows, logits.expand(count, -1), noise, flags)


def _draws(golden: Golden, model: FishModel, case: Item) -> None:
    """The probabilities from which our sampler draws, draws with the noise of as many seeds, and code 0
    beside a window."""
    arrays, ids = golden.arrays(case["file"]), allowed(golden)
    random = frame_noise(torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.int64), 2)
    slow, fast = (
        _head_logits(golden, model, arrays["slow_logits"]),
        torch.from_numpy(arrays["fast_logits"])[None],
    )
    for index, (temperature, top_p, top_k) in enumerate(case["settings"]):
        settings = float(temperature), int(top_k), float(top_p)
        for stream, (kind, logits, rules) in enumerate((("slow", slow, model), ("fast", fast, None))):
            weights, wanted = weights_of(logits, settings, rules), arrays[f"{kind}_probs_{index}"]
            made = np.zeros(len(wanted))
            made[ids if rules else slice(None)] = weights[0, : len(ids) if rules else None].double() / (
                1 << WEIGHT_BITS
            )
            golden.near(f"{kind} settings {index}", made, wanted, "probabilities")
            # Codes without weight are never drawn: leaving them out makes a hundred thousand rows fit.
            kept = weights[0].nonzero()[:, 0]
            codes = kept[draw_code(weights[:, kept].expand(DRAWS, -1), random[:, stream])]
            check_share(
                f"{kind} settings {index}",
                (ids[codes] if rules else codes).tolist(),
                wanted.astype(np.float64),
            )
    chances, settings, window = window_chances(golden, case)
    codes = [
        first_codes(model, slow, settings, window, part) for part in torch.arange(DRAWS).split(DRAWS // 10)
    ]
    check_share("beside a window", torch.cat(codes).tolist(), chances)


def window_chances(
    golden: Golden, case: Item
) -> tuple[NDArray[np.float64], tuple[float, int, float], Tensor]:
    """The exact probabilities of each code beside a window of likely ones: float64 [codes]; the settings;
    the window int64 [1, codes]."""
    arrays, ids = golden.arrays(case["file"]), allowed(golden)
    logits = golden.oracle.masked(torch.from_numpy(arrays["slow_logits"]))
    temperature, top_p, top_k = next(
        setting for setting in case["settings"] if setting[1] > 0.5 and setting[2] > 1
    )
    first, again = (
        probabilities(logits, *one, int(top_k)).double()[ids] for one in ((temperature, top_p), (1.0, 0.9))
    )
    window = first[:-1].topk(2).indices
    inside = torch.zeros(len(ids), dtype=torch.bool)
    inside[window] = True
    chances = torch.where(inside, 0.0, first) + first[inside].sum() * again
    return chances.numpy(), (float(temperature), int(top_k), float(top_p)), window[None]


def _ras(golden: Golden, model: FishModel, case: Item) -> None:
    """Frames whose first and second draw are those of an example."""
    semantic, plain, found = golden.config.semantic, (1.0, 0, 1.0), []
    code_of = {token: code for code, token in enumerate(allowed(golden).tolist())}
    for example in case["examples"]:
        first, second = code_of[example["token_a"]], code_of[example["token_b"]]
        logits = torch.zeros(1, len(model.tensors.head))
        # Each has three sevenths of all, so that both are within the second draw's top_p.
        logits[0, [first, second]] = math.log(3 * len(code_of))
        seeds, nothing = torch.arange(SEEDS), torch.full((1, 1), -1)
        once = first_codes(model, logits, plain, nothing, seeds)
        again = first_codes(model, logits, plain, once[:, None], seeds)
        seed = seeds[(once == first) & (again == second)][:1]
        assert len(seed), f"no seed of {SEEDS} draws {first}, then {second}"
        # A window of ours never holds the end, behind which there is no frame.
        window = [code_of[token] if token in semantic else -1 for token in example["window"] or [0]]
        found += first_codes(model, logits, plain, torch.tensor([window]), seed).tolist()
    wanted = [code_of[token] for token in golden.arrays(case["file"])["token"].tolist()]
    assert found == wanted, f"{found}, expected {wanted}"


def _replay(golden: Golden, model: FishModel, case: Item) -> None:
    """The golden columns fed back: with the recorded noise our probabilities draw them, and our window is
    the recorded one."""
    arrays, ids, settings = golden.arrays(case["file"]), allowed(golden), _settings(case["sampling"])
    columns, prompt = arrays["columns"], prompt_of(golden, golden.arrays(case["prompt_file"])["prompt_0"])
    outputs, windows = forced_frames(model, prompt, columns[1:].T)
    slow, fast = (torch.from_numpy(arrays[f"uniform_{kind}"]) for kind in ("slow", "fast"))
    for step, (output, window) in enumerate(zip(outputs, windows)):
        recorded = arrays["ras_window"][step - 1].tolist() if step else []
        assert sorted(window) == sorted(token - int(ids[0]) for token in recorded if token), (
            f"step {step}: window {window}"
        )
        pairs = (("token_a", settings, 0), ("token_b", (1.0, settings[1], 0.9), 1))
        for key, how, place in pairs:
            made = _likeliest(
                weights_of(output.first_logits.cpu(), how, model)[0, : len(ids)], slow[step, place, ids]
            )
            assert int(ids[made]) == arrays[key][step], (
                f"step {step}: {key} is {int(ids[made])}, expected {arrays[key][step]}"
            )
        for index, logits in enumerate(output.residual_logits.cpu()):
            made = _likeliest(weights_of(logits, settings)[0], fast[step, index])
            assert made == columns[2 + index, step], (
                f"step {step}: code {1 + index} is {made}, expected {columns[2 + index, step]}"
            )


def _likeliest(weights: Tensor, uniform: Tensor) -> int:
    """The published draw: argmax of p / -log(u)."""
    return int((weights.double() / -uniform.double().log()).argmax())
