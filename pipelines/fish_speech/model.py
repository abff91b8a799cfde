"""The dual AR of Fish Speech S2: reads the slow and the fast AR by their published names, and runs them on either
engine: the tensors of a frame, sizes and prefixes of the engine `native`, the specification and prefix salts for
vLLM."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.frame import DepthTensors, DrawRules, Feedback, FrameTensors, Layer, StackTensors
from kernels.reference import next_inputs
from kernels.registry import to_device
from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine, NativeHost
from pipelines.engine.executor import FrameModel
from pipelines.engine.opening import MemoryNeeds, NativeModelOptions, check_executor
from pipelines.engine.scheduler import PromptPrefix
from pipelines.engine.state import LARGEST_PAGE
from pipelines.fish_speech.config import CODEC_WEIGHTS, CodecStackConfig, DualArStack, FishConfig
from pipelines.fish_speech.prompt import columns, is_speech
from pipelines.nn.checkpoint import Checkpoint, Loader, StackWeights, TensorSource
from pipelines.tokens import TokenPrompt
from pipelines.vllm_engine.library import PRIVATE, SALTS, ModelSpec

SLOW = "text_model.model."
FAST = "audio_decoder."
#: Kernels need a head whose number of rows is a multiple of this.
_ROW_STEP = 64
#: Number of last frames whose codes repetition-aware sampling avoids.
_WINDOW = 10


def halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows [heads * head_dim, ...] with each head's even rows before its odd ones.

    The published model rotates neighbouring values of a head; kernels rotate its two halves.
    """
    return tensor.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(tensor.shape)


class FastWeights(NamedTuple):
    """The fast AR, and its tables."""

    stack: StackWeights
    #: [codes, fast dim] each: the embeddings of its inputs, and its head.
    inputs: Tensor
    output: Tensor
    #: [codebooks * codes, dim]: the embeddings of a frame's codes, which are added to the slow AR's input.
    codebooks: Tensor
    #: Weight [fast dim, dim] and bias; None if it has the width of the slow AR.
    project: tuple[Tensor, Tensor] | None


class LmWeights(NamedTuple):
    """Both transformers. embeddings: [vocabulary, dim], of all ids; the head has the same weights."""

    slow: StackWeights
    embeddings: Tensor
    fast: FastWeights


def take_layers(load: Loader, stack: DualArStack | CodecStackConfig) -> Iterator[Layer]:
    """The layers of a transformer of the LM or of the codec, one at a time, with queries and keys in half-split
    layout. Raises as the loader."""
    dim = stack.hidden
    inner = stack.intermediate
    head_dim = stack.head_dim
    for index in range(stack.layers):
        layer = load.at(f"layers.{index}.")
        widths = {"q": stack.q_width, "k": stack.kv_width, "v": stack.kv_width}
        if f"{layer.prefix}attention.wq.weight" in load.source:
            query, key, value = (
                layer(f"attention.w{part}.weight", width, dim) for part, width in widths.items()
            )
        else:
            whole = layer("attention.wqkv.weight", sum(widths.values()), dim)
            query, key, value = whole.split(list(widths.values()))
        norms = [
            halves(layer(f"attention.{part}_norm.weight", head_dim), head_dim) if stack.qk_norm else None
            for part in "qk"
        ]
        yield Layer(
            input_norm=layer("attention_norm.weight", dim),
            qkv=torch.cat([halves(query, head_dim), halves(key, head_dim), value]),
            o=layer("attention.wo.weight", dim, stack.q_width),
            post_norm=layer("ffn_norm.weight", dim),
            gate_up=torch.cat([layer(f"feed_forward.{name}.weight", inner, dim) for name in ("w1", "w3")]),
            down=layer("feed_forward.w2.weight", dim, inner),
            q_norm=norms[0],
            k_norm=norms[1],
        )


def take_stack(load: Loader, stack: DualArStack | CodecStackConfig) -> StackWeights:
    """A whole transformer. Raises as the loader."""
    return StackWeights(tuple(take_layers(load, stack)), load("norm.weight", stack.hidden))


def take_fast(load: Loader, config: FishConfig) -> FastWeights:
    """Reads the fast AR. Raises as the loader."""
    load = load.at(FAST)
    slow = config.slow.hidden
    fast = config.fast
    project = None
    if fast.hidden != slow:
        name = "fast_project_in" if f"{FAST}fast_project_in.weight" in load.source else "project_in"
        project = load(f"{name}.weight", fast.hidden, slow), load(f"{name}.bias", fast.hidden)
    return FastWeights(
        take_stack(load, fast),
        load("embeddings.weight", fast.vocab, fast.hidden),
        load("output.weight", fast.vocab, fast.hidden),
        load("codebook_embeddings.weight", fast.vocab * config.codebooks, slow),
        project,
    )


def take_weights(
    source: TensorSource, config: FishConfig, dtype: torch.dtype, device: torch.device
) -> LmWeights:
    """Reads both transformers. Raises `ModelError` (`model.bad_checkpoint`) that names a missing or wrong
    tensor."""
    load = Loader(source, "", dtype, device)
    stack = config.slow
    slow = load.at(SLOW)
    embeddings = slow("embeddings.weight", stack.vocab, stack.hidden)
    return LmWeights(take_stack(slow, stack), embeddings, take_fast(load, config))


def load_weights(config: FishConfig, dtype: torch.dtype, device: torch.device) -> LmWeights:
    """The dual AR of a checkpoint folder; on the device `meta` it is only checked. Raises as `take_weights`,
    and for an unknown tensor."""
    with Checkpoint(config.folder) as checkpoint:
        weights = take_weights(checkpoint, config, dtype, device)
        checkpoint.finish()
    return weights


class FishModel(FrameModel):
    """A Qwen3 whose input at speech positions is the scaled sum of the embeddings of a token and its frame's
    codes."""

    def __init__(self, config: FishConfig, weights: LmWeights, max_context: int) -> None:
        # Prompts are padded to whole pages, and the maximum context may end within a page.
        backbone = weights.slow.tensors(config.slow, max_context + LARGEST_PAGE, wide_rope=True)
        super().__init__(frame_tensors(config, backbone, weights.embeddings[drawn_ids(config)], weights.fast))
        self._semantic = config.semantic
        self._embeddings = weights.embeddings

    def embed(self, prompt: TokenPrompt) -> Tensor:
        """Embeddings [length, dim] of a prompt."""
        ids = np.asarray(prompt.ids, np.int64)
        made = self._embeddings[to_device(ids, self.device)]
        if len(prompt.codes):
            spoken = np.flatnonzero(is_speech(ids, self._semantic))
            places, codes = (to_device(part, self.device) for part in (spoken, prompt.codes))
            made[places] = next_inputs(self.tensors.feedback, codes, codes[:, 0])
        return made


def drawn_ids(config: FishConfig) -> list[int]:
    """The ids of code 0 of a frame: the semantic tokens, then the end."""
    return [*config.semantic, config.end]


def frame_tensors(
    config: FishConfig, backbone: StackTensors, drawn: Tensor, fast: FastWeights
) -> FrameTensors:
    """The tensors of a frame with this backbone. drawn: [ids, dim], the embeddings of `drawn_ids`. Except the
    head and the depth's inputs, they are views of the weights."""
    semantic = len(config.semantic)
    residuals = config.codebooks - 1
    head = functional.pad(drawn, (0, 0, 0, -len(drawn) % _ROW_STEP))
    # If logits are NaN, any row of the head may be drawn before this is detected, so each row of the head has an
    # input.
    inputs = functional.pad(fast.inputs, (0, 0, 0, max(len(head) - len(fast.inputs), 0)))
    codebook = torch.arange(config.codebooks, device=head.device)
    return FrameTensors(
        backbone=backbone,
        head=head,
        draw=DrawRules((semantic,), semantic + 1, nucleus_first=True, window=_WINDOW),
        feedback=Feedback(
            fast.codebooks,
            codebook * config.fast.vocab,
            head,
            text_by_code=True,
            scale=1 / math.sqrt(config.codebooks + 1),
        ),
        depth=DepthTensors(
            fast.stack.tensors(config.fast, config.codebooks, wide_rope=True),
            fast.output.expand(residuals, -1, -1),
            inputs,
            torch.zeros_like(codebook),
            fast.project,
        ),
    )


#: Default maximum positions of a sequence: a dialogue of ten minutes with its references and texts.
_CONTEXT = 16_384
#: vLLM's share of the GPU's memory. The LM has nine billion bytes; the codec needs the rest.
_MEMORY_SHARE = 0.6
#: Memory that the codec's decoder needs for a frame in bfloat16: four tensors of its widest part, 96 channels
#: at every sample. Calculated, not measured.
_DECODED_FRAME_BYTES = 4 * 2 * 96 * 2048
#: Size of a prefix's digest, large enough that different prefixes never have equal ones.
_DIGEST_BYTES = 32
#: Size of the digest of a run of speech, for vLLM's prefix cache.
_SALT_BYTES = 16
#: Key of a request's extras on vLLM: the codes at the semantic positions of its prompt, int16 [positions,
#: codebooks] as bytes.
PROMPT_CODES = "codes"


def plan_sizes(
    config: FishConfig, options: NativeModelOptions, device: torch.device, dtype: torch.dtype
) -> EngineOptions:
    """Sizes of the engine, before anything is loaded. Raises as `check_executor` and
    `NativeModelOptions.plan`."""
    stacks = [config.slow, config.fast]
    check_executor(device, options.executor, options.reproducible, options.page_size, stacks)
    needs = memory_needs(config, dtype, options.page_size)
    return options.plan(
        needs, device, config.slow.max_positions, _CONTEXT, frame_seconds=1 / config.frames_per_second
    )


def memory_needs(config: FishConfig, dtype: torch.dtype, page_size: int) -> MemoryNeeds:
    """The GPU memory that a checkpoint needs."""
    slow = config.slow
    fast = config.fast
    width = dtype.itemsize
    with Checkpoint(config.folder) as checkpoint:
        values = checkpoint.values()
    span = 1 << (config.codebooks - 1).bit_length()
    # A row's keys and values in the fast AR, whose positions are padded to a power of two; the row's other
    # buffers are smaller.
    row = 2 * span * fast.cached_values * width
    # The codec's file is in float32, and its encoder stays in float32. The head is a copy of rows of the
    # embeddings.
    weights = (
        values * width
        + (config.folder / CODEC_WEIGHTS).stat().st_size
        + (len(config.semantic) + 64) * slow.hidden * width
    )
    return MemoryNeeds(
        weights=weights,
        # In the graphs of all buckets, which have up to three rows for a slot: logits in float32, and the
        # widest state of a layer.
        slot=3
        * (
            row
            + 4
            * (
                len(config.semantic)
                + config.codebooks * fast.vocab
                + 2 * max(slow.intermediate, fast.intermediate)
            )
        ),
        page=page_size * slow.cached_values * width,
        decoded_frame=_DECODED_FRAME_BYTES,
    )


def native_host(config: FishConfig, engine: Engine) -> NativeHost:
    """The host of this model's sequences on the native engine."""
    ids = np.array(drawn_ids(config), np.int64)
    return NativeHost(engine, ids, partial(shared_prefixes, semantic=config.semantic), config.codebooks)


def shared_prefixes(prompt: TokenPrompt, semantic: range) -> Sequence[PromptPrefix]:
    """The prefixes of a prompt that other prompts can share: its voice, and the dialogue up to each turn.
    Digests of ids and codes identify them."""
    # One row for each position, so that the bytes of a prefix do not depend on its shorter prefixes.
    rows = np.ascontiguousarray(columns(prompt, semantic).T)
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    start = 0
    prefixes = list[PromptPrefix]()
    for end in prompt.shared:
        hasher.update(rows[start:end].tobytes())
        prefixes.append(PromptPrefix(hasher.copy().digest(), end))
        start = end
    return prefixes


def model_spec(config: FishConfig, share_prefixes: bool | None = None, **engine: Any) -> ModelSpec:
    """The model's specification for vLLM, with further arguments of its engine."""
    return ModelSpec(
        config.folder,
        qwen3_config(config),
        "FishForCausalLM",
        codes_per_step=1 + config.codebooks,
        share_prefixes=share_prefixes,
        memory_share=_MEMORY_SHARE,
        context=_CONTEXT,
        max_positions=config.slow.max_positions,
        engine=engine,
        prompt_extra=partial(as_extra, semantic=config.semantic),
    )


def qwen3_config(config: FishConfig) -> dict[str, Any]:
    """The slow AR's config with the keys of transformers."""
    slow = config.slow
    return {
        "vocab_size": slow.vocab,
        "hidden_size": slow.hidden,
        "intermediate_size": slow.intermediate,
        "num_hidden_layers": slow.layers,
        "num_attention_heads": slow.heads,
        "num_key_value_heads": slow.kv_heads,
        "head_dim": slow.head_dim,
        "max_position_embeddings": slow.max_positions,
        "rms_norm_eps": slow.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": slow.rope_theta},
        "attention_bias": False,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "eos_token_id": config.end,
    }


def as_extra(prompt: TokenPrompt, semantic: range) -> dict[str, Any]:
    """The extras of a request with this prompt: its codes, and digests of those on which the KV depends.

    Each run of speech (the references, an answer) has a digest of its codes, so prompts that begin alike
    share their KV. The KV of drawn frames is private to the request, because different frames may have the
    same ids.
    """
    codes = prompt.codes.astype(np.int16)
    places = np.flatnonzero(is_speech(np.array(prompt.ids), semantic))
    breaks = np.flatnonzero(np.diff(places) > 1) + 1
    runs = zip(np.split(places, breaks), np.split(codes, breaks))
    salts = [
        (int(run[0]), hashlib.blake2b(spoken.tobytes(), digest_size=_SALT_BYTES).digest())
        for run, spoken in runs
        if len(run)
    ]
    return {PROMPT_CODES: codes.tobytes(), SALTS: salts, PRIVATE: True}
