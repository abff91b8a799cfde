"""Inputs of every format give dialogues at the numbers of their lines; what is wrong is refused by line,
or as the format it looks like."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from jobs.dialogue import chat_dialogue
from jobs.input_records import MAX_RECORD_LINES, Records
from jobs.ledger.records import JobSpec, Reading, RejectedLine
from jobs.source import MAX_LINE_BYTES, InputFormat, Source, batches_of, format_of, open_source
from pipelines.errors import ErrorCode, InputError
from pipelines.registry import describe

ALL = Reading()
DIALOGUE = b'{"example_id": "a", "messages": [["user", "text", "hi"]]}\n'
CHAT = b'{"messages": [{"role": "user", "content": "hi"}]}\n'
BATCH = b'{"custom_id": "a", "method": "POST", "url": "/v1/audio/speech", "body": {}}\n'


def records_of(source: Source, format: InputFormat, chosen: Reading = ALL, seed: int = 0) -> Records:
    return Records(source, format, JobSpec(model="hibari", reading=chosen, seed=seed), describe("hibari"))


def read(
    path: Path,
    format: InputFormat,
    chosen: Reading = ALL,
    *,
    max_lines: int = 3,
    after: int = 0,
    seed: int = 0,
) -> dict[int, Any]:
    """Line -> (id, text, generation) or the code of its refusal, of the lines that are not blank."""
    found: dict[int, Any] = {}
    with open_source(str(path)) as source:
        for batch in batches_of(records_of(source, format, chosen, seed).lines(), max_lines, 1 << 20, after):
            assert len(batch.lines) <= max_lines
            for number, record in enumerate(batch.lines, batch.first):
                if record is None:
                    found[number] = None
                elif isinstance(record, RejectedLine):
                    found[number] = record.code
                elif record.strip():
                    dialogue = json.loads(record)
                    found[number] = (
                        dialogue["example_id"],
                        *[message[2] for message in dialogue["messages"]],
                        dialogue.get("generation"),
                    )
    return found


def write(tmp_path: Path, content: str | bytes, name: str = "in") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("a.jsonl", DIALOGUE, "dialogues"),
        ("a.csv", DIALOGUE, "dialogues"),
        ("a", b"\n  \nnoise\n" + CHAT, "messages"),
        ("a.txt", BATCH, "openai-batch"),
        ("a", gzip.compress(BATCH, mtime=0), "openai-batch"),
        ("a.TXT", b"Hello.\n", "text"),
        ("a.csv.gz", gzip.compress(b"id,text\n", mtime=0), "csv"),
        ("a.tsv", b"id\ttext\n", "tsv"),
        ("a.jsonl", b'{"id":"a","text":"%b"}\n' % (b"a " * 100_000), "rows"),
        ("a.jsonl", b"", "dialogues"),
        ("a.jsonl", b'{"broken\n', "dialogues"),
        ("a.jsonl", b'[["user", "text", "hi"]]\n', "dialogues"),
        ("a.jsonl", DIALOGUE.strip() + b"\r", "dialogues"),
        ("a.jsonl", DIALOGUE.replace(b"\n", b"\r\n"), "dialogues"),
    ],
)
def test_a_format_is_recognized(tmp_path: Path, name: str, content: bytes, format: str) -> None:
    with open_source(str(write(tmp_path, content, name))) as source:
        assert format_of(source, "auto") == format


@pytest.mark.parametrize("value", [b"9" * 5000, b"1e999"])
def test_a_key_that_is_not_read_hides_no_format(tmp_path: Path, value: bytes) -> None:
    line = b'{"x":%b,"messages":[ {"role":"user","content":"Hi"}]}\n' % value
    with open_source(str(write(tmp_path, line))) as source:
        assert format_of(source, "auto") == "messages"


@pytest.mark.parametrize("seed", ["1_000", "\u0661\u0662", "\u00b2", "+5", "1.0", "9" * 5000])
def test_a_seed_of_a_table_is_a_number_in_ascii_digits(tmp_path: Path, seed: str) -> None:
    path = write(tmp_path, f"id,text,seed\na,Hello, 12 \nb,Hello,{seed}\n")
    assert read(path, "csv") == {
        2: ("a", "Hello", {"seed": 12}),
        3: ErrorCode.INPUT_BAD_GENERATION,
    }


def test_lines_of_white_space_in_tsv_are_blank(tmp_path: Path) -> None:
    path = write(tmp_path, "\t\t\n  \nid\ttext\n\t\na\tHello\r\n \n\t\n")
    assert read(path, "tsv") == {5: ("a", "Hello", None)}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"Hello there.\nHow are you?\n", "--input-format text"),
        ("a", b"id,text\na,Hello\n", "--input-format csv"),
        ("a", b'id,text\na,"Hello, you"\nb,"One, two"\n', "--input-format csv"),
        ("a", b"id\ttext\na\tHello, you\n", "--input-format tsv"),
        ("text", b"utt-1 hello there\nutt-2 good evening\n", "--input-format kaldi"),
        ("a.txt", "Hello.\n".encode("utf-16"), "UTF-16"),
        ("a.jsonl", bytes(range(256)), "is binary"),
        ("a.parquet", b"id,text\n", "looks like CSV"),
        ("a", b"id;text\na;Hello, you\nb;No\n", "--input-format csv"),
        ("a.jsonl", b"[" + DIALOGUE.strip() + b", " + DIALOGUE + b"]\n", "jq -c '.[]' OLD > NEW.jsonl"),
        ("a.json", b"\n[\n  {\n" + DIALOGUE + b"]\n", "one object per line"),
        ("a.json", b'{\n  "example_id": "a"\n}\n', "jq -c . OLD > NEW.jsonl"),
        ("a.jsonl", DIALOGUE.replace(b"\n", b"\r") * 2, r"tr '\r' '\n' < OLD > NEW"),
        ("a.csv", b"id,text\ra,Hello\r", r"tr '\r' '\n' < OLD > NEW"),
        ("a.tsv", b"id\ttext\ra\tHello", "CR alone"),
        ("a.txt", b"Hello.\rHow are you?\r", "CR alone"),
    ],
)
def test_a_file_of_another_format_is_refused_as_what_it_looks_like(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    with open_source(str(write(tmp_path, content, name))) as source, pytest.raises(InputError) as caught:
        format_of(source, "auto")
    assert caught.value.code is ErrorCode.INPUT_WRONG_FORMAT
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said", "words"),
    [
        (DIALOGUE, "csv", "dialogues"),
        (CHAT, "text", "chat messages"),
        (b"PAR1", "tsv", "Parquet"),
        (DIALOGUE, "parquet", "dialogues"),
    ],
)
def test_a_file_that_is_not_what_was_said_is_refused(
    tmp_path: Path, content: bytes, said: InputFormat, words: str
) -> None:
    with (
        open_source(str(write(tmp_path, content))) as source,
        pytest.raises(InputError, match=f"looks like {words}"),
    ):
        format_of(source, said)


@pytest.mark.parametrize("said", ["text", "csv", "tsv", "kaldi", "messages"])
@pytest.mark.parametrize(
    ("content", "words"), [(b"id,text\ra,Hello\r", "CR alone"), (b"[" + CHAT + b"]", "one JSON array")]
)
def test_records_that_are_not_in_lines_are_refused_whatever_was_said(
    tmp_path: Path, said: InputFormat, content: bytes, words: str
) -> None:
    with (
        open_source(str(write(tmp_path, content))) as source,
        pytest.raises(InputError, match=words) as caught,
    ):
        format_of(source, said)
    assert caught.value.code is ErrorCode.INPUT_WRONG_FORMAT


@pytest.mark.parametrize("format", ["text", "csv", "tsv", "kaldi"])
def test_a_return_within_a_line_is_refused_by_its_line(tmp_path: Path, format: InputFormat) -> None:
    """One program's lines in another's file: they must not be spoken as one."""
    header = b"text\n" if format in ("csv", "tsv") else b""
    path = write(tmp_path, header + b"u1 one\ru2 two\nu3 three\r\n")
    found = read(path, format)
    assert next(iter(found.values())) == ErrorCode.INPUT_BAD_LINE
    assert list(found.values())[1][1] in ("u3 three", "three")


def test_text_is_a_sentence_a_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        b'\xef\xbb\xbfGood evening.\r\n\n  \n =SUM(A1) "x"\nna\xefve\nn\0ul\n'
        + b"x" * (MAX_LINE_BYTES + 1)
        + b"\nlast",
    )
    assert read(path, "text") == {
        1: ("line-1", "Good evening.", None),
        4: ("line-4", '=SUM(A1) "x"', None),
        5: ErrorCode.INPUT_BAD_LINE,
        6: ErrorCode.INPUT_BAD_LINE,
        7: None,
        8: ("line-8", "last", None),
    }


TABLE = (
    "id,text,voice,seed,reference_audio,other\n"
    'a,"Good, evening.",heart,7,,x\n'
    "\n"
    'b,"two\nlines ""quoted""",,,voice.wav,x\n'
    "c,short\n"
    "d,=1+1,,x,,\n"
    'e,"not" closed,,,,\n'
    "f,fine,,,,\r\n"
    'g,"open,,,,\n'
    "h,after,,,,\n"
)
ROWS = {
    2: ("a", "Good, evening.", {"voice": "heart", "seed": 7}),
    4: ("b", "voice.wav", 'two\nlines "quoted"', None),
    6: ErrorCode.INPUT_BAD_LINE,
    7: ErrorCode.INPUT_BAD_GENERATION,
    8: ErrorCode.INPUT_BAD_LINE,
    9: ("f", "fine", None),
    10: ErrorCode.INPUT_BAD_LINE,
    11: ("h", "after", None),
}


def test_csv_has_the_lines_that_an_editor_shows(tmp_path: Path) -> None:
    assert read(write(tmp_path, TABLE), "csv") == ROWS


def test_batches_of_a_long_table_keep_lines_and_bounds(tmp_path: Path) -> None:
    path = write(tmp_path, "text\n" + "".join(f"Number {number}.\n" for number in range(2, 1001)))
    expected = {line: (f"line-{line}", f"Number {line}.", None) for line in range(351, 1001)}
    assert read(path, "csv", max_lines=100, after=350) == expected


@pytest.mark.parametrize("after", range(13))
@pytest.mark.parametrize("max_lines", [1, 4])
def test_reading_goes_on_after_any_line(tmp_path: Path, after: int, max_lines: int) -> None:
    path = write(tmp_path, TABLE)
    assert read(path, "csv", max_lines=max_lines, after=after) == {
        line: row for line, row in ROWS.items() if line > after
    }


@pytest.mark.parametrize("header", [b"id;text", b'"id";"text"', b"id;satz"])
def test_csv_between_semicolons_is_read_where_the_header_has_no_comma(tmp_path: Path, header: bytes) -> None:
    path = write(tmp_path, b"\n\n" + header + b'\na;"Good; evening, all."\n\n"b";two, three\nc;d;e\n')
    chosen = Reading(columns={"text": "satz"}) if b"satz" in header else ALL
    assert read(path, "csv", chosen) == {
        4: ("a", "Good; evening, all.", None),
        6: ("b", "two, three", None),
        7: ErrorCode.INPUT_BAD_LINE,
    }


@pytest.mark.parametrize("format", ["csv", "tsv"])
def test_a_cell_may_be_as_long_as_a_line(tmp_path: Path, format: InputFormat) -> None:
    long = "x" * (MAX_LINE_BYTES - 2)
    path = write(
        tmp_path,
        f"text\n{long}\n" + (f'"{long}"\n"{long[2:]}\n."\n' if format == "csv" else "") + f"{long}xxx\nend\n",
    )
    found = read(path, format)
    if format == "csv":
        assert [found[line][1] for line in (3, 4)] == [long, f"{long[2:]}\n."]
    assert found[2][1] == long
    assert list(found.values())[-2:] == [ErrorCode.INPUT_TOO_LONG, (f"line-{max(found)}", "end", None)]


class Lines:
    """A source of lines that are read when they are needed."""

    uri = "in"

    def __init__(self, lines: Sequence[bytes]) -> None:
        self._lines = lines
        self.pulled = 0

    def head(self) -> bytes:
        return b"\n".join(self._lines[:2])

    def lines(self) -> Iterator[bytes | None]:
        for line in self._lines:
            self.pulled += 1
            yield line

    def csv_records(self) -> Iterator[Any]:
        return records_of(self, "csv").lines()  # type: ignore[arg-type]


CELLS = st.text(st.characters(exclude_characters="\r\0", exclude_categories=["Cs"]), max_size=12)


@given(st.lists(st.tuples(CELLS, CELLS), max_size=8))
def test_what_python_writes_as_csv_is_read_back(rows: list[tuple[str, str]]) -> None:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([("id", "text"), *rows])
    lines = file.getvalue().encode().split(b"\n")
    records = list(Lines(lines[:-1]).csv_records())
    assert len(records) == len(lines) - 1
    read = [json.loads(record) for record in records if isinstance(record, bytes) and record]
    assert [one["messages"][0][2] for one in read] == [text for _, text in rows]
    assert [one["example_id"] for one in read if not one["example_id"].startswith("line-")] == [
        name for name, _ in rows if name and not name.startswith("line-")
    ]


def test_a_quote_that_never_closes_costs_its_line_alone() -> None:
    content = b'text\n"open\n' + b"fine\n" * (3 * MAX_RECORD_LINES)
    lines = Lines(content.splitlines())
    records = lines.csv_records()
    assert next(records) == b""
    refused = next(records)
    assert isinstance(refused, RejectedLine)
    assert "is not closed" in refused.message
    assert lines.pulled == 1 + MAX_RECORD_LINES
    assert len([record for record in records if isinstance(record, bytes)]) == 3 * MAX_RECORD_LINES


def test_a_table_with_other_names_and_voices_for_speakers(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'clip\tsentence\tspeaker_id\n1.mp3\t"Hi", he said\tanna\n2.mp3\tno\tben\n3.mp3\tbad\t\n',
        "in.tsv",
    )
    chosen = Reading(columns={"id": "clip", "text": "sentence"}, voices={"anna": "heart", "ben": "sky"})
    assert read(path, "tsv", chosen) == {
        2: ("1.mp3", '"Hi", he said', {"voice": "heart"}),
        3: ("2.mp3", "no", {"voice": "sky"}),
        4: ErrorCode.INPUT_UNKNOWN_VOICE,
    }


@pytest.mark.parametrize(
    ("content", "columns", "words"),
    [
        ("words,id\n", None, "has no column `text`; its columns are: 'words', 'id'"),
        ("text,id\n", {"text": "sentence"}, "has no column 'sentence'"),
        ("text,text\n", None, "two columns 'text'"),
        ("\xff\n".encode("latin1"), None, "not UTF-8"),
    ],
)
@pytest.mark.parametrize("format", ["csv", "tsv"])
def test_a_table_without_its_columns_is_refused(
    tmp_path: Path, content: Any, columns: Any, words: str, format: InputFormat
) -> None:
    raw = content if isinstance(content, bytes) else content.encode()
    path = write(tmp_path, raw.replace(b",", b"\t") if format == "tsv" else raw)
    with pytest.raises(InputError, match=words) as caught:
        read(path, format, Reading(columns=columns))
    assert caught.value.code is ErrorCode.INPUT_WRONG_FORMAT


def test_kaldi_has_ids_words_and_speakers(tmp_path: Path) -> None:
    path = write(tmp_path, b"u1  good evening \nu2 hello\nu3\nu4 bye\n\xff no\n")
    heard = {
        1: ("u1", "good evening", None),
        2: ("u2", "hello", None),
        3: ("u3", "", None),
        4: ("u4", "bye", None),
    }
    assert read(path, "kaldi") == heard | {5: ErrorCode.INPUT_BAD_LINE}
    write(tmp_path, b"u0 zed\nu1 anna\nu2 ben\nu4 anna\n", "utt2spk")
    voices = Reading(voices={"anna": "heart", "*": "sky"})
    assert read(path, "kaldi", voices) == {
        1: ("u1", "good evening", {"voice": "heart"}),
        2: ("u2", "hello", {"voice": "sky"}),
        3: ErrorCode.INPUT_BAD_LINE,
        4: ("u4", "bye", {"voice": "heart"}),
        5: ErrorCode.INPUT_BAD_LINE,
    }


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_a_row_with_two_ids_that_differ_is_refused_unless_one_is_chosen(
    tmp_path: Path, format: InputFormat
) -> None:
    path = tmp_path / "in"
    columns: dict[str, list[str]] = {
        "text": ["hi"] * 4,
        "example_id": ["a", "b", "", "d"],
        "id": ["a", "x", "c", ""],
    }
    if format == "parquet":
        parquet.write_table(pyarrow.table(columns), path)
    else:
        path.write_text(
            "".join(",".join(row) + "\n" for row in [tuple(columns), *zip(*columns.values(), strict=True)])
        )
    first = 1 if format == "parquet" else 2
    assert list(read(path, format).values()) == [
        ("a", "hi", None),
        ErrorCode.INPUT_BAD_LINE,
        ("c", "hi", None),
        ("d", "hi", None),
    ]
    assert read(path, format, Reading(columns={"id": "id"}))[first + 1] == ("x", "hi", None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            {"id": "a", "example_id": "b", "messages": [{"role": "user", "content": "hi"}]},
            ErrorCode.INPUT_BAD_LINE,
        ),
        ({"id": 7, "messages": [{"role": "user", "content": "hi"}]}, ("7", [["user", "text", "hi"]])),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    }
                ]
            },
            ("line-3", None),
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ErrorCode.INPUT_BAD_MODALITY),
        ({"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}, ErrorCode.INPUT_BAD_LINE),
        ({"messages": [{"role": "assistant", "content": None}]}, ErrorCode.INPUT_BAD_LINE),
        ({"messages": [["user", "text", "hi"]]}, ErrorCode.INPUT_BAD_LINE),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', ErrorCode.INPUT_BAD_JSON),
        (b"[" * 10_000, ErrorCode.INPUT_BAD_LINE),
    ],
)
def test_chat_messages(line: dict[str, Any] | bytes, expected: Any) -> None:
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    if isinstance(expected, ErrorCode):
        with pytest.raises(InputError) as caught:
            chat_dialogue(raw, 3)
        assert caught.value.code is expected
        return
    dialogue = json.loads(chat_dialogue(raw, 3))
    assert dialogue["example_id"] == expected[0]
    assert dialogue["messages"] == (expected[1] or [["user", "text", "a\nb"]])


def test_parquet_rows(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    bad = pyarrow.array([b"ok", b"\xff", None], pyarrow.binary()).view(pyarrow.string())
    audio = pyarrow.array([b"x" * 100] * 3)
    parquet.write_table(pyarrow.table({"text": bad, "id": pyarrow.array([1, 2, 3]), "audio": audio}), path)
    assert read(path, "parquet") == {1: ("1", "ok", None), 2: ErrorCode.INPUT_BAD_LINE, 3: ("3", "", None)}
    with open_source(str(path)) as source:
        assert format_of(source, "auto") == "parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError) as caught:
        read(path, "parquet")
    assert caught.value.code is ErrorCode.INPUT_UNREADABLE


def test_parquet_of_chats_and_of_numbers(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"messages": [[{"role": "user", "content": "hi"}]]}), path)
    assert read(path, "parquet") == {1: ("line-1", "hi", None)}
    parquet.write_table(pyarrow.table({"text": [1.5]}), path)
    assert read(path, "parquet") == {1: ErrorCode.INPUT_BAD_LINE}


@pytest.mark.parametrize("format", ["text", "csv", "dialogues"])
def test_a_limit_is_the_first_records(tmp_path: Path, format: InputFormat) -> None:
    lines = [b"text"] * (format == "csv") + [DIALOGUE.strip() if format == "dialogues" else b"line"] * 9
    path = write(tmp_path, b"\n\n".join(lines))
    whole = read(path, format)
    for limit in (1, 4, 9, 20):
        assert read(path, format, Reading(limit=limit)) == dict(list(whole.items())[:limit])


def test_a_sample_is_the_same_each_time_and_of_the_whole_input(tmp_path: Path) -> None:
    path = write(tmp_path, "\n\n".join(f"sentence {number}" for number in range(500)))
    whole = read(path, "text", max_lines=100)
    seen: set[int] = set()
    for seed in range(40):
        chosen = read(path, "text", Reading(sample=50), max_lines=100, seed=seed)
        assert chosen == read(path, "text", Reading(sample=50), max_lines=7, seed=seed)
        assert len(chosen) == 50
        assert chosen.items() <= whole.items()
        seen |= chosen.keys()
    assert (
        read(path, "text", Reading(sample=50), after=400, seed=1).items()
        <= read(path, "text", Reading(sample=50), seed=1).items()
    )
    # Of 500 lines, each is missed 40 times in a row with a chance of 1.5 %.
    assert len(seen) > 450
    assert read(path, "text", Reading(sample=501)) == whole


LARGE = r"""
import re, sys
from pathlib import Path
from jobs.input_records import MAX_RECORD_LINES, Records
from jobs.ledger.records import JobSpec, Reading
from jobs.source import open_source
from pipelines.registry import describe
import pyarrow.parquet
def read(path, format):
    with open_source(path) as source:
        spec = JobSpec(model="hibari", reading=Reading(sample=1000))
        lines = Records(source, format, spec, describe("hibari")).lines()
        assert sum(isinstance(line, bytes) and len(line) > 0 for line in lines) == 1000
    print(int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10)

for size in ("2000", "200000"):
    for format in sys.argv[2:]:
        read(f"{sys.argv[1]}/{format}-{size}", format)
"""


def test_an_input_of_any_length_needs_little_memory(tmp_path: Path) -> None:
    formats = ["text", "csv", "kaldi", "parquet"]
    words = random.Random(0).choices(["good", "evening", "train"], k=20)
    for rows in (2_000, 200_000):
        lines = [f"u{number} {' '.join(words)}\n" for number in range(rows)]
        for name in formats:
            (tmp_path / f"{name}-{rows}").write_text(("text\n" if name == "csv" else "") + "".join(lines))
        parquet.write_table(
            pyarrow.table({"text": [line.strip() for line in lines]}), tmp_path / f"parquet-{rows}"
        )
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(tmp_path), *formats], capture_output=True, text=True, check=True
    )
    peaks = list(map(int, done.stdout.split()))
    small, large = peaks[: len(formats)], peaks[len(formats) :]
    grown = dict(zip(formats, (after - before for before, after in zip([small[-1], *large], large))))
    # 200,000 rows are 25 MB; as Python's objects, a multiple of that.
    assert max(grown.values()) < 30, grown
