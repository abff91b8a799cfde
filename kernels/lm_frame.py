"""A whole frame in few launches: the backbone's step, code 0, the codebooks behind it, the next input.

What it computes is `kernels.reference.run_frame` with its rounding points; how, depends on the number of rows:
up to `Plan.skinny_rows` the weight stream is everything and five launches a layer overlap it; above, norms are launches of
their own between cuBLAS's products, or parts of those of `Plan.products`. Nothing here allocates or reads the
device, so a run can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import lm_cuda, lm_products, lm_residual, lm_wide
from kernels.frame import DepthTensors, DrawTensors, FrameTensors, Layer, StackTensors, StateTensors, fused_fault
from kernels.lm_attention import SplitScratch, attention_tile, decode_attention, predictor_attention
from kernels.lm_products import RESIDUAL, SWIGLU, Norm
from kernels.lm_sampler import FIRST, LAST, MIDDLE, ONLY, draw
from kernels.lm_triton import add_norm, swiglu


@dataclass(frozen=True, slots=True)
class Plan:
    """How a frame of a given number of rows is run; every field changes time, none changes meaning but by what is rounded once less."""

    skinny_rows: int = 32
    #: Programs that share a row's positions in attention, by number of rows, instead of those of its tile (`AttentionTile.splits`).
    splits: tuple[tuple[int, int], ...] | None = None
    pdl: bool = True
    #: Weights this many products ahead are brought into the L2; 0 = none.
    ahead: int = 0
    #: From this many rows on, a norm is a launch of its own instead of being repeated in every block of a skinny product.
    norm_apart_rows: int = 1 << 30
    cuda_draw: bool = True
    #: The kernels of `lm_products` serve all products, with PDL, on a GPU and for weights that they know.
    products: bool = False
    #: The kernel of `lm_wide` makes SwiGLU instead of cuBLAS where its tiles fill the GPU (`lm_wide.fills`), for weights that it knows.
    wide_swiglu: bool = False
    #: The kernels of `lm_residual` make O and down instead of cuBLAS where all their tiles run at once (`lm_residual.splits_for`), for
    #: weights that they know.
    residual_products: bool = False


def known_to_cuda(weights: FrameTensors) -> bool:
    """Whether the CUDA C++ kernels know the rules of the frame, whatever its sizes: attention, draws, and what is fed back."""
    depth, rules, feedback = weights.depth, weights.draw, weights.feedback
    if depth is None or feedback.starts is not depth.starts or feedback.text is None or feedback.text_by_code or feedback.scale != 1:
        return False
    plain = not rules.nucleus_first and not rules.window and len(rules.ends) == 1
    layers = [layer for stack in weights.stacks for layer in stack.layers]
    normed = all(layer.qkv_bias is None and layer.q_norm is not None and layer.k_norm is not None for layer in layers)
    return plain and normed and not any(stack.wide_rope for stack in weights.stacks)


def _skinny_shapes(weights: FrameTensors) -> bool:
    """Whether the skinny kernel knows every product of the frame."""
    needed = {(stack.hidden, True, lm_cuda.PLAIN) for stack in weights.stacks}
    for stack in weights.stacks:
        layer = stack.layers[0]
        needed |= {(layer.qkv.shape[1], True, lm_cuda.PLAIN), (layer.o.shape[1], False, lm_cuda.RESIDUAL)}
        needed |= {(layer.gate_up.shape[1], True, lm_cuda.SWIGLU), (layer.down.shape[1], False, lm_cuda.RESIDUAL)}
    if weights.depth is not None and weights.depth.project is not None:
        needed.add((weights.depth.project[0].shape[1], False, lm_cuda.BIAS))
    return all(lm_cuda.has_skinny(*shape) for shape in needed)


def runs_cuda(weights: FrameTensors, k_cache: Tensor) -> bool:
    """Whether the frames of these weights use the CUDA C++ kernels: products of few rows, attention of the predictor, draws."""
    known = k_cache.dtype == torch.bfloat16 and k_cache.is_cuda and known_to_cuda(weights) and _skinny_shapes(weights)
    return known and lm_cuda.available(k_cache.device.index)


def runs_products(weights: FrameTensors, k_cache: Tensor) -> bool:
    """Whether the kernels of `lm_products` know every product of the frame and its device, and the other CUDA C++ kernels run too."""
    depth = weights.depth
    if depth is None or depth.project is not None or not runs_cuda(weights, k_cache):
        return False
    layers = [stack.layers[0] for stack in weights.stacks]
    matrices = [weights.head, depth.heads[0], *(matrix for layer in layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down))]
    return all(lm_products.has_product(*matrix.shape) for matrix in matrices) and lm_products.available(k_cache.device.index)


def runs_wide(weights: FrameTensors) -> bool:
    """Whether the kernel of `lm_wide` knows gate and up of all layers, and their device."""
    return all(lm_wide.serves(stack.layers[0].down) for stack in weights.stacks if stack.layers)


def runs_residual(weights: FrameTensors, k_cache: Tensor) -> bool:
    """Whether the kernels of `lm_residual` know O and down of all layers, and their device."""
    if k_cache.dtype != torch.bfloat16 or not k_cache.is_cuda:
        return False
    matrices = [matrix for stack in weights.stacks if stack.layers for matrix in (stack.layers[0].o, stack.layers[0].down)]
    return all(lm_residual.has_product(*matrix.shape) for matrix in matrices) and lm_residual.available(k_cache.device.index)


class FusedFrame:
    """Runs frames of up to `max_rows` slots over fixed weights, state and pages."""

    def __init__(self, weights: FrameTensors, state: StateTensors, k_cache: Tensor, v_cache: Tensor, max_rows: int, plan: Plan) -> None:
        """Raises ValueError for heads that the kernels do not know (`kernels.frame.fused_fault`)."""
        stacks = weights.stacks
        for stack in stacks:
            if (fault := fused_fault(stack)) is not None:
                raise ValueError(fault)
        # Products of other frames are cuBLAS's at every batch, which may clear memory first: no kernel can be launched early behind that.
        self._products = plan.products and runs_products(weights, k_cache)
        self._wide_swiglu = plan.wide_swiglu and runs_wide(weights)
        self._residual = plan.residual_products and runs_residual(weights, k_cache)
        self.plan = replace(plan, pdl=(self._products and k_cache.is_cuda) or (plan.pdl and known_to_cuda(weights)))
        self.weights, self.state = weights, _as_bytes(state)
        self._keys, self._values = k_cache, v_cache
        device, dtype = k_cache.device, k_cache.dtype
        self._orders: dict[int, list[Tensor]] = {}
        self._order: list[Tensor] = []
        self._step = 0
        #: Whether the next norm may start early where the others may not: first in a stack and behind a product of `lm_residual`.
        self._starts_early = False
        self._skinny = runs_cuda(weights, k_cache)

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        self._widths = [stack.hidden for stack in stacks]
        inner = max(layer.gate_up.shape[0] for stack in stacks for layer in stack.layers)
        wide = max((stack.heads + 2 * stack.kv_heads) * stack.head_dim for stack in stacks)
        width, depth = max(self._widths), weights.depth
        rows = max_rows if depth is None else 2 * max_rows
        self._x = [empty(rows, w) for w in self._widths]
        self._h, self._y, self._hidden = empty(rows * width), empty(rows * width), empty(max_rows, self._widths[0])
        self._qkv, self._mixed = empty(rows * wide), empty(rows * wide)
        self._gate_up, self._act = empty(rows * inner), empty(rows * inner)
        if self._products:
            self._weighted = empty(rows * width)
            self._squares = torch.empty(rows * self._parts(width), device=device, dtype=torch.float32)
        codes = max(weights.head.shape[0], 0 if depth is None else depth.heads.shape[1])
        self._logits = empty(max_rows * codes)
        self._finite = torch.empty(max_rows, device=device, dtype=torch.int32)
        if depth is not None:
            span, stack = 1 << depth.heads.shape[0].bit_length(), depth.stack
            self._fast = self._skinny and lm_cuda.has_predictor_attention(stack.heads, stack.kv_heads, span, stack.head_dim)
            self._past = torch.zeros((2, len(stack.layers), max_rows, stack.kv_heads, span, stack.head_dim), device=device, dtype=dtype)
        talker = weights.backbone
        self._tile = attention_tile(talker.heads // talker.kv_heads, k_cache.shape[3])
        self._splits = plan.splits or self._tile.splits
        most = max(splits for _, splits in self._splits)
        self._scratch = SplitScratch(max_rows * talker.kv_heads, most, talker.heads // talker.kv_heads, talker.head_dim, device)

    def run(self, rows: Tensor, codes: Tensor, flags: Tensor) -> None:
        """One frame of the slots `rows` int64 [n] into codes int64 [n, codebooks] and flags uint8 [n]; updates the state."""
        n = rows.shape[0]
        self._step, self._order = 0, self._orders.setdefault(n, [])
        backbone, x = self.weights.backbone, self._x[0][:n]
        self._backbone(rows, x)
        self._draws(self._head(backbone, x, self.weights.head, self._hidden[:n]), rows, codes, flags)

    def draw(self, hidden: Tensor, rows: Tensor, codes: Tensor, flags: Tensor) -> None:
        """`run` behind a backbone that runs elsewhere; hidden: [n, hidden], its states after the final norm."""
        n, head = rows.shape[0], self.weights.head
        self._step, self._order = 0, self._orders.setdefault(n, [])
        kept = self._hidden[:n].copy_(hidden)
        self._draws(torch.mm(kept, head.t(), out=self._logits[: n * len(head)].view(n, -1)), rows, codes, flags)

    def _draws(self, logits: Tensor, rows: Tensor, codes: Tensor, flags: Tensor) -> None:
        """All codes of a frame, from the logits of code 0 and the state in `_hidden`."""
        n, depth = rows.shape[0], self.weights.depth
        if depth is None:
            self._draw(ONLY, 0, logits, rows, codes, flags)
            return
        if depth.project is not None:
            self._project(*depth.project, self._hidden[:n], self._x[1][:n])
        self._draw(FIRST, 0, logits, rows, codes, flags)
        self._behind(depth, rows, codes, flags)

    def _backbone(self, rows: Tensor, x: Tensor) -> None:
        """The state of the backbone's step into x [n, width], before the last norm."""
        torch.index_select(self.state.inputs, 0, rows, out=x)
        self._stack(self.weights.backbone, x, lambda layer, qkv, out: self._attend(layer, qkv, rows, out))

    def _behind(self, depth: DepthTensors, rows: Tensor, codes: Tensor, flags: Tensor) -> None:
        """The codebooks behind code 0, one after the other."""
        n, x, stack, behind = rows.shape[0], self._x[1], depth.stack, len(depth.heads)
        for step in range(behind):
            first = step == 0
            position = 0 if first else step + 1

            def attend(layer: int, qkv: Tensor, out: Tensor, position: int = position) -> None:
                keys, values = self._past[0, layer, :n], self._past[1, layer, :n]
                q_norm, k_norm = stack.layers[layer].q_norm, stack.layers[layer].k_norm
                if self._fast and position:
                    assert q_norm is not None and k_norm is not None  # noqa: PT018
                    lm_cuda.predictor_attention(
                        qkv, q_norm, k_norm, stack.eps, stack.rope_table, keys, values, position, stack.scale, out, self.plan.pdl
                    )
                    return
                predictor_attention(
                    qkv, q_norm, k_norm, stack.eps, stack.rope_table, keys, values, position, stack.scale, out, pdl=self.plan.pdl,
                    wide_rope=stack.wide_rope,
                )  # fmt: skip

            self._stack(stack, x[: 2 * n] if first else x[:n], attend, keep=n if first else 0)
            logits = self._head(stack, x[n : 2 * n] if first else x[:n], depth.heads[step])
            self._draw(LAST if step == behind - 1 else MIDDLE, step + 1, logits, rows, codes, flags)

    def _narrow(self, rows: int) -> bool:
        return self._skinny and not self._products and rows <= self.plan.skinny_rows

    def _ahead(self, weight: Tensor) -> Tensor | None:
        """The weight that comes `plan.ahead` skinny products later; the order is learnt in the first run of a row count."""
        at, self._step = self._step, self._step + 1
        if at == len(self._order):
            self._order.append(weight)
        return self._order[(at + self.plan.ahead) % len(self._order)] if self.plan.ahead else None

    def _stack(self, stack: StackTensors, x: Tensor, attend, keep: int = 0) -> None:
        """All layers in place on x [rows, width]; the last layer's output is only made for the rows from `keep` on."""
        if self._products:
            self._wide_stack(stack, x, attend, keep)
            return
        pending: Tensor | None = None
        self._starts_early = self._residual
        for index, layer in enumerate(stack.layers):
            o, down = layer.o, layer.down
            rows = len(x)
            qkv = self._qkv[: rows * layer.qkv.shape[0]].view(rows, -1)
            mixed = self._mixed[: rows * o.shape[1]].view(rows, -1)
            narrow = self._narrow(rows)
            if narrow:
                self._thin_normed(x, layer.qkv, qkv, layer.input_norm, stack.eps)
            else:
                self._normed_qkv(x, pending, layer, stack.eps, qkv)
            attend(index, qkv, mixed)
            if keep and index == len(stack.layers) - 1:
                x, mixed, rows = x[keep:], mixed[keep:], rows - keep
            act = self._act[: rows * down.shape[1]].view(rows, -1)
            if narrow:
                self._thin(mixed, o, x, epilogue=lm_cuda.RESIDUAL, extra=x)
                self._thin_normed(x, layer.gate_up, act, layer.post_norm, stack.eps, epilogue=lm_cuda.SWIGLU)
                self._thin(act, down, x, epilogue=lm_cuda.RESIDUAL, extra=x)
                continue
            pending = self._added(x, mixed, o)
            self._normed_swiglu(x, pending, layer, stack.eps, act)
            pending = self._added(x, act, down)
        self._pending = pending

    def _added(self, x: Tensor, a: Tensor, weight: Tensor) -> Tensor | None:
        """Adds a @ weight.T to x, or returns it, for the norm behind to add."""
        splits, self._starts_early, (n, inner) = None, False, weight.shape
        if self._residual:
            splits = lm_residual.splits_for(len(x), n, inner, lm_residual.clusters_of(x.device.index or 0))
        if splits is None:
            return torch.mm(a, weight.t(), out=self._y[: x.numel()].view_as(x))
        lm_residual.add_product(x, a, weight, splits, pdl=x.is_cuda)
        self._starts_early = True
        return None

    def _pdl(self, x: Tensor) -> bool:
        """Whether a norm of x may start early: everywhere, or first and behind products of `lm_residual`."""
        return self.plan.pdl or (self._starts_early and x.is_cuda)

    def _normed_qkv(self, x: Tensor, pending: Tensor | None, layer: Layer, eps: float, qkv: Tensor) -> None:
        normed = add_norm(x, pending, layer.input_norm, eps, self._h[: x.numel()].view_as(x), pdl=self._pdl(x))
        if layer.qkv_bias is None:
            torch.mm(normed, layer.qkv.t(), out=qkv)
        else:
            torch.addmm(layer.qkv_bias, normed, layer.qkv.t(), out=qkv)

    def _normed_swiglu(self, x: Tensor, pending: Tensor | None, layer: Layer, eps: float, act: Tensor) -> None:
        normed = self._h[: x.numel()].view_as(x)
        wide = self._wide_swiglu and lm_wide.fills(len(act), act.shape[1], lm_wide.processors(x.device.index or 0))
        add_norm(x, pending, layer.post_norm, eps, normed, pdl=self._pdl(x), early=wide and x.is_cuda)
        if wide:
            lm_wide.swiglu(normed, layer.gate_up, act, pdl=True)
            return
        both = self._gate_up[: len(x) * layer.gate_up.shape[0]].view(len(x), -1)
        swiglu(torch.mm(normed, layer.gate_up.t(), out=both), act, pdl=self.plan.pdl)

    def _wide_stack(self, stack: StackTensors, x: Tensor, attend, keep: int) -> None:
        """The same with products of which all norms but the first are parts: those of `lm_products`."""
        following = [layer.input_norm for layer in stack.layers[1:]]
        input_norm, normed = stack.layers[0].input_norm, self._h[: x.numel()].view_as(x)
        ahead: Tensor | Norm = add_norm(x, None, input_norm, stack.eps, normed, pdl=self.plan.pdl)
        for index, layer in enumerate(stack.layers):
            rows = len(x)
            qkv = self._qkv[: rows * layer.qkv.shape[0]].view(rows, -1)
            mixed = self._mixed[: rows * layer.o.shape[1]].view(rows, -1)
            self._wide(ahead, layer.qkv, qkv)
            attend(index, qkv, mixed)
            if keep and index == len(following):
                x, mixed = x[keep:], mixed[keep:]
            rows, width = x.shape
            act = self._act[: rows * layer.down.shape[1]].view(rows, -1)
            parts = self._parts(width)
            norm = Norm(self._weighted[: x.numel()].view_as(x), self._squares[: rows * parts].view(rows, parts), stack.eps)
            self._wide(mixed, layer.o, x, epilogue=RESIDUAL, extra=x, norm=layer.post_norm, into=norm)
            self._wide(norm, layer.gate_up, act, epilogue=SWIGLU)
            if index < len(following):
                self._wide(act, layer.down, x, epilogue=RESIDUAL, extra=x, norm=following[index], into=norm)
                ahead = norm
            else:
                self._wide(act, layer.down, x, epilogue=RESIDUAL, extra=x)
        self._pending = None

    def _parts(self, width: int) -> int:
        """Sums of squares that a row of this width has between two products."""
        return -(-width // lm_products.PIECE)

    def _head(self, stack: StackTensors, x: Tensor, head: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Logits [rows, codes] of the final norm of x; `hidden` keeps the normed rows."""
        rows, width = x.shape
        logits = self._logits[: rows * head.shape[0]].view(rows, -1)
        if self._pending is None and self._narrow(rows):
            return self._thin(x, head, logits, norm=stack.norm, eps=stack.eps, normed=hidden)
        normed = self._h[: rows * width].view(rows, width) if hidden is None else hidden
        add_norm(x, self._pending, stack.norm, stack.eps, normed, pdl=self._pdl(x))
        if self._products:
            return self._wide(normed, head, logits)
        return torch.mm(normed, head.t(), out=logits)

    def _project(self, weight: Tensor, bias: Tensor, hidden: Tensor, x: Tensor) -> None:
        if self._narrow(hidden.shape[0]):
            self._thin(hidden, weight, x, epilogue=lm_cuda.BIAS, extra=bias)
        else:
            torch.addmm(bias, hidden, weight.t(), out=x)

    def _thin_normed(self, x: Tensor, weight: Tensor, y: Tensor, norm: Tensor, eps: float, epilogue: int = lm_cuda.PLAIN) -> None:
        rows, width = x.shape
        if rows < self.plan.norm_apart_rows or not lm_cuda.has_skinny(width, False, epilogue):
            self._thin(x, weight, y, norm=norm, eps=eps, epilogue=epilogue)
            return
        normed = add_norm(x, None, norm, eps, self._h[: rows * width].view(rows, width), pdl=self.plan.pdl)
        self._thin(normed, weight, y, epilogue=epilogue)

    def _thin(self, x: Tensor, weight: Tensor, y: Tensor, **options) -> Tensor:
        plan = self.plan
        late = len(x) > 16 and "norm" not in options  # measured: it pays where the activations are large
        return lm_cuda.skinny(x, weight, y, ahead=self._ahead(weight), late=late, pdl=plan.pdl, **options)

    def _wide(self, x: Tensor | Norm, weight: Tensor, y: Tensor, **options) -> Tensor:
        return lm_products.product(x, weight, y, lm_products.cut_for(len(y), *weight.shape), pdl=self.plan.pdl, **options)

    def _attend(self, layer: int, qkv: Tensor, rows: Tensor, out: Tensor) -> None:
        stack, state, plan = self.weights.backbone, self.state, self.plan
        tile, splits = self._tile, next(splits for limit, splits in self._splits if len(rows) <= limit)
        decode_attention(
            qkv, stack.layers[layer].q_norm, stack.layers[layer].k_norm, stack.eps, stack.rope_table, self._keys[layer],
            self._values[layer], state.page_table, state.positions, rows, stack.scale, out, self._scratch,
            splits=splits, block=tile.block, warps=tile.warps, stages=tile.stages, pdl=plan.pdl,
            wide_rope=stack.wide_rope,
        )  # fmt: skip

    def _draw(self, stage: int, codebook: int, logits: Tensor, rows: Tensor, codes: Tensor, flags: Tensor) -> None:
        state, n, vocab = self.state, rows.shape[0], logits.shape[1]
        depth, rules, feedback = self.weights.depth, self.weights.draw, self.weights.feedback
        settings = state.first if stage in (FIRST, ONLY) else state.residual
        inputs, starts = (feedback.table, feedback.starts) if depth is None else (depth.inputs, depth.starts)
        text = feedback.table if feedback.text is None else feedback.text
        pointers = (
            logits, rows, codes, self._finite, flags, state.seeds, settings.top_k, state.min_new_tokens, starts, state.trailing,
            state.frames, state.positions, settings.temperature, settings.top_p, state.penalty, settings.greedy, state.seen,
            self._hidden, inputs, feedback.table, text, self._x[-1], state.inputs,
        )  # fmt: skip
        width, hidden = self._widths[-1], self._widths[0]
        numbers = (
            rules.ends[0], rules.suppress_from, state.dead, n, vocab, codebook, codes.shape[1], width, hidden, state.trailing.shape[1],
            int(depth is not None and depth.project is None),
        )  # fmt: skip
        if self._skinny and self.plan.cuda_draw and lm_cuda.has_draw(vocab, width, hidden):
            lm_cuda.draw(pointers, numbers, stage, self.plan.pdl)
        else:
            draw(pointers, numbers, stage, self.plan.pdl, rules, feedback, state.recent)


def _as_bytes(state: StateTensors) -> StateTensors:
    """The state as kernels read it: truth values are bytes."""

    def draws(settings: DrawTensors) -> DrawTensors:
        return replace(settings, greedy=settings.greedy.view(torch.uint8))

    return replace(state, seen=state.seen.view(torch.uint8), first=draws(state.first), residual=draws(state.residual))


def plan_for(rows: int, hidden: int = 1024) -> Plan:
    """The plan for frames of `rows` rows of a talker of width `hidden`."""
    if rows <= 16:
        return Plan(skinny_rows=64)
    if rows <= 32 and hidden <= 1024:
        return Plan(skinny_rows=64, norm_apart_rows=1, ahead=2, products=True)
    residual = 64 < rows <= lm_residual.MANY
    return Plan(skinny_rows=0, pdl=False, products=rows <= 64, wide_swiglu=rows > lm_wide.FEW, residual_products=residual)
