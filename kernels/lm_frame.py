"""A whole frame in few launches: the backbone's step, code 0, the other codebooks, the next input.

It computes `backbone_step` and `draw_frame` of `kernels.reference` and rounds at the same places. A `Plan` chooses the kernels for a number of
rows. For few rows (`Plan.skinny`) a frame takes as long as reading the weights, so each of five launches per layer
already reads its weights while the previous one runs. For more rows, norms are separate launches between cuBLAS's
products, or parts of the products of `Plan.products`. A run allocates nothing and reads nothing from the device on
the host, so it can be captured as a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import lm_cuda, lm_products
from kernels.cuda_driver import Source, available, index_of, processors
from kernels.frame import (
    DepthTensors,
    DrawTensors,
    FrameTensors,
    Layer,
    StackTensors,
    StateTensors,
    fused_fault,
)
from kernels.lm_attention import SplitScratch, attention_tile, decode_attention, predictor_attention
from kernels.lm_cuda import (
    BIAS,
    FIRST,
    LAST,
    MIDDLE,
    ONLY,
    PLAIN,
    RESIDUAL,
    SWIGLU,
    known_to_cuda,
)
from kernels.lm_persistent import PredictorRun, Talker, TalkerRun
from kernels.lm_products import Norm
from kernels.lm_sampler import draw
from kernels.lm_triton import add_norm, swiglu


class Plan(NamedTuple):
    """The choice of kernels for frames with a given number of rows. It affects the time of a frame, and the results
    only by rounding."""

    #: `lm_cuda.skinny` computes all products, on a GPU and for weights that it supports, unless `products`
    #: applies.
    skinny: bool = True
    #: As `AttentionTile.splits`; None: the splits of the attention's tile.
    splits: tuple[tuple[int, int], ...] | None = None
    #: Whether kernels start early (programmatic dependent launch).
    pdl: bool = True
    #: `lm_products.product` computes all products, with PDL, on a GPU and for weights that it supports.
    products: bool = False
    #: `lm_products.swiglu` replaces cuBLAS if its tiles fill the GPU (`lm_products.fills`), for weights that it
    #: supports.
    wide_swiglu: bool = False
    #: `lm_products.add_product` replaces cuBLAS for o and down if all its tiles run at once
    #: (`lm_products.splits_for`), for weights that it supports.
    residual_products: bool = False


def runs_cuda(weights: FrameTensors, k_cache: Tensor) -> bool:
    """Whether frames of these weights use the CUDA C++ kernels of `kernels.lm_cuda`: products for few rows, the
    depth's attention, and draws."""
    if not known_to_cuda(weights):
        return False
    shapes = list[tuple[int, bool, int]]()
    for stack in weights.stacks:
        normed = [(stack.hidden, True, epilogue) for epilogue in (PLAIN, SWIGLU)]
        shapes += normed + [(matrix.shape[1], False, RESIDUAL) for matrix in _added_matrices(stack)]
    if weights.depth is not None and weights.depth.project is not None:
        shapes.append((weights.depth.project[0].shape[1], False, BIAS))
    return all(shape in lm_cuda.TILE_CONFIGS for shape in shapes) and _have(k_cache, *lm_cuda.SOURCES)


def runs_products(weights: FrameTensors, k_cache: Tensor) -> bool:
    """Whether `lm_products.product` supports every product of the frame and the device, and `runs_cuda` is true."""
    depth = weights.depth
    if depth is None or depth.project is not None or not runs_cuda(weights, k_cache):
        return False
    matrices = [weights.head, depth.heads[0]]
    for stack in weights.stacks:
        matrices += [stack.layers[0].qkv, stack.layers[0].gate_up, *_added_matrices(stack)]
    known = all((*matrix.shape,) in lm_products.TILE_CONFIGS for matrix in matrices)
    return known and _have(k_cache, lm_products.PRODUCTS)


def runs_swiglu(weights: FrameTensors) -> bool:
    """Whether `lm_products.swiglu` supports the gate and up matrices of all layers, and their device."""
    return all(lm_products.supports_swiglu(stack.layers[0].down) for stack in weights.stacks if stack.layers)


def runs_residual(weights: FrameTensors, k_cache: Tensor) -> bool:
    """Whether `lm_products.add_product` supports the o and down matrices of all layers, and their device."""
    matrices = [matrix for stack in weights.stacks for matrix in _added_matrices(stack)]
    known = all(lm_products.has_residual(*matrix.shape) for matrix in matrices)
    return known and _have(k_cache, lm_products.RESIDUAL_PRODUCTS)


def _added_matrices(stack: StackTensors) -> list[Tensor]:
    """The o and down matrices of the first layer, whose shapes all layers share. Their products are added to the
    layer's input."""
    return [matrix for layer in stack.layers[:1] for matrix in (layer.o, layer.down)]


def _have(cache: Tensor, *sources: Source) -> bool:
    on_gpu = cache.dtype == torch.bfloat16 and cache.is_cuda
    return on_gpu and available(index_of(cache.device.index), *sources)


#: Computes the attention of a layer. Arguments: the layer's number, the packed projections, and the output.
Attend = Callable[[int, Tensor, Tensor], None]


class FusedFrame:
    """Runs frames of up to `max_rows` slots over fixed weights, state and pages."""

    def __init__(
        self,
        weights: FrameTensors,
        state: StateTensors,
        k_cache: Tensor,
        v_cache: Tensor,
        max_rows: int,
        plan: Plan,
    ) -> None:
        """Raises ValueError for heads that the kernels do not support (`kernels.frame.fused_fault`)."""
        stacks = weights.stacks
        for stack in stacks:
            if (fault := fused_fault(stack.heads, stack.kv_heads, stack.head_dim)) is not None:
                raise ValueError(fault)
        # If a frame's products are cuBLAS's, no kernel starts early: cuBLAS may clear memory before a product, and a
        # kernel cannot be launched early after that.
        self._products = plan.products and runs_products(weights, k_cache)
        self._wide_swiglu = plan.wide_swiglu and runs_swiglu(weights)
        self._residual = plan.residual_products and runs_residual(weights, k_cache)
        self.plan = plan._replace(
            pdl=(self._products and k_cache.is_cuda) or (plan.pdl and known_to_cuda(weights))
        )
        self.weights = weights
        self.state = _as_bytes(state)
        self._keys = k_cache
        self._values = v_cache
        device = k_cache.device
        dtype = k_cache.dtype
        #: A product that the next norm adds to the state first.
        self._pending: Tensor | None = None
        #: The norm that the last product computed, if it did.
        self._normed: Norm | None = None
        #: Whether the next norm may start early although other kernels may not: if it is the first kernel of a stack, or
        #: if it follows `lm_products.add_product`.
        self._starts_early = False
        self._cuda = runs_cuda(weights, k_cache)
        self._skinny = self._cuda and plan.skinny and not self._products

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device=device, dtype=dtype)

        self._widths = [stack.hidden for stack in stacks]
        inner = max((len(layer.gate_up) for stack in stacks for layer in stack.layers), default=0)
        wide = max((stack.heads + 2 * stack.kv_heads) * stack.head_dim for stack in stacks)
        width = max(self._widths)
        depth = weights.depth
        rows = max_rows if depth is None else 2 * max_rows
        self._x = [empty(rows, w) for w in self._widths]
        self.hidden = empty(max_rows, self._widths[0])
        self._h, self._y, self._qkv, self._mixed, self._gate_up, self._act = (
            empty(rows * each) for each in (width, width, wide, wide, inner, inner)
        )
        if self._products:
            self._weighted = empty(rows * width)
            self._squares = torch.empty(rows * width // lm_products.PIECE, device=device, dtype=torch.float32)
        codes = max(weights.head.shape[0], 0 if depth is None else depth.heads.shape[1])
        self.logits = empty(max_rows * codes)
        self._finite = torch.empty(max_rows, device=device, dtype=torch.int32)
        #: float32 [max_rows or more]: receives those of the drawn codes 0 (`kernels.sampler.log_probability`).
        self.log_probabilities = torch.empty(max_rows, device=device)
        if depth is not None:
            span = 1 << depth.heads.shape[0].bit_length()
            stack = depth.stack
            self._fast = self._cuda and lm_cuda.has_predictor_attention(
                stack.heads, stack.kv_heads, span, stack.head_dim
            )
            self._past = torch.zeros(
                (2, len(stack.layers), max_rows, stack.kv_heads, span, stack.head_dim),
                device=device,
                dtype=dtype,
            )
        talker = weights.backbone
        self._tile = attention_tile(talker.heads // talker.kv_heads, k_cache.shape[3])
        self._splits = plan.splits or self._tile.splits
        max_splits = max(splits for _, splits in self._splits)
        self._scratch = SplitScratch(
            max_rows * talker.kv_heads, max_splits, talker.heads // talker.kv_heads, talker.head_dim, device
        )

    def run(self, rows: Tensor, codes: Tensor, flags: Tensor) -> None:
        """Computes one frame of the slots `rows` int64 [n], writes codes int64 [n, codebooks] and flags uint8 [n], and
        updates the state."""
        n = rows.shape[0]
        backbone = self.weights.backbone
        x = self._x[0][:n]
        self._backbone(rows, x)
        self._draws(self._head(backbone, x, self.weights.head, self.hidden[:n]), rows, codes, flags)

    def draw(self, hidden: Tensor, rows: Tensor, codes: Tensor, flags: Tensor) -> None:
        """The part of `run` after the backbone, if that runs elsewhere. hidden: [n, hidden], the backbone's states after
        the final norm."""
        n = rows.shape[0]
        head = self.weights.head
        kept = self.hidden[:n].copy_(hidden)
        self._draws(torch.mm(kept, head.t(), out=_rows(self.logits, n, len(head))), rows, codes, flags)

    def _draws(self, logits: Tensor, rows: Tensor, codes: Tensor, flags: Tensor) -> None:
        """Draws all codes of a frame, from the logits of code 0 and the state in `hidden`."""
        n = rows.shape[0]
        depth = self.weights.depth
        if depth is None:
            self.draw_codebook(ONLY, 0, logits, rows, codes, flags)
            return
        if depth.project is not None:
            weight, bias = depth.project
            if self._skinny:
                self._thin(self.hidden[:n], weight, self._x[1][:n], epilogue=BIAS, extra=bias)
            else:
                torch.addmm(bias, self.hidden[:n], weight.t(), out=self._x[1][:n])
        self.draw_codebook(FIRST, 0, logits, rows, codes, flags)
        self._later_codebooks(depth, rows, codes, flags)

    def _backbone(self, rows: Tensor, x: Tensor) -> None:
        """Runs the backbone's step, and writes its state before the final norm into x [n, width]."""
        torch.index_select(self.state.inputs, 0, rows, out=x)
        self._stack(self.weights.backbone, x, lambda layer, qkv, out: self._attend(layer, qkv, rows, out))

    def _later_codebooks(self, depth: DepthTensors, rows: Tensor, codes: Tensor, flags: Tensor) -> None:
        """Draws the codebooks after code 0, one after the other."""
        n = rows.shape[0]
        x = self._x[1]
        stack = depth.stack
        count = len(depth.heads)
        for step in range(count):
            first = step == 0
            position = step + 1 if step else 0

            def attend(layer: int, qkv: Tensor, out: Tensor, position: int = position) -> None:
                kernel = lm_cuda.predictor_attention if self._fast and position else predictor_attention
                keys, values = self._past[:, layer, :n]
                kernel(qkv, stack.layers[layer], stack, keys, values, position, out, pdl=self.plan.pdl)

            self._stack(stack, x[: 2 * n] if first else x[:n], attend, keep=n if first else 0)
            logits = self._head(stack, x[n : 2 * n] if first else x[:n], depth.heads[step])
            self.draw_codebook(LAST if step == count - 1 else MIDDLE, step + 1, logits, rows, codes, flags)

    def _stack(self, stack: StackTensors, x: Tensor, attend: Attend, keep: int = 0) -> None:
        """Runs all layers in place on x [rows, width]. The last layer's output is computed only for the rows from
        `keep`."""
        self._pending = None
        self._normed = None
        self._starts_early = self._residual
        for index, (layer, following) in enumerate(zip(stack.layers, [*stack.layers[1:], None])):
            qkv = _rows(self._qkv, len(x), len(layer.qkv))
            mixed = _rows(self._mixed, len(x), layer.o.shape[1])
            if self._skinny:
                self._thin(x, layer.qkv, qkv, norm=layer.input_norm, eps=stack.eps)
            elif self._products:
                self._wide(self._normed or self._added_norm(x, layer.input_norm, stack.eps), layer.qkv, qkv)
            else:
                normed = self._added_norm(x, layer.input_norm, stack.eps)
                weight = layer.qkv.t()
                if layer.qkv_bias is None:
                    torch.mm(normed, weight, out=qkv)
                else:
                    torch.addmm(layer.qkv_bias, normed, weight, out=qkv)
            attend(index, qkv, mixed)
            if keep and following is None:
                x = x[keep:]
                mixed = mixed[keep:]
            self._after_attention(stack, layer, following, x, mixed)

    def _after_attention(
        self, stack: StackTensors, layer: Layer, following: Layer | None, x: Tensor, mixed: Tensor
    ) -> None:
        """Runs the part of a layer after attention. A product that is not yet added to x is `_pending`."""
        act = _rows(self._act, len(x), stack.inner)
        eps = stack.eps
        if self._skinny:
            self._thin(mixed, layer.o, x, epilogue=RESIDUAL, extra=x)
            self._thin(x, layer.gate_up, act, norm=layer.post_norm, eps=eps, epilogue=SWIGLU)
            self._thin(act, layer.down, x, epilogue=RESIDUAL, extra=x)
        elif self._products:
            parts = _rows(self._squares, len(x), stack.hidden // lm_products.PIECE)
            norm = Norm(_rows(self._weighted, *x.shape), parts, eps)
            self._wide(mixed, layer.o, x, epilogue=RESIDUAL, extra=x, norm=layer.post_norm, into=norm)
            self._wide(norm, layer.gate_up, act, epilogue=SWIGLU)
            next_norm = {} if following is None else {"norm": following.input_norm, "into": norm}
            self._wide(act, layer.down, x, epilogue=RESIDUAL, extra=x, **next_norm)
            self._normed = None if following is None else norm
        else:
            self._pending = self._added(x, mixed, layer.o)
            self._normed_swiglu(x, layer, eps, act)
            self._pending = self._added(x, act, layer.down)

    def _added(self, x: Tensor, a: Tensor, weight: Tensor) -> Tensor | None:
        """Adds a @ weight.T to x, or returns the product, which the next norm adds."""
        splits = None
        self._starts_early = False
        n, inner = weight.shape
        if self._residual:
            splits = lm_products.splits_for(len(x), n, inner, lm_products.clusters_of(x.device.index or 0))
        if splits is None:
            return torch.mm(a, weight.t(), out=_rows(self._y, *x.shape))
        lm_products.add_product(x, a, weight, splits, pdl=x.is_cuda)
        self._starts_early = True
        return None

    def _added_norm(
        self, x: Tensor, weight: Tensor, eps: float, into: Tensor | None = None, early: bool = False
    ) -> Tensor:
        """Adds the pending product to x, if there is one, and returns the norm of x."""
        pdl = self.plan.pdl or (self._starts_early and x.is_cuda)
        return add_norm(
            x,
            self._pending,
            weight,
            eps,
            _rows(self._h, *x.shape) if into is None else into,
            pdl=pdl,
            early=early,
        )

    def _normed_swiglu(self, x: Tensor, layer: Layer, eps: float, act: Tensor) -> None:
        wide = self._wide_swiglu and lm_products.fills(
            len(act), act.shape[1], processors(x.device.index or 0)
        )
        normed = self._added_norm(x, layer.post_norm, eps, early=wide and x.is_cuda)
        if wide:
            lm_products.swiglu(normed, layer.gate_up, act, pdl=True)
        else:
            both = torch.mm(normed, layer.gate_up.t(), out=_rows(self._gate_up, len(x), len(layer.gate_up)))
            swiglu(both, act, pdl=self.plan.pdl)

    def _head(self, stack: StackTensors, x: Tensor, head: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Logits [rows, codes] from the final norm of x, which is also written into `hidden` if that is given."""
        logits = _rows(self.logits, len(x), len(head))
        if self._pending is None and self._skinny:
            return self._thin(x, head, logits, norm=stack.norm, eps=stack.eps, normed=hidden)
        normed = self._added_norm(x, stack.norm, stack.eps, hidden)
        return self._wide(normed, head, logits) if self._products else torch.mm(normed, head.t(), out=logits)

    def _thin(self, x: Tensor, weight: Tensor, y: Tensor, **options) -> Tensor:
        late = len(x) > 16 and "norm" not in options  # faster in measurements if there are many activations
        return lm_cuda.skinny(x, weight, y, late=late, pdl=self.plan.pdl, **options)

    def _wide(self, x: Tensor | Norm, weight: Tensor, y: Tensor, **options) -> Tensor:
        return lm_products.product(
            x, weight, y, lm_products.tile_config(len(y), *weight.shape), pdl=self.plan.pdl, **options
        )

    def _attend(self, layer: int, qkv: Tensor, rows: Tensor, out: Tensor) -> None:
        stack = self.weights.backbone
        state = self.state
        splits = next(splits for limit, splits in self._splits if len(rows) <= limit)
        decode_attention(
            qkv, stack.layers[layer], stack, self._keys[layer], self._values[layer], state.page_table, state.positions, rows, out,
            self._scratch, self._tile, splits, self.plan.pdl,
        )  # fmt: skip

    def draw_codebook(
        self, stage: int, codebook: int, logits: Tensor, rows: Tensor, codes: Tensor, flags: Tensor
    ) -> None:
        state = self.state
        n = rows.shape[0]
        vocab = logits.shape[1]
        depth = self.weights.depth
        rules = self.weights.draw
        feedback = self.weights.feedback
        settings = state.first if stage in (FIRST, ONLY) else state.residual
        inputs, starts = (feedback.table, feedback.starts) if depth is None else (depth.inputs, depth.starts)
        text = feedback.table if feedback.text is None else feedback.text
        pointers = (
            logits, rows, codes, self._finite, flags, state.seeds, settings.top_k, state.min_new_tokens, starts, state.trailing,
            state.frames, state.positions, settings.temperature, settings.top_p, state.penalty, settings.greedy, state.seen,
            self.hidden, inputs, feedback.table, text, self._x[-1], state.inputs, self.log_probabilities,
        )  # fmt: skip
        width = self._widths[-1]
        hidden = self._widths[0]
        numbers = (
            rules.ends[0], rules.suppress_from, state.dead, n, vocab, codebook, codes.shape[1], width, hidden, state.trailing.shape[1],
            int(depth is not None and depth.project is None),
        )  # fmt: skip
        if self._cuda and lm_cuda.has_draw(vocab, width, hidden):
            lm_cuda.draw(pointers, numbers, stage, self.plan.pdl)
        else:
            draw(pointers, numbers, stage, self.plan.pdl, rules, feedback, state.recent)


class PersistentFrame(FusedFrame):
    """A frame for a fixed number of rows, in which a persistent kernel computes the codebooks after code 0, and another
    one the talker's layers if `talker` is given."""

    def __init__(
        self,
        predictor_run: PredictorRun,
        state: StateTensors,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: Plan,
        talker: Talker | None,
    ) -> None:
        # No kernel is launched early after a cooperative one.
        plan = plan if talker is None else plan._replace(pdl=False)
        super().__init__(predictor_run.predictor.frame, state, k_cache, v_cache, predictor_run.rows, plan)
        self.predictor_run = predictor_run
        self.talker = None if talker is None else TalkerRun(talker, predictor_run)

    def _backbone(self, rows: Tensor, x: Tensor) -> None:
        if self.talker is None:
            super()._backbone(rows, x)
        else:
            self.talker.launch(x, rows, self.state, self._keys, self._values)
            self._pending = None

    def _later_codebooks(self, depth: DepthTensors, rows: Tensor, codes: Tensor, flags: Tensor) -> None:
        self.predictor_run.launch(self._x[1], rows, codes, self._finite, flags, self.state)


def _rows(buffer: Tensor, rows: int, width: int) -> Tensor:
    """The beginning of a buffer as [rows, width]."""
    return buffer[: rows * width].view(rows, width)


def _as_bytes(state: StateTensors) -> StateTensors:
    """The state as kernels read it, with bool tensors as bytes."""

    def draws(settings: DrawTensors) -> DrawTensors:
        return settings._replace(greedy=settings.greedy.view(torch.uint8))

    return state._replace(
        seen=state.seen.view(torch.uint8), first=draws(state.first), residual=draws(state.residual)
    )


def plan_for(rows: int, hidden: int = 1024) -> Plan:
    """The plan for frames with `rows` rows of a talker (backbone) with width `hidden`."""
    if rows <= 16 or (rows <= 32 and hidden <= 1024):
        return Plan(products=rows > 16)
    return Plan(
        skinny=False,
        pdl=False,
        products=rows <= 64,
        wide_swiglu=rows > lm_products.MAX_CUBLAS_ROWS,
        residual_products=64 < rows <= lm_products.MAX_RESIDUAL_ROWS,
    )
