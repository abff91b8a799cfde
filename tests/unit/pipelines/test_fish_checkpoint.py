"""What a Fish Speech S2 folder says, and that a damaged one is refused by the name of what is wrong."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.layers import rope_table
from pipelines.errors import ErrorCode, ModelError
from pipelines.fish_speech.codec import codec_from, load_codec, open_codec
from pipelines.fish_speech.config import CodecConfig, DualArStack, FishConfig
from pipelines.fish_speech.model import halves, load_weights, take_layers, take_weights
from pipelines.fish_speech.prompt import Vocabulary
from pipelines.nn.checkpoint import Loader, TensorSource, take_normed
from pipelines.registry import describe
from tests.support.fish_checkpoint import whole

PUBLISHED = FishConfig(
    Path(),
    44_100,
    DualArStack(2560, 9728, 36, 32, 8, 128, 1e-6, 1e6, 155_776, 32_768, qk_norm=True),
    DualArStack(2560, 9728, 4, 32, 8, 128, 1e-6, 1e6, 4096, 10),
    10,
    range(151_678, 155_774),
    151_645,
    CodecConfig(),
)

META = torch.device("meta")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(whole(), tmp_path / "checkpoint", copy_function=shutil.copyfile)


def edit(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_the_registry_recognises_the_folder_without_torch() -> None:
    program = (
        "import sys; from pipelines.registry import describe; card = describe(sys.argv[1]); can = card.capabilities;"
        "print(card.family, *card.engines, card.sample_rate, can.cloning, can.references, can.streaming, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(whole())], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["fish_speech", "native", "vllm", "44100", "True", "5", "True", "False"]


def test_the_revision_follows_the_weights(folder: Path) -> None:
    before = describe(str(folder)).revision
    with (folder / "codec.pth").open("r+b") as file:
        file.seek((folder / "codec.pth").stat().st_size // 2)
        file.write(b"other")
    assert describe(str(folder)).revision != before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["text_config"].pop("n_layer"), "text_config.n_layer is missing"),
        (lambda c: c["text_config"].update(attention_qk_norm=False), "attention_qk_norm is False; only True"),
        (lambda c: c["audio_decoder_config"].update(attention_o_bias=True), "attention_o_bias is True"),
        (
            lambda c: c["audio_decoder_config"].update(num_codebooks=8),
            "num_codebooks is 8, but the codec has 10",
        ),
        (lambda c: c["audio_decoder_config"].update(text_dim=64), "text_dim is 64"),
        (lambda c: c["text_config"].update(tie_word_embeddings=False), "tie_word_embeddings is False"),
        (lambda c: c.update(semantic_end_token_id=477), "semantic_end_token_id and the start make 66 tokens"),
        (lambda c: c.update(eos_token_id=420), "eos_token_id is no text token"),
        (lambda c: c.update(model_type="fish_qwen3"), "model_type is 'fish_qwen3'"),
    ],
)
def test_a_config_that_cannot_be_is_named(folder: Path, change: Callable[[dict], object], words: str) -> None:
    edit(folder / "config.json", change)
    with pytest.raises(ModelError, match=words) as caught:
        FishConfig.from_folder(folder)
    assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT


def test_a_folder_without_codec_sizes_has_the_published_codec(folder: Path) -> None:
    (folder / "codec_config.json").unlink()
    assert FishConfig.from_folder(folder).codec == CodecConfig()


def test_the_tokenizer_must_fit_the_config(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c.update(semantic_start_token_id=411, semantic_end_token_id=474))
    with pytest.raises(ModelError, match="semantic:0"):
        Vocabulary.from_folder(FishConfig.from_folder(folder))


class TestLanguageModel:
    @pytest.mark.parametrize("fault", ["missing", "extra", "shape", "truncated"])
    def test_what_is_wrong_is_named(self, folder: Path, fault: str) -> None:
        path, index = folder / "model-00002-of-00003.safetensors", folder / "model.safetensors.index.json"
        name, tensors = "text_model.model.layers.0.attention.wo.weight", load_file(path)
        if fault == "missing":
            del tensors[name]
            edit(index, lambda c: c["weight_map"].pop(name))
        elif fault == "extra":
            name = "text_model.model.layers.7.ffn_norm.weight"
            tensors[name] = torch.zeros(48)
            edit(index, lambda c: c["weight_map"].update({name: path.name}))
        else:
            tensors[name] = torch.zeros(48, 48)
        save_file(tensors, path)
        if fault == "truncated":
            path.write_bytes(path.read_bytes()[:1000])
            name = path.name
        with pytest.raises(ModelError, match=name.replace(".", r"\.")):
            load_weights(FishConfig.from_folder(folder), torch.float32, META)

    def test_the_published_sizes_have_the_published_number_of_parameters(self) -> None:
        source = Counted()
        take_weights(source, PUBLISHED, torch.float32, META)
        assert round(sum(source.taken.values()) / 1e9, 2) == 4.56


def test_queries_and_keys_are_put_into_halves() -> None:
    stack = replace(PUBLISHED.slow, layers=1, hidden=2, heads=2, kv_heads=1, head_dim=4, intermediate=2)

    class Numbered(Counted):
        def take(
            self, name: str, shape: Sequence[int], dtype: object = None, device: object = None
        ) -> Tensor:
            return torch.arange(float(shape[0])).view(-1, *[1] * (len(shape) - 1)).expand(tuple(shape))

    (layer,) = take_layers(Loader(Numbered(), "", torch.float32, META), stack)
    assert layer.qkv[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 13, 14, 15]
    assert layer.q_norm is not None
    assert layer.q_norm.tolist() == [0, 2, 1, 3]


def test_rotating_halves_is_rotating_pairs() -> None:
    cosine, sine = rope_table(9, 8, 1e6, torch.bfloat16, "cpu").float().chunk(2, dim=1)
    x = torch.randn(8)
    even, odd = x[0::2], x[1::2]
    pairs = torch.stack(
        (even * cosine[5] - odd * sine[5], odd * cosine[5] + even * sine[5]), dim=-1
    ).flatten()
    left, right = halves(x, 8).chunk(2)
    assert torch.equal(
        torch.cat((left * cosine[5] - right * sine[5], right * cosine[5] + left * sine[5])), halves(pairs, 8)
    )


class Counted(TensorSource):
    """A source of tensors without values that counts what is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        plain = ("upsample", "downsample", "dwconv")
        if any(part in name for part in plain):
            return False
        return "weight_v" in name if "_proj." in name else "original1" in name

    def take(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        self.taken[name] = torch.Size(shape).numel()
        return torch.empty(tuple(shape), dtype=dtype, device="meta")


class TestCodec:
    def test_the_published_sizes_have_the_published_tensors(self) -> None:
        source = Counted()
        codec_from(CodecConfig(), source, torch.device("meta"), torch.float32)
        assert (len(source.taken), round(sum(source.taken.values()) / 1e6, 1)) == (535, 391.4)

    @pytest.mark.parametrize("wrapper", ["state_dict", "generator", "prefix", "both"])
    def test_a_wrapped_file_is_read(self, folder: Path, wrapper: str) -> None:
        path = folder / "codec.pth"
        tensors = torch.load(path, weights_only=True)
        names = sorted(tensors)
        if wrapper in ("prefix", "both"):
            tensors = {f"model.generator.{name}": tensor for name, tensor in tensors.items()} | {
                "discriminator.x": torch.zeros(1)
            }
        torch.save(
            {wrapper: tensors}
            if wrapper in ("state_dict", "generator")
            else {"state_dict": tensors, "step": 3},
            path,
        )
        table = open_codec(folder)
        assert all(name in table for name in names)
        codec_from(FishConfig.from_folder(folder).codec, table, torch.device("cpu"), torch.float32)
        assert [name for name in table.left() if not name.startswith("discriminator")] == []

    def test_unknown_extras_are_named_and_left_alone(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = folder / "codec.pth"
        tensors = torch.load(path, weights_only=True)
        torch.save(
            tensors
            | {"quantizer.pre_module.freqs_cis": torch.zeros(1), "encoder.block.9.alpha": torch.zeros(1)},
            path,
        )
        with caplog.at_level(logging.WARNING):
            load_codec(FishConfig.from_folder(folder))
        assert "encoder.block.9.alpha" in caplog.text
        assert "freqs_cis" not in caplog.text

    @pytest.mark.parametrize("fault", ["missing", "shape", "whole numbers", "no file", "no tensors"])
    def test_what_is_wrong_is_named(self, folder: Path, fault: str) -> None:
        path, name = folder / "codec.pth", "quantizer.post_module.layers.1.attention.wo.weight"
        tensors = torch.load(path, weights_only=True)
        if fault == "missing":
            del tensors[name]
        elif fault == "shape":
            tensors[name] = tensors[name][:5]
        elif fault == "whole numbers":
            tensors[name] = tensors[name].long()
        torch.save([1] if fault == "no tensors" else tensors, path)
        if fault == "no file":
            path.unlink()
        with pytest.raises(
            ModelError, match=name if fault in ("missing", "shape", "whole numbers") else r"codec\.pth"
        ) as caught:
            load_codec(FishConfig.from_folder(folder))
        assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT

    def test_code_in_the_file_is_never_run(self, folder: Path, tmp_path: Path) -> None:
        witness = tmp_path / "witness"

        class Bomb:
            def __reduce__(self) -> tuple[object, ...]:
                return (Path.touch, (witness,))

        with (folder / "codec.pth").open("wb") as file:
            pickle.dump({"encoder.block.0.conv.bias": Bomb()}, file)
        with pytest.raises(ModelError, match="cannot be read as tensors"):
            load_codec(FishConfig.from_folder(folder))
        assert not witness.exists()

    def test_every_spelling_of_the_weight_norm_is_one_weight(self) -> None:
        class Table(dict):
            def take(
                self, name: str, shape: Sequence[int], dtype: object = None, device: object = None
            ) -> Tensor:
                assert tuple(self[name].shape) == tuple(shape)
                return self[name]

        v, g = torch.randn(3, 2, 5), torch.rand(3, 1, 1)
        new = take_normed(
            Table({"a.parametrizations.weight.original0": g, "a.parametrizations.weight.original1": v}),
            "a.",
            v.shape,
        )
        old = take_normed(Table({"a.weight_g": g, "a.weight_v": v}), "a.", v.shape)
        folded = take_normed(Table({"a.weight": new}), "a.", v.shape)
        assert torch.equal(new, old)
        assert torch.equal(new, folded)
        assert torch.allclose(new.flatten(1).norm(dim=1), g.flatten(), atol=1e-6)
