"""The codec's states after rows of codes, against the state that each row has after its chunk."""

from __future__ import annotations

from pathlib import Path

import torch

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
