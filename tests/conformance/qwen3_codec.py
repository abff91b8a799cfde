"""The codec part of the Qwen3-TTS conformance run: audio, mel, speaker vectors and codes of a golden
folder, one callable a case."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelines import audio
from pipelines.nn.checkpoint import Checkpoint
from pipelines.qwen3_tts.codec import Codec, load_codec
from pipelines.qwen3_tts.config import Qwen3TTSConfig
from pipelines.qwen3_tts.speaker import PREFIX, SpeakerEncoder, log_mel
from tests.conformance.listing import Case, listed
from tests.support.golden_arrays import Array, largest_difference, read_arrays
from tests.support.golden_checkpoint import whole

WAVE_LIMIT = 1e-4
SPEAKER_LIMIT = 1e-4
MEL_LIMIT = 6e-3
AUDIO_LIMIT = 1e-5
STREAM_CHUNKS = (1, 2, 5, 3, 11)


def cases(folder: str | Path, device: str = "cpu") -> Iterator[Case]:
    """Every codec case of a golden folder as (name, check); a check raises AssertionError with the
    measured difference.

    `folder` holds `cases.json`, the arrays it names, the checkpoints and `refs/`; nothing else about it is
    assumed.
    """
    golden = _Golden(Path(folder), device)
    for index, item in enumerate(golden.items):
        yield from listed(f"codec item {index}", _cases_of(golden, item))


def _cases_of(golden: _Golden, item: dict[str, Any]) -> Iterator[Case]:
    yield from _KINDS[item["kind"]](golden, item)


class _Golden:
    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.device = device
        section = json.loads((folder / "cases.json").read_text(encoding="utf-8"))["codec"]
        self.items: list[dict[str, Any]] = section["items"]
        self.arrays = read_arrays(folder / section["arrays"])
        self.codec = lru_cache(maxsize=None)(self._codec)
        self.speaker = lru_cache(maxsize=None)(self._speaker)

    def array(self, key: str) -> Any:
        """An array of the folder, `Thinned` where it has it so."""
        return self.arrays[key]

    def tensor(self, key: str) -> Tensor:
        return torch.from_numpy(self.array(key))

    def audio24k(self, item: dict[str, Any]) -> NDArray[np.float32]:
        """The recording of an item at 24 kHz: the file itself where it is so, else an array that must be
        there."""
        samples, rate = soundfile.read(self.recording(item), dtype="float32")
        if rate != 24_000 or samples.ndim > 1:
            samples = self.array(f"audio24k.{_reference(item)}")
        return np.asarray(samples, np.float32)

    def recording(self, item: dict[str, Any]) -> Path:
        return self.folder / "refs" / item["ref_audio"]

    def _codec(self, checkpoint: str) -> Codec:
        return load_codec(whole(self.folder / checkpoint) / "speech_tokenizer", self.device)

    def _speaker(self, checkpoint: str) -> SpeakerEncoder:
        folder = whole(self.folder / checkpoint)
        with Checkpoint(folder) as source:
            encoder = SpeakerEncoder(Qwen3TTSConfig.from_folder(folder).speaker_encoder, source, self.device)
            assert not [name for name in source.left() if name.startswith(PREFIX)]
        return encoder


def _decode(golden: _Golden, item: dict[str, Any]) -> Iterator[Case]:
    stem, checkpoint = item["keys"].removesuffix(".*"), item["checkpoint"]

    def whole() -> None:
        (wave,) = golden.codec(checkpoint).decoder.decode([golden.tensor(f"{stem}.codes")])
        _near(wave, golden.array(f"{stem}.wave"), WAVE_LIMIT)

    def chunks() -> None:
        codes, decoder = golden.tensor(f"{stem}.codes"), golden.codec(checkpoint).decoder
        state, waves, start = decoder.new_state(), [], 0
        while start < len(codes):
            size = STREAM_CHUNKS[len(waves) % len(STREAM_CHUNKS)]
            waves.extend(decoder.decode_chunk([state], [codes[start : start + size]]))
            start += size
        _near(torch.cat(waves), golden.array(f"{stem}.wave"), WAVE_LIMIT)

    yield f"codec {stem}", whole
    yield f"codec {stem} in chunks", chunks


def _decode_batch(golden: _Golden, item: dict[str, Any]) -> Iterator[Case]:
    stem, checkpoint, frames = item["keys"].partition(".<")[0], item["checkpoint"], item["frames"]

    def check() -> None:
        source = golden.tensor(f"{_batch_source(golden, item)}.codes")
        waves = golden.codec(checkpoint).decoder.decode([source[:n] for n in frames])
        for n, wave in zip(frames, waves):
            _near(wave, golden.array(f"{stem}.{n}.wave"), WAVE_LIMIT)

    yield f"codec {stem} of {' and '.join(map(str, frames))} frames", check


def _batch_source(golden: _Golden, item: dict[str, Any]) -> str:
    """The decode case whose first frames are the items: the one named in the note, else the shortest that
    is long enough."""
    named = re.search(r"(decode\.\S+)\.codes", item.get("note", ""))
    if named:
        return named[1]
    same = [
        i
        for i in golden.items
        if i["kind"] == "decode"
        and i["checkpoint"] == item["checkpoint"]
        and i["frames"] >= max(item["frames"])
    ]
    return min(same, key=lambda i: i["frames"])["keys"].removesuffix(".*")


def _encode(golden: _Golden, item: dict[str, Any]) -> Iterator[Case]:
    key, checkpoint = item["keys"], item["checkpoint"]

    def check() -> None:
        codes = (
            golden.codec(checkpoint)
            .encoder.encode(torch.from_numpy(golden.audio24k(item))[None])[0]
            .cpu()
            .numpy()
        )
        wanted = golden.array(key)
        assert codes.shape == wanted.shape, f"shape {codes.shape}, expected {wanted.shape}"
        assert (codes == wanted).all(), f"{int((codes != wanted).sum())} of {wanted.size} codes differ"

    yield f"codec {key.removesuffix('.codes')}", check


def _reference(item: dict[str, Any]) -> str:
    """The name of a recording in keys, such as `ref_a`."""
    return item["keys"][0].split(".", 1)[1] if item["kind"] == "speaker" else item["keys"].split(".")[2]


def _speaker(golden: _Golden, item: dict[str, Any]) -> Iterator[Case]:
    reference, checkpoint = _reference(item), item["checkpoint"]

    def resample() -> None:
        samples, rate = audio.decode(
            golden.recording(item).read_bytes(), golden.speaker(checkpoint).config.sample_rate
        )
        assert rate == golden.speaker(checkpoint).config.sample_rate, f"rate {rate}"
        _near(torch.from_numpy(samples), golden.audio24k(item), AUDIO_LIMIT)

    def mel() -> None:
        sizes = golden.speaker(checkpoint).config
        samples = torch.from_numpy(golden.audio24k(item))
        (mel,), _ = log_mel(samples[None], torch.tensor([len(samples)]), sizes.sample_rate, sizes.mel_dim)
        _near(mel.T, golden.array(f"mel.{reference}"), MEL_LIMIT)

    def embedding() -> None:
        samples = torch.from_numpy(golden.audio24k(item))
        _near(
            golden.speaker(checkpoint).embed(samples[None])[0],
            golden.array(f"speaker_embedding.{reference}"),
            SPEAKER_LIMIT,
        )

    yield f"audio24k {reference}", resample
    yield f"mel {reference}", mel
    yield f"speaker {checkpoint.removeprefix('checkpoint-')} {reference}", embedding


_KINDS: dict[str, Callable[[_Golden, dict[str, Any]], Iterator[Case]]] = {
    "decode": _decode,
    "decode_batch": _decode_batch,
    "encode": _encode,
    "speaker": _speaker,
}


def _near(measured: Tensor, wanted: Array, limit: float) -> None:
    difference = largest_difference(measured.float().cpu().numpy(), wanted, "values")
    assert difference <= limit, f"largest difference {difference:.2e}, limit {limit:.0e}"
