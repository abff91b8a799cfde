"""The 12 Hz codec encoder: reference audio in, codes out. It is the encoding half of Mimi (Kyutai), with strict key accounting."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv1d, elu, gelu, layer_norm, linear, pad, scaled_dot_product_attention

from pipelines.codec.transformer import angles, rotate
from pipelines.errors import ErrorCode, InputError
from pipelines.nn.checkpoint import Loader, TensorSource
from pipelines.qwen3_tts.codec_config import CodecConfig, CodecEncoderConfig

USAGE_FLOOR = 1e-5


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embedding, half-split layout, computed in float32: positions [B, T] -> two of [B, 1, T, head_dim]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    found = angles(positions, theta**-exponents)
    return found.cos().to(dtype), found.sin().to(dtype)


class CodecEncoder:
    """Turns mono audio into codes, `encode_downsample_rate` samples a frame. Runs in float32: a code is a choice, not a quantity."""

    def __init__(self, config: CodecConfig, source: TensorSource, device: torch.device | str = "cpu") -> None:
        self.config = config.encoder
        self.device = torch.device(device)
        self.sample_rate = config.input_sample_rate
        self.samples_per_frame = config.encode_downsample_rate
        self.codebooks = config.encoder_valid_num_quantizers
        sizes = config.encoder
        load = Loader(source, "encoder.", torch.float32, self.device)
        self._stack = _conv_stack(load.at("encoder.layers."), sizes)
        self._layers = [_Layer(load.at(f"encoder_transformer.layers.{i}."), sizes) for i in range(sizes.num_hidden_layers)]
        self._downsample: _Conv | None = None
        if sizes.downsample_kernel:
            width = sizes.hidden_size
            self._downsample = _Conv(load.at("downsample.conv."), width, width, sizes.downsample_kernel, "replicate", stride=2, bias=False)
        split = load.at("quantizer.")
        acoustic = sizes.num_quantizers - sizes.num_semantic_quantizers
        self._semantic = _Quantizer(split.at("semantic_residual_vector_quantizer."), sizes, sizes.num_semantic_quantizers)
        self._acoustic = _Quantizer(split.at("acoustic_residual_vector_quantizer."), sizes, acoustic)

    @torch.inference_mode()
    def encode(self, samples: Tensor) -> Tensor:
        """Encodes mono audio at `sample_rate`: samples float32 [n] -> codes int64 [ceil(n / samples_per_frame), codebooks].

        Raises `InputError` (`input.reference_length`) when there are no samples.
        """
        if samples.dim() != 1 or not samples.numel():
            raise InputError(ErrorCode.INPUT_REFERENCE_LENGTH, "The reference audio is empty.", "Give a recording of at least a second.")
        frames = -(-samples.numel() // self.samples_per_frame)
        x = samples.to(self.device, torch.float32)[None, None]
        for step in self._stack:
            x = step(x)
        x = self._transform(x.transpose(1, 2)).transpose(1, 2)
        if self._downsample is not None:
            x = self._downsample(x)
        semantic = min(self.codebooks, self.config.num_semantic_quantizers)
        codes = self._semantic.encode(x, semantic) + self._acoustic.encode(x, self.codebooks - semantic)
        return torch.stack(codes, dim=1)[:frames]

    def _transform(self, x: Tensor) -> Tensor:
        # The reference (transformers 4.57) attends to the whole past: it does not apply the config's sliding_window here.
        positions = torch.arange(x.shape[1], device=x.device)[None]
        cosine, sine = rotary(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self._layers:
            x = layer(x, cosine, sine)
        return x


def _conv_stack(load: Loader, config: CodecEncoderConfig) -> list[_Conv | _Residual | _Elu]:
    """The strided convolution stack; positions in the list are the numbers in the tensor names."""
    width = config.num_filters
    mode = config.pad_mode
    stack: list[_Conv | _Residual | _Elu] = [_Conv(load.at("0.conv."), 1, width, config.kernel_size, mode)]
    for ratio in reversed(config.upsampling_ratios):
        for j in range(config.num_residual_layers):
            stack.append(_Residual(load.at(f"{len(stack)}."), config, width, config.dilation_growth_rate**j))
        stack.append(_Elu())
        stack.append(_Conv(load.at(f"{len(stack)}.conv."), width, 2 * width, 2 * ratio, mode, stride=ratio))
        width *= 2
    stack.append(_Elu())
    stack.append(_Conv(load.at(f"{len(stack)}.conv."), width, config.hidden_size, config.last_kernel_size, mode))
    return stack


class _Elu:
    def __call__(self, x: Tensor) -> Tensor:
        return elu(x)


class _Conv:
    """Causal convolution, [B, Cin, T] -> [B, Cout, ceil(T / stride)]; the last step is filled up on the right."""

    def __init__(
        self,
        load: Loader,
        channels_in: int,
        channels_out: int,
        kernel: int,
        mode: str,
        stride: int = 1,
        dilation: int = 1,
        bias: bool = True,
    ) -> None:
        self.weight = load("weight", channels_out, channels_in, kernel)
        self.bias = load("bias", channels_out) if bias else None
        self.mode, self.stride, self.dilation = mode, stride, dilation
        self.left = (kernel - 1) * dilation + 1 - stride

    def __call__(self, x: Tensor) -> Tensor:
        right = -x.shape[2] % self.stride
        return conv1d(pad(x, (self.left, right), self.mode), self.weight, self.bias, self.stride, dilation=self.dilation)


class _Residual:
    def __init__(self, load: Loader, config: CodecEncoderConfig, width: int, dilation: int) -> None:
        inner = width // config.compress
        self.conv1 = _Conv(load.at("block.1.conv."), width, inner, config.residual_kernel_size, config.pad_mode, dilation=dilation)
        self.conv2 = _Conv(load.at("block.3.conv."), inner, width, 1, config.pad_mode)

    def __call__(self, x: Tensor) -> Tensor:
        return self.conv2(elu(self.conv1(elu(x)))) + x


class _Layer:
    """One transformer layer: LayerNorm, attention with rotary positions, layer scale; LayerNorm, GELU MLP, layer scale."""

    def __init__(self, load: Loader, config: CodecEncoderConfig) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.eps, self.head_dim = config.norm_eps, config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.grouped = queries != keys
        self.norm1 = load("input_layernorm.weight", hidden), load("input_layernorm.bias", hidden)
        self.norm2 = load("post_attention_layernorm.weight", hidden), load("post_attention_layernorm.bias", hidden)
        shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
        attention = load.at("self_attn.")
        self.weights = {name: attention(f"{name}_proj.weight", *shape) for name, shape in shapes.items()}
        self.wide, self.narrow = load("mlp.fc1.weight", inner, hidden), load("mlp.fc2.weight", hidden, inner)
        self.scale1, self.scale2 = load("self_attn_layer_scale.scale", hidden), load("mlp_layer_scale.scale", hidden)

    def __call__(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.scale1 * self._attention(layer_norm(x, x.shape[-1:], *self.norm1, self.eps), cosine, sine)
        hidden = gelu(linear(layer_norm(x, x.shape[-1:], *self.norm2, self.eps), self.wide))
        return x + self.scale2 * linear(hidden, self.narrow)

    def _attention(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query, key, value = (linear(x, self.weights[name]).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for name in "qkv")
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        return linear(attended.transpose(1, 2).flatten(2), self.weights["o"])


class _Quantizer:
    """Residual vector quantizer by nearest neighbour."""

    def __init__(self, load: Loader, config: CodecEncoderConfig, count: int) -> None:
        hidden, width = config.hidden_size, config.vector_quantization_hidden_dimension
        self.projection: Tensor | None = None
        if hidden != width:
            self.projection = load("input_proj.weight", width, hidden, 1)
            load("output_proj.weight", hidden, width, 1)  # part of the file, used for decoding only
        self.codebooks = [self._codebook(load.at(f"layers.{i}.codebook."), config) for i in range(count)]

    def encode(self, x: Tensor, count: int) -> list[Tensor]:
        """x: [1, hidden, T] -> the codes of the first `count` codebooks, int64 [T] each."""
        projected = x if self.projection is None else conv1d(x, self.projection)
        residual = projected[0].T.contiguous()
        codes: list[Tensor] = []
        for codebook in self.codebooks[:count]:
            nearest = torch.cdist(residual[None], codebook[None])[0].argmin(dim=-1)
            residual = residual - codebook[nearest]
            codes.append(nearest)
        return codes

    @staticmethod
    def _codebook(load: Loader, config: CodecEncoderConfig) -> Tensor:
        load("initialized", 1)  # training state
        usage = load("cluster_usage", config.codebook_size).clamp(min=USAGE_FLOOR)
        return load("embed_sum", config.codebook_size, config.codebook_dim) / usage[:, None]
