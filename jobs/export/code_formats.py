"""Formats of codes: JSON lines, interleaved text and codes for the training of a SpeechLM, and ESPnet SpeechLM's tokens.

    jsonl          {"audio_filepath": ..., "codes": [[...], ...], "codec": {...}, ...}
    interleaved    {"tokenizer": {...}, "spans": [["text", [ids]], ["codes", [[...], ...]], ["text", ...], ...], ...}
    espnet-codes   train/data.json  train/token_list.json  train/wav.scp  train/codec.ark  train/text  train/utt2spk

Sources: espnet2/speechlm/tokenizer/codec_tokenizer.py, whose tokens are codes [frames, codebooks] in one row, each plus
the sizes of the codebooks before its own; pyscripts/utils/make_speechlm_json.py for `data.json`; and
https://kaldi-asr.org/doc/io.html for binary vectors of int32. GLM-4-Voice (Zeng et al., 2024) alternates 13 text tokens
and 26 of audio.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from jobs.codes import StoredCodes
from jobs.export.dataset import PartFiles
from jobs.export.files import json_line
from jobs.export.folder_formats import kaldi_ids
from jobs.export.formats import ExportFormat, ExportOptions
from jobs.export.items import AudioItem, Part, facts, item_metadata
from jobs.export.line_formats import one_line
from jobs.ledger.records import Job, JobSpec
from pipelines.errors import invalid, missing_library

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Text tokens and frames of a span, and the other way to interleave.
DEFAULT_RATIO, WORDS = "13:26", "words"


def jsonl_line(job: Job, item: AudioItem, where: str) -> bytes:
    """The line of an item with its codes."""
    codes = cast("StoredCodes", item.codes)
    sound = {"audio_filepath": where} if where else {}
    return json_line(sound | facts(item) | {"codes": codes.codes.tolist()})


def interleaved(format: ExportFormat, options: ExportOptions, spec: JobSpec) -> ExportFormat:
    """The format with its options, or a format without these options itself. `interleave`: text tokens and frames of
    a span such as `13:26`, or `words`; `tokenizer`: a file, a folder, or the name of a repository on the hub; None:
    that of the job's model.

    Raises `config.invalid` for options that cannot be used, `config.missing_library` without `tokenizers`.
    """
    if format.name != "interleaved":
        if options.interleave or options.tokenizer:
            raise invalid(
                f"The format {format.name} is not interleaved.", "Leave --interleave and --tokenizer out."
            )
        return format
    ratio = options.interleave or DEFAULT_RATIO
    sizes = tuple(map(int, ratio.split(":"))) if re.fullmatch(r"[1-9]\d*:[1-9]\d*", ratio) else None
    if sizes is None and ratio != WORDS:
        raise invalid(
            f"{ratio[:40]!r} is no ratio of text tokens and frames.", f"Write {DEFAULT_RATIO}, or {WORDS}."
        )
    found, about = _tokenizer(options.tokenizer or spec.model)
    return replace(
        format,
        item_line=partial(interleaved_line, found, about, sizes),
        needs_words=sizes is None,
        variant=f"{ratio} {about['sha256']}",
    )


def _tokenizer(place: str) -> tuple[Tokenizer, dict[str, str]]:
    """A tokenizer with its name and its hash."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise missing_library("The format interleaved", "tokenizers", "gpu") from None
    places = (Path(place, name) for name in ("", "tokenizer.json", "LLM/tokenizer.json"))
    file = next((str(one) for one in places if one.is_file()), None)
    try:
        found = Tokenizer.from_file(file) if file else Tokenizer.from_pretrained(place)
    except Exception as error:
        raise invalid(
            f"There is no tokenizer {place[:200]!r}: {error}.",
            "Give a tokenizer.json or a name on the hub with --tokenizer.",
        ) from error
    return found, {"name": Path(place).name, "sha256": hashlib.sha256(found.to_str().encode()).hexdigest()}


def interleaved_line(
    tokenizer: Tokenizer,
    about: dict[str, str],
    sizes: tuple[int, ...] | None,
    job: Job,
    item: AudioItem,
    _: str,
) -> bytes:
    """The line of an item: spans of these numbers of text tokens and frames in turn, the last of each with the rest of
    the other; None: a word and its frames in turn."""
    codes = cast("StoredCodes", item.codes)
    known = facts(item)
    text = tokenizer.encode(known["text"], add_special_tokens=False)
    if sizes is None:
        cuts = _cuts_at_words(item, known["text"], text.offsets, codes)
    else:
        turns = min(-(-len(text.ids) // sizes[0]), -(-len(codes.codes) // sizes[1]))
        cuts = [(turn * sizes[0], turn * sizes[1]) for turn in range(1, turns)]
    bounds = [(0, 0), *cuts, (len(text.ids), len(codes.codes))]
    spans: list[tuple[str, Any]] = []
    for (token, frame), (next_token, next_frame) in itertools.pairwise(bounds):
        spans += ("text", text.ids[token:next_token]), ("codes", codes.codes[frame:next_frame].tolist())
    return json_line(known | {"tokenizer": about, "spans": [span for span in spans if span[1]]})


def _cuts_at_words(
    item: AudioItem, text: str, offsets: list[tuple[int, int]], codes: StoredCodes
) -> list[tuple[int, int]]:
    """The numbers of tokens and frames before each word but the first. A word that is not in the text as it is said
    belongs to the one before it."""
    cuts: list[tuple[int, int]] = []
    end = 0
    for number, word in enumerate(item.words):
        start = text.find(word.text, end)
        if start < 0:
            continue
        end = start + len(word.text)
        if number:
            token = sum(last <= start for _, last in offsets)
            cuts.append((token, min(round(word.start_s * codes.codec.frame_rate), len(codes.codes))))
    return cuts


def write_espnet_codes(
    part: Part, files: PartFiles, job: Job, items: Iterator[tuple[AudioItem, Any]]
) -> None:
    """Writes the files of one split for ESPnet's task `tts`."""
    import numpy as np

    folder = part.split
    count = 0
    codec = None
    about = files.open(f"{folder}/data.json")
    about.write(b'{"task":"tts","examples":[')
    texts, speakers, index, archive = (
        files.open(f"{folder}/{name}") for name in ("text", "utt2spk", "wav.scp", "codec.ark")
    )
    for item, _ in items:
        codes = cast("StoredCodes", item.codes)
        known = item_metadata(job, item)
        if codec not in (None, codes.codec):
            raise invalid("The jobs have codes of several codecs.", "Export them to several datasets.")
        codec = codes.codec
        speaker, utterance = kaldi_ids(known.speaker, item.id)
        about.write(b"," * bool(count) + msgspec.json.encode(utterance))
        count += 1
        texts.write(f"{utterance} {one_line(known.text)}\n".encode())
        speakers.write(f"{utterance} {speaker}\n".encode())
        archive.write(f"{utterance} ".encode())
        place = f"{files.sibling_name(f'{folder}/codec.ark')}:{archive.tell()}"
        index.write(f"{utterance} {place}\n".encode())
        row = (codes.codes + np.cumsum([0, *codec.codebook_sizes[:-1]])).reshape(-1)
        vector = np.empty(len(row), [("size", "i1"), ("value", "<i4")])
        vector["size"] = 4
        vector["value"] = row
        archive.write(b"\0B\4" + len(row).to_bytes(4, "little") + vector.tobytes())
    sizes = codec.codebook_sizes if codec else ()
    names = [f"<codec_layer{layer}_code{code}>" for layer, size in enumerate(sizes) for code in range(size)]
    files.add(f"{folder}/token_list.json", json_line(names))
    entries = ("text", "g2p", "text"), ("utt2spk", "spk", "text"), ("wav.scp", "codec", "kaldi_ark")
    placed = [f"{files.sibling_name(f'{folder}/{name}')},{kind},{reader}" for name, kind, reader in entries]
    names_file = files.sibling_name(f"{folder}/token_list.json")
    rest = {"num_examples": count, "vocabularies": [names_file], "data_files": placed, "codec": codec}
    about.write(b"]," + json_line(rest)[1:])


JSONL = ExportFormat(
    name="jsonl", summary="JSONL with the codes", item_line=jsonl_line, codes=True, needs_codes=True
)
INTERLEAVED = replace(
    JSONL, name="interleaved", summary="JSONL with text and codes in turn", names_audio=False
)
ESPNET_CODES = replace(
    INTERLEAVED,
    name="espnet-codes",
    summary="codes as tokens of ESPnet SpeechLM",
    item_line=None,
    write_part=write_espnet_codes,
    local_folder=True,
)
