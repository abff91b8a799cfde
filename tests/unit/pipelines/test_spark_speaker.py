"""The voice of a recording, part by part: what the reference implementation gave, and the published
formulas written out."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipelines.spark_tts.bicodec import BiCodec, Tokenizer, load_bicodec
from pipelines.spark_tts.config import SparkConfig
from pipelines.spark_tts.reference import reference_clip
from pipelines.spark_tts.speaker import Fsq, Perceiver, Res2Net
from tests.support.golden_arrays import Arrays, check_near, read_arrays
from tests.support.vllm_kit import GOLDEN, checkpoint

LIMIT = 1e-4
RECORDINGS = ("ref_a", "ref_quiet", "ref_long", "ref_stereo_44k")


@cache
def arrays(name: str) -> Arrays:
    return Arrays(read_arrays(GOLDEN / "arrays" / f"{name}.npz"))


@cache
def bicodec() -> tuple[Tokenizer, BiCodec]:
    return load_bicodec(SparkConfig.from_folder(checkpoint()), torch.device("cpu"))


@cache
def mel(recording: str) -> Tensor:
    clip = reference_clip(
        arrays(f"prep_{recording}")["audio"], SparkConfig.from_folder(checkpoint()).clip_samples
    )
    return bicodec()[0].mel(torch.from_numpy(clip)[None])


@torch.inference_mode()
def test_global_tokens_are_those_of_the_reference() -> None:
    speaker = bicodec()[0].speaker
    found = {name: speaker.tokens(mel(name))[0].tolist() for name in RECORDINGS}
    assert found == {name: arrays(f"tokens_{name}")["global_ids"].tolist() for name in RECORDINGS}
    assert len({token for tokens in found.values() for token in tokens}) > 40


@torch.inference_mode()
def test_latents_and_what_is_quantized_are_those_of_the_reference() -> None:
    golden, speaker = arrays("tokens_ref_a"), bicodec()[0].speaker
    latents = speaker.perceiver_sampler(speaker.context(mel("ref_a")))
    check_near("latents", latents[0], golden["perceiver_out"], LIMIT)
    check_near("values", speaker.quantizer.project_in(latents)[0], golden["fsq_project_in"], LIMIT)


def test_values_are_rounded_to_the_levels_of_the_reference() -> None:
    """The quantizer alone, from the reference's values to its ids."""
    golden = arrays("tokens_ref_a")
    fsq = plain_fsq(6)
    assert fsq.indices(torch.from_numpy(golden["fsq_project_in"])).tolist() == golden["global_ids"].tolist()


def plain_fsq(dimensions: int, levels: int = 4) -> Fsq:
    fsq = Fsq(dimensions, [levels] * dimensions)
    with torch.no_grad():
        fsq.project_in.weight.copy_(torch.eye(dimensions))
        fsq.project_in.bias.zero_()
    return fsq


@pytest.mark.parametrize("levels", [4, 8])
def test_an_even_number_of_levels_lies_half_a_level_off_the_middle(levels: int) -> None:
    """lucidrains' FSQ: round(tanh(z + atanh(1 / (2 h))) * h - 1/2) with h = (levels - 1) * 1.001 / 2, and
    the lowest level is digit 0."""
    values = torch.linspace(-6, 6, 4_001)
    h = (levels - 1) * 1.001 / 2
    bounded = np.tanh(values.numpy().astype(np.float64) + np.arctanh(0.5 / h)) * h - 0.5
    clear = np.abs(bounded - np.floor(bounded) - 0.5) > 1e-4
    digits = plain_fsq(1, levels).indices(values[:, None]).numpy()
    np.testing.assert_array_equal(digits[clear], (np.rint(bounded) + levels // 2).astype(np.int64)[clear])
    assert sorted(set(digits.tolist())) == list(range(levels))


def test_slices_of_channels_are_chained() -> None:
    """Desplanques et al. (2020), as the published code has it: each slice but the last is convolved on top
    of the one before."""
    torch.manual_seed(0)
    block, x = Res2Net(32, 2).eval(), torch.randn(2, 32, 50)
    for bn in block.bns:
        nn.init.normal_(bn.running_mean)  # pyright: ignore[reportArgumentType]
    slices, made, before = x.split(4, dim=1), [], torch.zeros(2, 4, 50)
    for index, (conv, bn) in enumerate(zip(block.convs, block.bns)):
        before = bn(torch.relu(conv(slices[index] + before)))
        made.append(before)
    torch.testing.assert_close(block(x), torch.cat([*made, slices[-1]], dim=1))


def test_latents_keep_what_they_were_behind_each_part() -> None:
    """Both parts of a perceiver's layer are added to the latents: with outputs of 0 they are the learned
    ones, normalized."""
    torch.manual_seed(0)
    perceiver = Perceiver(12, 5)
    for parameter in (perceiver.latents, perceiver.norm.gamma):
        nn.init.normal_(parameter)
    context = torch.randn(2, 7, 1536)

    def expected(*parts: Any) -> Tensor:
        latents = perceiver.latents.expand(2, -1, -1)
        for attention, feed_forward in perceiver.layers:  # pyright: ignore[reportGeneralTypeIssues]
            if "attention" in parts:
                latents = latents + attention(latents, perceiver.proj_context(context))
            if "feed_forward" in parts:
                latents = latents + feed_forward(latents)
        return functional.normalize(latents, dim=-1) * 12**0.5 * perceiver.norm.gamma

    torch.testing.assert_close(perceiver(context), expected("attention", "feed_forward"))
    for _, feed_forward in perceiver.layers:  # pyright: ignore[reportGeneralTypeIssues]
        for parameter in feed_forward[2].parameters():
            nn.init.zeros_(parameter)
    torch.testing.assert_close(perceiver(context), expected("attention"))
    for attention, _ in perceiver.layers:  # pyright: ignore[reportGeneralTypeIssues]
        nn.init.zeros_(attention.to_out.weight)
    torch.testing.assert_close(perceiver(context), expected())


def test_the_vector_is_that_of_the_reference() -> None:
    """It takes the latent index first, then the token's."""
    ids = arrays("ids_len30")["global_ids"].reshape(1, -1)
    check_near(
        "vector",
        bicodec()[1].speaker.vector(torch.from_numpy(ids))[0],
        arrays("detokenize_len30")["d_vector"],
        LIMIT,
    )
