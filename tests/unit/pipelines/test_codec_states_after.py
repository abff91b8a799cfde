"""The codec's states after rows of codes, against the state that each row has after its chunk."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cuda_graphs import BucketGraphs
from pipelines.qwen3_tts.codec import load_codec

FOLDER = Path(__file__).parents[2] / "golden" / "qwen3_tts" / "checkpoint-base" / "speech_tokenizer"


def test_rows_have_the_states_that_their_chunks_lead_to() -> None:
    torch.set_num_threads(1)
    decoder = load_codec(FOLDER, encodes=False).decoder
    lengths = [decoder.reach, decoder.reach + 1, 37, 60]
    sizes = len(lengths), max(lengths), decoder.config.num_quantizers
    codes = torch.randint(0, decoder.config.codebook_size, sizes, generator=torch.Generator().manual_seed(0))
    made = decoder.states_after(codes, torch.tensor(lengths))
    for row, length, values in zip(codes, lengths, made):
        state = decoder.new_state()
        decoder.decode_chunk([state], [row[:length]])
        assert state.values is not None
        torch.testing.assert_close(values, state.values, rtol=1e-3, atol=1e-3)


class Written:
    """The event of a write on a CPU, where values are there at once."""

    def __init__(self, _: torch.device) -> None: ...

    def wait(self, _: torch.Tensor) -> None: ...


class Launched(BucketGraphs):
    """Batches on a CPU, which need no stream."""

    def __init__(self) -> None:
        self.keys: list[Any] = []

    def following(self, *_: torch.Tensor) -> nullcontext[None]:
        return nullcontext()

    def __call__(
        self, key: Hashable, work: Callable[..., torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        self.keys.append(key)
        return work(*inputs)


@pytest.mark.parametrize("fixed", [False, True])
def test_utterances_start_from_states_that_are_made_when_they_are_decoded(
    fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: many at once, and only the last ones are kept."""
    monkeypatch.setattr("pipelines.codec.decoder.WriteEvent", Written)
    monkeypatch.setattr("pipelines.codec.decoder.KEPT_STATES", 3)
    torch.set_num_threads(1)
    plain, decoder = (load_codec(FOLDER, encodes=False).decoder for _ in range(2))
    decoder.alone, decoder.fixed, decoder.state_graphs = False, fixed, Launched()
    sizes = decoder.config.codebook_size, (90, decoder.config.num_quantizers)
    codes = torch.randint(0, *sizes, generator=torch.Generator().manual_seed(0))
    starts = [
        decoder.state_after(codes[:length]) for length in (decoder.reach - 1, decoder.reach, 40, 37, 90)
    ]
    for _ in range(2):
        waves = decoder.decode([codes[: 9 + i] for i in range(10)], starts * 2)
        for i, wave in enumerate(waves):
            start, state = starts[i % 5], plain.new_state()
            assert start.values is None
            assert start.codes is not None
            plain.decode_chunk([state], [start.codes])
            (wanted,) = plain.decode([codes[: 9 + i]], [state])
            torch.testing.assert_close(wave, wanted, rtol=1e-3, atol=1e-3)
    assert len(decoder.made) == 3
    shapes = {(rows, frames) for rows, frames, _ in decoder.state_graphs.keys}
    allowed = (8,) if fixed else (1, 2, 4)
    assert shapes <= {*product(allowed, (64, 128))}, "few shapes, so few graphs"
