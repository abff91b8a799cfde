"""Checks of the frame's kernels on a GPU against their twins in float64 or float32; every one raises when
it fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from kernels import lm_cuda
from kernels.attention import paged_decode_attention
from kernels.frame import DrawTensors, FrameTensors, Layer, StackTensors, StateTensors
from kernels.layers import qk_norm_rope_append, rms_norm, rope, rope_table
from kernels.lm_attention import AttentionTile, SplitScratch, decode_attention, predictor_attention
from kernels.lm_frame import FusedFrame, Plan
from kernels.reference import FrameOutput, backbone_step, draw_frame
from kernels.sampler import DrawFlags, frame_noise, log_probability, process_first, sample
from tests.support.attention_layers import attention_layer
from tests.support.lm_tensors import SMALL, Maker, Shape


def error(found: Tensor, truth: Tensor) -> float:
    """Relative L2 error; NaN anywhere gives NaN."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def demand(name: str, value: float, bound: float) -> dict[str, float | str]:
    """A line of the report; raises unless value <= bound (NaN never passes)."""
    if not value <= bound:
        raise AssertionError(f"{name}: {value:.3g} is not within {bound:.3g}")
    return {"check": name, "error": value, "bound": bound}


def clone_state(state: StateTensors) -> StateTensors:
    """A copy that a second implementation may advance."""
    names = [name for name in StateTensors._fields if isinstance(getattr(state, name), Tensor)]
    copies = {name: getattr(state, name).clone() for name in names}
    return StateTensors(**copies, first=state.first, residual=state.residual, dead=state.dead)


def layer_product(
    x: Tensor, weight: Tensor, norm: Tensor | None, extra: Tensor | None, epilogue: int, dtype: torch.dtype
) -> Tensor:
    """The twin of `skinny` with every step in `dtype`."""
    x, weight = x.to(dtype), weight.to(dtype)
    if norm is not None:
        x = (
            rms_norm(x, norm.to(dtype), 1e-6)
            if dtype != torch.float64
            else norm.double() * x * torch.rsqrt(x.square().mean(-1, True) + 1e-6)
        )
    y = functional.linear(x, weight)
    if epilogue == lm_cuda.SWIGLU:
        gate, up = y.chunk(2, -1)
        return functional.silu(gate) * up
    return y if extra is None else y + extra.to(dtype)


SKINNY = [
    (1024, 4096, True, lm_cuda.PLAIN), (1024, 2048, True, lm_cuda.PLAIN), (1024, 3072, True, lm_cuda.PLAIN),
    (1024, 3072, True, lm_cuda.SWIGLU), (2048, 1024, False, lm_cuda.RESIDUAL), (3072, 1024, False, lm_cuda.RESIDUAL),
    (2048, 4096, True, lm_cuda.PLAIN), (2048, 6144, True, lm_cuda.SWIGLU), (2048, 2048, False, lm_cuda.RESIDUAL),
    (6144, 2048, False, lm_cuda.RESIDUAL), (2048, 1024, False, lm_cuda.BIAS), (2048, 3072, True, lm_cuda.PLAIN),
]  # fmt: skip


def check_skinny(maker: Maker) -> list[dict[str, float | str]]:
    report = []
    for inner, n, normed, epilogue in SKINNY:
        for rows in (1, 7, 16, 23, 32, 61):
            x, weight = (
                maker.normal(rows, inner),
                maker.matrix(2 * n if epilogue == lm_cuda.SWIGLU else n, inner),
            )
            norm = maker.normal(inner, std=0.1, mean=1.0) if normed else None
            extra = {lm_cuda.RESIDUAL: maker.normal(rows, n), lm_cuda.BIAS: maker.normal(n)}.get(epilogue)
            y = torch.full((rows, n), float("nan"), device=x.device, dtype=x.dtype)
            kept = torch.full_like(x, float("nan")) if normed else None
            lm_cuda.skinny(
                x, weight, y, norm=norm, eps=1e-6, epilogue=epilogue, extra=extra, normed=kept, pdl=False
            )
            truth = layer_product(x, weight, norm, extra, epilogue, torch.float64)
            plain = error(layer_product(x, weight, norm, extra, epilogue, x.dtype), truth)
            report.append(
                demand(f"skinny {inner}x{n} epilogue {epilogue} rows {rows}", error(y, truth), 2 * plain)
            )
            if kept is not None and norm is not None:
                report.append(
                    demand("kept norm", error(kept, rms_norm(x, norm, 1e-6)), 1e-3)
                )  # a few roundings may fall to the other side
            for start in (
                (0, rows - 1) if rows <= 8 else (0, rows - 9)
            ):  # a row's bits do not depend on its neighbours
                part = slice(start, start + (1 if rows <= 8 else 9))
                again = torch.full_like(y[part], float("nan"))
                added = extra[part] if epilogue == lm_cuda.RESIDUAL and extra is not None else extra
                lm_cuda.skinny(
                    x[part], weight, again, norm=norm, eps=1e-6, epilogue=epilogue, extra=added, pdl=False
                )
                report.append(demand("the same bits in fewer rows", float((again != y[part]).sum()), 0))
        # One-hot rows prove the packing: output n is input column place[n] exactly.
        place = maker.integers(0, inner, 2 * n if epilogue == lm_cuda.SWIGLU else n)
        planted = functional.one_hot(place, inner).to(torch.bfloat16)
        x, extra = maker.normal(16, inner), torch.zeros(16, n, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(16, n, device="cuda", dtype=torch.bfloat16)
        lm_cuda.skinny(
            x,
            planted,
            y,
            norm=norm,
            eps=1e-6,
            epilogue=epilogue,
            extra=extra if epilogue == lm_cuda.RESIDUAL else extra[0],
            pdl=False,
        )
        wanted = layer_product(x, planted, norm, None, epilogue, torch.bfloat16)
        report.append(
            demand(
                f"planted {inner}x{n} epilogue {epilogue}",
                error(y, wanted),
                5e-3 if epilogue == lm_cuda.SWIGLU else 1e-3,
            )
        )
    return report


def check_attention(maker: Maker) -> list[dict[str, float | str]]:
    report = []
    shape = Shape(layers=1)
    talker = maker.stack(1024, 3072, 1, shape, 4096)
    contexts = torch.tensor([0, 1, 63, 64, 65, 127, 300, 1500], device="cuda")
    rows = len(contexts)
    state = maker.state(shape, rows, 400, 64, contexts)
    layer = talker.layers[0]
    slots = torch.arange(rows, device="cuda").flip(0)
    qkv = maker.normal(rows, 4096, std=2.0)
    for splits in (1, 2, 3, 8):
        for block, warps, stages in ((64, 2, 3), (64, 4, 3), (16, 1, 5)):
            k, v = maker.caches(shape, 400, 64)
            k2, v2 = k.clone(), v.clone()
            out = torch.full((rows, 2048), float("nan"), device="cuda", dtype=torch.bfloat16)
            scratch = SplitScratch(rows * 8, splits, 2, 128, k.device)
            for _ in range(2):  # twice: the counters must be back at zero, and the append must be repeatable
                decode_attention(
                    qkv, layer, talker, k[0], v[0], state.page_table, state.positions, slots, out, scratch,
                    AttentionTile(block, warps, stages, ()), splits,
                )  # fmt: skip
            positions, table = state.positions[slots], state.page_table[slots]
            pages = table.gather(1, (positions // 64)[:, None])[:, 0]
            q = qk_norm_rope_append(
                qkv, layer, talker, talker.rope_table[positions], k2[0], v2[0], pages, positions % 64
            )
            args = (table, positions + 1, int(positions.max()) + 1, 128**-0.5)
            truth = paged_decode_attention(q.double(), k2[0].double(), v2[0].double(), *args)
            plain = error(paged_decode_attention(q, k2[0], v2[0], *args), truth)
            report.append(demand(f"attention splits {splits}", error(out, truth), max(2 * plain, 4e-3)))
            report.append(demand("keys appended", error(k, k2), 1e-3))
            report.append(demand("values appended", error(v, v2), 0))
    return report


def check_predictor_attention(maker: Maker) -> list[dict[str, float | str]]:
    """All positions by both kernels; of 601 rows a warp of the one in CUDA C++ has two or three."""
    report = []
    norms, table = (
        [maker.normal(128, std=0.1, mean=1.0) for _ in range(2)],
        rope_table(16, 128, 1e6, torch.bfloat16, str(maker.device)),
    )
    for name, kernel, n in (
        ("Triton", predictor_attention, 9),
        *(("CUDA C++", lm_cuda.predictor_attention, n) for n in (9, 601)),
    ):
        past = maker.normal(2, n, 8, 16, 128)
        keys, values = (torch.zeros(n, 8, 16, 128, device=past.device, dtype=torch.float64) for _ in range(2))
        for position in range(16):
            qkv = maker.normal(2 * n if position == 0 else n, 4096, std=2.0)
            out = torch.full((len(qkv), 2048), float("nan"), device=qkv.device, dtype=torch.bfloat16)
            launch = (
                kernel if position else predictor_attention
            )  # position 0 is two tokens a row, which one of the kernels knows
            launch(qkv, *attention_layer(norms, table), past[0], past[1], position, out)
            parts = (
                [(0, qkv[:n], out[:n]), (1, qkv[n:], out[n:])] if position == 0 else [(position, qkv, out)]
            )
            for at, part, made in parts:
                angles = table[at : at + 1].expand(n, -1)
                q, k, v = part.view(n, 32, 128).split((16, 8, 8), 1)
                keys[:, :, at], values[:, :, at] = (
                    rope(rms_norm(k, norms[1], 1e-6), angles).double(),
                    v.double(),
                )
                q = rope(rms_norm(q, norms[0], 1e-6), angles).double()[:, :, None]
                seen = keys[:, :, : at + 1], values[:, :, : at + 1]
                truth = functional.scaled_dot_product_attention(
                    q, *seen, scale=128**-0.5, enable_gqa=True
                ).flatten(1)
                report.append(
                    demand(f"{name} predictor attention of {n} rows at {at}", error(made, truth), 4e-3)
                )
    return report


def widened(weights: FrameTensors) -> FrameTensors:
    """The same weights in float32."""

    def layer(one: Layer) -> Layer:
        tensors = {name: getattr(one, name) for name in Layer._fields}
        return Layer(**{name: None if tensor is None else tensor.float() for name, tensor in tensors.items()})

    def stack(s: StackTensors) -> StackTensors:
        return s._replace(
            layers=[layer(one) for one in s.layers], norm=s.norm.float(), rope_table=s.rope_table.float()
        )

    depth, feedback = weights.depth, weights.feedback
    if depth is not None:
        project = None if depth.project is None else (depth.project[0].float(), depth.project[1].float())
        depth = depth._replace(
            stack=stack(depth.stack),
            heads=depth.heads.float(),
            inputs=depth.inputs.float(),
            project=project,
        )
    text = None if feedback.text is None else feedback.text.float()
    feedback = feedback._replace(table=feedback.table.float(), text=text)
    return weights._replace(
        backbone=stack(weights.backbone), head=weights.head.float(), feedback=feedback, depth=depth
    )


def vary_draws(maker: Maker, *settings: DrawTensors) -> None:
    """Other settings for each row, some of them greedy."""
    for one in settings:
        rows = len(one.greedy)
        one.top_k.copy_(maker.integers(0, 70, rows))
        one.top_p.copy_(torch.rand(rows, device=maker.device, generator=maker.generator) * 1.4)
        one.temperature.copy_(torch.rand(rows, device=maker.device, generator=maker.generator) + 0.3)
        one.greedy.copy_(
            (torch.rand(rows, device=maker.device, generator=maker.generator) < 0.1).to(torch.uint8)
        )


#: What any settings need.
ALL_DRAWS = DrawFlags(1 << 20, any_top_p=True, all_greedy=False)


def frame_of(
    weights: FrameTensors, state: StateTensors, k: Tensor, v: Tensor, rows: Tensor, longest: int, forced: Tensor | None
) -> FrameOutput:  # fmt: skip
    """A frame in single PyTorch ops."""
    hidden = backbone_step(weights.backbone, state, k, v, rows, longest)
    return draw_frame(weights, state, rows, hidden, ALL_DRAWS, ALL_DRAWS, forced)


def check_frame(
    maker: Maker, shape: Shape, batch: int, plan: Plan, name: str, exact: bool = False, frames: int = 2, longest_context: int = 200,
    looked_at: Sequence[int] | None = None,
) -> list[dict[str, float | str]]:  # fmt: skip
    """Some frames: codes teacher-force the twins, whose bf16 error against float32 bounds the fused frame's.

    `exact`: nothing is forced, all codes must be the twin's, and every row has other draw settings.
    `looked_at`: only these rows of the frame are compared, and their slots.
    """
    device, weights = maker.device, maker.frame(shape)
    contexts = maker.integers(0, longest_context, batch)
    pages = batch * (longest_context + 64) // 16 + batch + 1
    state = maker.state(shape, batch, pages, 16, contexts, top_p=True)
    state.frames[0] = 0  # a request's first frame
    if exact:
        vary_draws(maker, state.first, state.residual)
    k, v = maker.caches(shape, pages, 16)
    twin, wide = (
        clone_state(state),
        clone_state(state)._replace(inputs=state.inputs.float().clone()),
    )
    k2, v2, k3, v3 = k.clone(), v.clone(), k.float().clone(), v.float().clone()
    rows = torch.cat((torch.randperm(batch, device=device), torch.tensor([batch, batch], device=device)))
    live, n = rows != batch, batch + 2
    slots = slice(None)
    if looked_at is not None:
        chosen = torch.zeros_like(live)
        chosen[list(looked_at)] = True
        live &= chosen
        slots = rows[live]
    runner = FusedFrame(weights, state, k, v, n, plan)
    wide_weights = widened(weights)
    report = []
    for frame in range(frames):
        codes = torch.full((n, shape.codebooks), -1, device=device)
        flags = torch.full((n,), 9, device=device, dtype=torch.uint8)
        runner.run(rows, codes, flags)
        longest = int(twin.positions.max()) + 1
        made = frame_of(weights, twin, k2, v2, rows, longest, None if exact else codes)
        drawn, twin_flags, twin_logits = made.codes, made.flags, last_logits(made)
        truth = last_logits(frame_of(wide_weights, wide, k3, v3, rows, longest, drawn if exact else codes))
        logits = runner.logits[: truth.numel()].view(truth.shape)
        plain = error(twin_logits[live], truth[live])
        if exact:
            report.append(demand(f"frame {name}: codes differ", float((codes[live] != drawn[live]).sum()), 0))
            report.append(demand(f"frame {name}: flags differ", float((flags != twin_flags)[live].sum()), 0))
            far = (runner.log_probabilities[:n] - made.log_probabilities)[live].abs().max()
            report.append(demand(f"frame {name}: log probabilities", float(far), 2e-4))
        report.append(
            demand(f"frame {name} logits", error(logits[live], truth[live]), 1e-4 if exact else 2 * plain)
        )
        report.append(
            demand(
                f"frame {name} next inputs",
                error(state.inputs[:batch][slots], twin.inputs[:batch][slots]),
                2e-3,
            )
        )
        report.append(
            demand(f"frame {name} positions", float((state.positions != twin.positions)[slots].sum()), 0)
        )
        report.append(demand(f"frame {name} frames", float((state.frames != twin.frames)[slots].sum()), 0))
        report.append(
            demand(f"frame {name} seen", float((state.seen[:batch] != twin.seen[:batch])[slots].sum()), 0)
        )
        report.append(demand(f"frame {name} recent", float((state.recent != twin.recent)[slots].sum()), 0))
        if not exact:
            share = float((codes[live] == drawn[live]).float().mean())
            print(
                f"frame {name} {frame}: error {error(logits[live], truth[live]):.4f}, twin's {plain:.4f}, same draws {share:.3f}",
                flush=True,
            )
            twin.inputs.copy_(state.inputs), wide.inputs.copy_(state.inputs.float())
    return report


def last_logits(made: FrameOutput) -> Tensor:
    """Those of the last codebook, [n, codes]."""
    return made.residual_logits[-1] if len(made.residual_logits) else made.first_logits


def check_draw(maker: Maker) -> list[dict[str, float | str]]:
    """The draw of the last codebook from the logits that the kernel saw, against the twin's; rows differ
    in every setting."""
    report = []
    for vocab_stage in ("first", "last"):
        for launch in ("Triton", "CUDA"):
            shape = dataclasses.replace(
                SMALL, layers=1, predictor_layers=1, codebooks=4 if vocab_stage == "last" else 2
            )
            weights, batch = maker.frame(shape), 256
            contexts = maker.integers(0, 20, batch)
            state = maker.state(shape, batch, batch * 8, 16, contexts)
            vary_draws(maker, state.first, state.residual)
            k, v = maker.caches(shape, batch * 8, 16)
            rows = torch.arange(batch, device="cuda")
            before = clone_state(state)
            codes = torch.zeros(batch, shape.codebooks, dtype=torch.int64, device="cuda")
            flags = torch.zeros(batch, dtype=torch.uint8, device="cuda")
            runner = FusedFrame(weights, state, k, v, batch, Plan(skinny=False))
            with mock.patch.object(lm_cuda, "has_draw", return_value=launch == "CUDA"):
                runner.run(rows, codes, flags)
            last = shape.codebooks - 1
            logits = runner.logits[: batch * shape.codes].view(batch, -1).float()
            noise = frame_noise(before.seeds[rows], before.frames[rows], shape.codebooks)
            flags = DrawFlags(shape.codes, any_top_p=True, all_greedy=False)
            wanted = sample(logits, noise[:, last], before.residual.rows(rows), flags)
            report.append(
                demand(
                    f"draws that differ, {launch}",
                    float((codes[:, last] != wanted).float().mean()),
                    0.004,
                )
            )
            hidden = runner.hidden[:batch]
            first = functional.linear(hidden, weights.head).float()
            processed = process_first(
                first, before.seen[rows] != 0, before.penalty[rows], before.frames[rows] < before.min_new_tokens[rows], weights.draw.ends,
                weights.draw.suppress_from,
            )  # fmt: skip
            own = log_probability(first, codes[:, 0], weights.draw.ends, weights.draw.suppress_from)
            far = (runner.log_probabilities[:batch] - own).abs() > 1e-4
            report.append(demand(f"log probabilities that differ, {launch}", float(far.float().mean()), 0.02))
            flags = DrawFlags(shape.vocab, any_top_p=True, all_greedy=False)
            wanted = sample(processed, noise[:, 0], before.first.rows(rows), flags)
            report.append(
                demand(
                    f"first draws that differ, {launch}",
                    float((codes[:, 0] != wanted).float().mean()),
                    0.004,
                )
            )
            summed = weights.feedback.table[codes + weights.feedback.starts].float().sum(1).to(torch.bfloat16)
            text = before.trailing[rows, before.frames[rows].clamp(max=before.trailing.shape[1] - 1)]
            report.append(
                demand("next inputs", error(state.inputs[rows], summed + weights.feedback.text[text]), 1e-3)
            )
    return report
