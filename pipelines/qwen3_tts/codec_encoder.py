"""The 12 Hz codec encoder: reference audio in, codes out. It is the encoding half of Mimi (Kyutai), by the names of its tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, scaled_dot_product_attention

from pipelines.codec.transformer import angles, rotate
from pipelines.errors import ErrorCode, InputError
from pipelines.nn.checkpoint import TensorSource, fill_module
from pipelines.qwen3_tts.codec_config import CodecConfig, CodecEncoderConfig

USAGE_FLOOR = 1e-5


def rotary(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary embedding, half-split layout, computed in float32: positions [B, T] -> two of [B, 1, T, head_dim]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    found = angles(positions, theta**-exponents)
    return found.cos().to(dtype), found.sin().to(dtype)


class CodecEncoder(nn.Module):
    """Turns mono audio into codes, `encode_downsample_rate` samples a frame. Runs in float32: a code is a choice, not a quantity."""

    def __init__(self, config: CodecConfig, source: TensorSource, device: torch.device | str = "cpu") -> None:
        super().__init__()
        sizes = config.encoder
        self.config = sizes
        self.device = torch.device(device)
        self.sample_rate = config.input_sample_rate
        self.samples_per_frame = config.encode_downsample_rate
        self.codebooks = config.encoder_valid_num_quantizers
        semantic = sizes.num_semantic_quantizers
        with torch.device("meta"):
            self.encoder = nn.ModuleDict({"layers": _conv_stack(sizes)})
            layers = nn.ModuleList([_Layer(sizes) for _ in range(sizes.num_hidden_layers)])
            self.encoder_transformer = nn.ModuleDict({"layers": layers})
            width, kernel = sizes.hidden_size, sizes.downsample_kernel
            self.downsample = _Conv(width, width, kernel, "replicate", stride=2, bias=False) if kernel else nn.Identity()
            self.quantizer = nn.ModuleDict(
                {
                    "semantic_residual_vector_quantizer": _Quantizer(sizes, semantic),
                    "acoustic_residual_vector_quantizer": _Quantizer(sizes, sizes.num_quantizers - semantic),
                }
            )
        fill_module(self, source, "encoder.", self.device)

    @torch.inference_mode()
    def encode(self, samples: Tensor) -> Tensor:
        """Encodes mono audio at `sample_rate`: samples float32 [n] -> codes int64 [ceil(n / samples_per_frame), codebooks].

        Raises `InputError` (`input.reference_length`) when there are no samples.
        """
        if samples.dim() != 1 or not samples.numel():
            raise InputError(ErrorCode.INPUT_REFERENCE_LENGTH, "The reference audio is empty.", "Give a recording of at least a second.")
        frames = -(-samples.numel() // self.samples_per_frame)
        x = self.encoder["layers"](samples.to(self.device, torch.float32)[None, None])
        x = self.downsample(self._transform(x.transpose(1, 2)).transpose(1, 2))
        left, codes = self.codebooks, []
        for quantizer in self.quantizer.values():
            codes += quantizer.encode(x, left)
            left = self.codebooks - len(codes)
        return torch.stack(codes, dim=1)[:frames]

    def _transform(self, x: Tensor) -> Tensor:
        # The reference (transformers 4.57) attends to the whole past: it does not apply the config's sliding_window here.
        positions = torch.arange(x.shape[1], device=x.device)[None]
        cosine, sine = rotary(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.encoder_transformer["layers"]:
            x = layer(x, cosine, sine)
        return x


def _conv_stack(config: CodecEncoderConfig) -> nn.Sequential:
    """The strided convolution stack, [1, 1, samples] -> [1, hidden_size, steps]."""
    width, mode = config.num_filters, config.pad_mode
    stack: list[nn.Module] = [_Conv(1, width, config.kernel_size, mode)]
    for ratio in reversed(config.upsampling_ratios):
        stack += [_Residual(config, width, config.dilation_growth_rate**j) for j in range(config.num_residual_layers)]
        stack += [nn.ELU(), _Conv(width, 2 * width, 2 * ratio, mode, stride=ratio)]
        width *= 2
    return nn.Sequential(*stack, nn.ELU(), _Conv(width, config.hidden_size, config.last_kernel_size, mode))


class _Conv(nn.Module):
    """Causal convolution, [B, Cin, T] -> [B, Cout, ceil(T / stride)]; the last step is filled up on the right."""

    def __init__(self, input: int, output: int, kernel: int, mode: str, stride: int = 1, dilation: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv1d(input, output, kernel, stride, dilation=dilation, bias=bias)
        self.mode, self.stride = mode, stride
        self.left = (kernel - 1) * dilation + 1 - stride

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(pad(x, (self.left, -x.shape[2] % self.stride), self.mode))


class _Residual(nn.Module):
    def __init__(self, config: CodecEncoderConfig, width: int, dilation: int) -> None:
        super().__init__()
        inner, mode = width // config.compress, config.pad_mode
        wide = _Conv(width, inner, config.residual_kernel_size, mode, dilation=dilation)
        self.block = nn.Sequential(nn.ELU(), wide, nn.ELU(), _Conv(inner, width, 1, mode))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + x


class _Layer(nn.Module):
    """One transformer layer: LayerNorm, attention with rotary positions, layer scale; LayerNorm, GELU MLP, layer scale."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.head_dim, self.grouped = config.head_dim, queries != keys
        sizes = {"q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys), "o": (queries, hidden)}
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(hidden, inner, bias=False), "fc2": nn.Linear(inner, hidden, bias=False)})
        self.input_layernorm, self.post_attention_layernorm = (nn.LayerNorm(hidden, config.norm_eps) for _ in range(2))
        self.self_attn_layer_scale, self.mlp_layer_scale = (nn.ParameterDict({"scale": torch.empty(hidden)}) for _ in range(2))

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.self_attn_layer_scale["scale"] * self._attention(self.input_layernorm(x), cosine, sine)
        hidden = gelu(self.mlp["fc1"](self.post_attention_layernorm(x)))
        return x + self.mlp_layer_scale["scale"] * self.mlp["fc2"](hidden)

    def _attention(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query, key, value = (self.self_attn[f"{name}_proj"](x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for name in "qkv")
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        return self.self_attn["o_proj"](attended.transpose(1, 2).flatten(2))


class _Codebook(nn.Module):
    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.register_buffer("initialized", torch.empty(1))  # training state
        self.cluster_usage = nn.Parameter(torch.empty(config.codebook_size))
        self.embed_sum = nn.Parameter(torch.empty(config.codebook_size, config.codebook_dim))

    def vectors(self) -> Tensor:
        """float32 [codes, codebook_dim]."""
        return self.embed_sum / self.cluster_usage.clamp(min=USAGE_FLOOR)[:, None]


class _Quantizer(nn.Module):
    """Residual vector quantizer by nearest neighbour."""

    def __init__(self, config: CodecEncoderConfig, count: int) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.vector_quantization_hidden_dimension
        self.input_proj = nn.Conv1d(hidden, width, 1, bias=False)
        self.output_proj = nn.Conv1d(width, hidden, 1, bias=False)  # part of the file, used for decoding only
        self.layers = nn.ModuleList([nn.ModuleDict({"codebook": _Codebook(config)}) for _ in range(count)])

    def encode(self, x: Tensor, count: int) -> list[Tensor]:
        """x: [1, hidden, T] -> the codes of up to `count` codebooks, int64 [T] each."""
        residual = self.input_proj(x)[0].T.contiguous()
        codes: list[Tensor] = []
        for layer in self.layers[:count]:
            vectors = layer["codebook"].vectors()
            nearest = torch.cdist(residual[None], vectors[None])[0].argmin(dim=-1)
            residual = residual - vectors[nearest]
            codes.append(nearest)
        return codes
