"""Columns and keys that are no field of a dialogue become keys of its line, in every format of inputs, with
their values; names that cannot are refused by name."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pytest
from lhotse import AudioSource, CutSet, MonoCut, Recording, SupervisionSegment
from pyarrow import feather, ipc, parquet

from jobs.input_records import Records, left_out_note
from jobs.ledger.records import JobSpec, Reading, RejectedLine
from jobs.source import MAX_LINE_BYTES, AskedFormat, batches_of, check_source, format_of, open_source
from nightjar.inputs import written_input
from pipelines.errors import ErrorCode, InputError
from pipelines.registry import describe

ALL = Reading()


def lines_of(
    path: Path, chosen: Reading = ALL, asked: AskedFormat = "auto", *, after: int = 0, notes: Any = None
) -> list[Any]:
    """The lines as JSON, or the code and message of a refused one, without blank ones."""
    found: list[Any] = []
    with open_source(str(path)) as source:
        spec = JobSpec(model="hibari", reading=chosen)
        records = Records(source, format_of(source, asked), spec, describe("hibari"))
        for batch in batches_of(records.lines(), 3, 1 << 20, after):
            for record in batch.lines:
                if isinstance(record, RejectedLine):
                    found.append((record.code, record.message))
                elif record and record.strip():
                    found.append(json.loads(record))
        if notes is not None:
            notes.append(left_out_note(records.left_out))
    return found


def metadata(lines: list[Any]) -> list[Any]:
    """The keys of lines that are not a dialogue's own."""
    own = ("example_id", "messages", "generation")
    return [
        {key: value for key, value in line.items() if key not in own} if isinstance(line, dict) else line
        for line in lines
    ]


def write(tmp_path: Path, content: str | bytes, name: str) -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(path: Path, chosen: Reading = ALL) -> str:
    with pytest.raises(InputError) as caught:
        lines_of(path, chosen)
    assert caught.value.code is ErrorCode.INPUT_WRONG_FORMAT
    return str(caught.value)


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.tsv", "\t")])
def test_other_columns_of_a_table_are_texts_under_their_names(
    tmp_path: Path, name: str, separator: str
) -> None:
    rows = [
        ["", "id", "text", "speaker", "zip", " age ", "e\x1bsc"],
        ["0", "a", "Hi", "anna", "007", "", "x\x1b"],
    ]
    path = write(tmp_path, "\n".join(separator.join(row) for row in rows), name)
    (line,) = lines_of(path)
    assert line == {
        "example_id": "a",
        "messages": [["user", "text", "Hi"]],
        "column 1": "0",
        "speaker": "anna",
        "zip": "007",
        "age": "",
        "e\x1bsc": "x\x1b",
    }


@pytest.mark.parametrize(
    ("header", "chosen", "words"),
    [
        ("text,text", Reading(drop=["text"]), "has two columns 'text'. Rename it."),
        ("text,a,a", ALL, "has two columns 'a'. Rename it, or leave it out: --drop 'a'"),
        (
            "text,generation",
            ALL,
            "a key of dialogues, 'generation'. Rename it, or leave it out: --drop 'generation'",
        ),
        ("text,messages", ALL, "a key of dialogues, 'messages'"),
        ("text,a", Reading(drop=["b"]), "has no column 'b'. Its columns are: 'text', 'a'"),
        ("text,a", Reading(keep=["b"]), "has no column 'b'"),
    ],
)
def test_names_that_collide_or_are_unknown_are_refused_by_name(
    tmp_path: Path, header: str, chosen: Reading, words: str
) -> None:
    assert words in refusal(write(tmp_path, f"{header}\nHi,x,y\n", "a.csv"), chosen)


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (Reading(keep=["b"]), ["b"]),
        (Reading(drop=["b", "text"]), ["c"]),
        (Reading(drop=["*"]), []),
        (Reading(keep=[]), []),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "twice", "dialogues", "messages", "rows", "parquet", "python"])
def test_keep_and_drop_choose(tmp_path: Path, chosen: Reading, names: list[str], kind: str) -> None:
    row = {"text": "Hi", "b": "1", "c": "2"}
    message = {"messages": [["user", "text", "Hi"]]}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    rest = {"id": "a", "b": "1", "c": "2"}
    path = tmp_path / "in"
    if kind == "csv":
        path = write(tmp_path, "text,b,c\nHi,1,2\n", "a.csv")
    elif kind == "twice":
        # Names that are left out may collide.
        if "c" in names:
            return
        path = write(tmp_path, "text,b,c,c,generation\nHi,1,2,3,4\n", "a.csv")
        chosen = (
            chosen if chosen.drop is None or "*" in chosen.drop else Reading(drop=["b", "c", "generation"])
        )
    elif kind == "parquet":
        parquet.write_table(pyarrow.table({name: [value] for name, value in row.items()}), path)
    elif kind == "python":
        path = written_input([row], JobSpec("m", reading=chosen), tmp_path)
    else:
        line = row if kind == "rows" else rest | (message if kind == "dialogues" else chat)
        path.write_text(json.dumps(line))
    (line,) = metadata(lines_of(path, chosen))
    line.pop("id", None)
    assert line == {name: row[name] for name in names}


def test_a_line_that_no_option_changes_keeps_its_bytes(tmp_path: Path) -> None:
    raw = b'{ "example_id":"a", "x": 1.10, "messages":[["user","text","Hi"]]}'
    path = write(tmp_path, raw, "a.jsonl")
    with open_source(str(path)) as source:
        for chosen in (ALL, Reading(drop=["y"])):
            spec = JobSpec("hibari", reading=chosen)
            assert [*Records(source, "dialogues", spec, describe("hibari")).lines()] == [raw]


NIGHT = datetime.datetime(2026, 11, 27, 23, 59, 1, 500_000)
TYPED: dict[str, tuple[pyarrow.DataType, Any, Any]] = {
    "day": (pyarrow.date32(), NIGHT.date(), "2026-11-27"),
    "time": (pyarrow.timestamp("us", "UTC"), NIGHT, "2026-11-27T23:59:01.500000+00:00"),
    "nanos": (pyarrow.timestamp("ns"), 1_000_000_001, "1970-01-01T00:00:01.000000001"),
    "price": (pyarrow.decimal128(20, 2), decimal.Decimal("123456789012345678.90"), "123456789012345678.90"),
    "big": (pyarrow.uint64(), 2**64 - 1, 2**64 - 1),
    "nothing": (pyarrow.null(), None, None),
    "none": (pyarrow.int32(), None, None),
    "nan": (pyarrow.float32(), float("nan"), None),
    "half": (pyarrow.float64(), 0.1, 0.1),
    "yes": (pyarrow.bool_(), True, True),
    "kind": (pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), "a", "a"),
    "nested": (
        pyarrow.struct([("x", pyarrow.list_(pyarrow.float64()))]),
        {"x": [1.5, float("nan")]},
        {"x": [1.5, None]},
    ),
    "a.b": (pyarrow.string(), "Größe", "Größe"),
}


def typed_table() -> pyarrow.Table:
    columns = {name: pyarrow.array([value], kind) for name, (kind, value, _) in TYPED.items()}
    audio = pyarrow.array([{"bytes": b"RIFF", "path": "a.wav"}])
    return pyarrow.table({"text": ["Hi"], **columns, "audio": audio, "raw": [b"x"]})


@pytest.mark.parametrize(
    "kind", ["parquet", "stream", "feather", "folder", "table", "reader", "dataset", "iterable"]
)
def test_typed_columns_have_the_types_of_json_and_bytes_are_left_out_with_a_note(
    tmp_path: Path, kind: str
) -> None:
    table, path, notes = typed_table(), tmp_path / "in", list[str]()
    if kind == "parquet":
        parquet.write_table(table, path)
    elif kind == "stream":
        with ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    elif kind == "feather":
        feather.write_feather(table, path, compression="lz4")
    else:
        dataset = datasets.Dataset(table.drop_columns("kind")).cast_column("audio", datasets.Audio())
        if kind == "folder":
            dataset.save_to_disk(path)
        else:
            given: Any = {
                "table": table,
                "reader": table.to_reader(),
                "dataset": dataset,
                "iterable": dataset.to_iterable_dataset(),
            }[kind]
            path = written_input(given, JobSpec("m"), tmp_path, notes.append)
    wanted = {name: value for name, (_, _, value) in TYPED.items()}
    if kind in ("folder", "dataset", "iterable"):
        del wanted["kind"]
    asked = None if kind in ("table", "reader", "dataset", "iterable") else notes
    assert metadata(lines_of(path, notes=asked)) == [wanted]
    assert notes == ["Columns with audio or other bytes are left out: 'audio', 'raw'."]


def test_a_data_frame_is_a_table_and_its_missing_values_are_null(tmp_path: Path) -> None:
    frame = pandas.DataFrame(
        {
            "text": ["one", "two", "three"],
            "age": [1, None, 3],
            "day": [pandas.Timestamp("2026-11-27"), None, None],
        }
    ).iloc[[2, 0, 1]]
    assert metadata(lines_of(written_input(frame, JobSpec("m"), tmp_path))) == [
        {"age": 3.0, "day": None},
        {"age": 1.0, "day": "2026-11-27T00:00:00"},
        {"age": None, "day": None},
    ]
    with pytest.raises(InputError, match=r"is no table: .*mixed.*Give each column one type"):
        written_input(pandas.DataFrame({"text": ["a", "b"], "mixed": [1, "x"]}), JobSpec("m"), tmp_path)
    with pytest.raises(InputError, match=r"is no table: .*too large"):
        written_input(pandas.DataFrame({"text": ["a", "b"], "n": [2**70, 1]}), JobSpec("m"), tmp_path)
    texts = written_input(frame["text"], JobSpec("m"), tmp_path)
    assert [json.loads(line)["messages"] for line in texts.read_text().splitlines()] == [
        [["user", "text", text]] for text in frame["text"]
    ]
    with pytest.raises(InputError, match="no column 'words'"):
        written_input(frame, JobSpec("m", reading=Reading(columns={"text": "words"})), tmp_path)


def test_a_table_with_texts_and_chats_is_refused_until_one_is_left_out(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"text": ["spoken"], "messages": [[{"role": "user", "content": "chat"}]]})
    with pytest.raises(InputError, match="name of a key of dialogues, 'messages'"):
        written_input(frame, JobSpec("m"), tmp_path)
    chosen = JobSpec("m", reading=Reading(drop=("messages",)))
    (line,) = lines_of(written_input(frame, chosen, tmp_path))
    assert line["messages"] == [["user", "text", "spoken"]]


def test_a_speaker_that_chooses_no_voice_is_metadata_of_any_type(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"text": ["a", "b"], "speaker_id": [7, None]})
    assert metadata(lines_of(written_input(frame, JobSpec("m"), tmp_path))) == [
        {"speaker_id": 7.0},
        {"speaker_id": None},
    ]
    chosen = JobSpec("m", reading=Reading(drop=("speaker_id",)))
    assert metadata(lines_of(written_input(frame, chosen, tmp_path))) == [{}, {}]


def test_a_speaker_that_chooses_a_voice_is_metadata_too(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"text": ["a"], "speaker": ["anna"]})
    chosen = JobSpec("m", reading=Reading(voices={"anna": "heart"}))
    (line,) = lines_of(written_input(frame, chosen, tmp_path))
    assert (line["speaker"], line["generation"]["voice"]) == ("anna", "heart")


@pytest.mark.parametrize("value", [float("inf"), b"x"])
@pytest.mark.parametrize("message", [["user", "text", "Hi."], {"role": "user", "content": "Hi."}])
def test_a_dialogue_of_python_has_no_values_that_json_does_not_have(
    tmp_path: Path, message: Any, value: Any
) -> None:
    with pytest.raises(InputError, match="Record 1 cannot be written as JSON"):
        written_input([{"messages": [message], "more": [value]}], JobSpec("m"), tmp_path)


def test_a_value_that_json_does_not_have_refuses_its_row_by_name(tmp_path: Path) -> None:
    path = tmp_path / "in"
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "gain": [1.0, float("-inf")]}), path)
    first, (code, message) = lines_of(path)
    assert first["gain"] == 1.0
    assert code is ErrorCode.INPUT_BAD_LINE
    assert (
        "The column 'gain' cannot be read: it is infinite. Correct it, or leave it out with --drop."
        in message
    )
    long = pyarrow.table({"text": ["a"], "matrix": [[0.123456789] * (MAX_LINE_BYTES // 8)]})
    parquet.write_table(long, path)
    ((code, message),) = lines_of(path)
    assert code is ErrorCode.INPUT_TOO_LONG
    assert "--drop" in message


def test_values_of_python_that_json_does_not_have_are_left_out_with_a_note(tmp_path: Path) -> None:
    notes: list[str] = []
    rows = [{"text": "a", "image": object(), "raw": b"x", "age": 1}, {"text": "b", "age": 2}]
    path = written_input(rows, JobSpec("m"), tmp_path, notes.append)
    assert metadata(lines_of(path)) == [{"age": 1}, {"age": 2}]
    assert notes == ["Columns with audio or other bytes are left out: 'image', 'raw'."]
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InputError, match="Record 1: The column 'deep' cannot be read"):
        written_input([{"text": "a", "deep": deep}], JobSpec("m"), tmp_path)


def test_other_keys_of_chats_stay(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "topic": ["a", 1.5], "voice": "x"}
    path = write(tmp_path, json.dumps(chat), "a.jsonl")
    assert metadata(lines_of(path)) == [{"topic": ["a", 1.5], "voice": "x"}]
    table = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{**chat, "topic": "a"}]), table)
    assert metadata(lines_of(table)) == [{"topic": "a", "voice": "x"}]


NEMO = [
    {
        "audio_filepath": "a.wav",
        "duration": 1.25,
        "text": "one",
        "lang": "en",
        "big": 12345678901234567890123,
    },
    {"audio_filepath": "b.wav", "duration": 2, "text": "two", "id": 7, "voice": "heart"},
]


def test_rows_of_json_and_a_manifest_of_nemo(tmp_path: Path) -> None:
    bad = '{"text": 1.5}\n{"audio_filepath": "c.wav"}\n[1]\n{"text": "x", "id": "\xff"}\n'.encode("latin1")
    path = write(tmp_path, "".join(json.dumps(row) + "\n\n" for row in NEMO).encode() + bad, "manifest.json")
    first, second, *refused = lines_of(path)
    assert first == {"example_id": "line-1", "messages": [["user", "text", "one"]]} | {
        key: value for key, value in NEMO[0].items() if key != "text"
    }
    assert (second["example_id"], second["generation"], second["duration"]) == ("7", {"voice": "heart"}, 2)
    assert [code for code, _ in refused] == [ErrorCode.INPUT_BAD_LINE] * 3 + [ErrorCode.INPUT_BAD_JSON]
    assert "The input has no column `text`; its columns are: 'audio_filepath'" in refused[1][1]
    chosen = Reading(columns={"text": "lang"})
    assert metadata(lines_of(path, chosen, "rows"))[0]["text"] == "one"


def supervision(number: int, text: str | None) -> SupervisionSegment:
    return SupervisionSegment(
        f"s{number}", "rec", 0.5, 1.0, text=text, speaker="anna", language="German", custom={"snr": 20.5}
    )


@pytest.mark.parametrize("name", ["cuts.jsonl", "cuts.jsonl.gz"])
def test_cuts_of_lhotse(tmp_path: Path, name: str) -> None:
    rec = Recording("rec", [AudioSource("file", [0], "rec.wav")], 8000, 16_000, 2.0)
    one, other, third = (
        MonoCut(f"c{first}", 0.0, 2.0, 0, [supervision(n, f"text {n}") for n in numbers], recording=rec)
        for first, *numbers in ((1, 1, 2), (2, 3), (3, 4))
    )
    mixed = third.mix(other, offset_other_by=1.0)
    silent = MonoCut("c4", 0.0, 2.0, 0, [supervision(5, None), supervision(6, "text 6")], recording=rec)
    cuts = CutSet.from_cuts([one, MonoCut("c0", 0.0, 1.0, 0), mixed, silent])
    path = tmp_path / name
    cuts.to_file(path)
    lines = lines_of(path)
    ids = [line["example_id"] if isinstance(line, dict) else line[0] for line in lines]
    bad = ErrorCode.INPUT_BAD_LINE
    assert ids == ["s1", "s2", bad, "s4", "s3", bad, "s6"]
    assert lines[0]["messages"] == [["user", "text", "text 1"]]
    assert lines[0]["speaker"] == "anna"
    assert lines[0]["supervision"] == {
        "recording_id": "rec",
        "start": 0.5,
        "duration": 1.0,
        "channel": 0,
        "language": "German",
        "custom": {"snr": 20.5},
    }
    assert (lines[0]["cut"]["id"], lines[3]["cut"]["id"]) == ("c1", mixed.id)
    with open_source(str(path)) as source:
        spec = JobSpec(model="hibari", reading=ALL)
        records = Records(source, format_of(source, "auto"), spec, describe("hibari")).lines()
        assert [one.line for one in records if isinstance(one, RejectedLine)] == [3, 6]
    for after in range(8):
        assert lines_of(path, after=after) == lines[after:]
    voices = Reading(voices={"*": "heart"})
    assert lines_of(path, voices)[0]["generation"] == {"voice": "heart"}
    segments = write(tmp_path, json.dumps(supervision(9, "nine").to_dict()), "supervisions.jsonl")
    assert metadata(lines_of(segments)) == [{key: lines[0][key] for key in ("speaker", "supervision")}]
    assert format_named(segments) == "lhotse"


def format_named(path: Path) -> str:
    with open_source(str(path)) as source:
        return format_of(source, "auto")


def test_a_dataset_folder_has_all_its_files_and_splits_are_to_be_chosen(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_dict({"text": [f"text {number}" for number in range(10)], "n": range(10)})
    dataset.save_to_disk(tmp_path / "one", num_shards=3)
    both = datasets.DatasetDict({"train": dataset, "test": dataset})
    both.save_to_disk(tmp_path / "both")
    for path in (tmp_path / "one", tmp_path / "both" / "test"):
        assert check_source(str(path)) == str(path)
        assert [line["n"] for line in lines_of(path)] == list(range(10))
        assert [line["n"] for line in lines_of(path, after=7)] == [7, 8, 9]
    with open_source(str(tmp_path / "one")) as source:
        before = source.sha256
        files = sorted((tmp_path / "one").glob("*.arrow"))
        files[1].write_bytes(files[2].read_bytes())
        with pytest.raises(InputError, match="changed while it was read"):
            source.check_unchanged()
    with open_source(str(tmp_path / "one")) as source:
        assert source.sha256 != before
    splits = f"{tmp_path / 'both' / 'test'}, {tmp_path / 'both' / 'train'}"
    for call in (check_source, lambda path: open_source(path).__enter__()):
        with pytest.raises(InputError, match="several splits") as caught:
            call(str(tmp_path / "both"))
        assert splits in caught.value.advice
    files[0].unlink()
    with pytest.raises(InputError, match="cannot be read: No such file"):
        open_source(str(tmp_path / "one")).__enter__()
    (tmp_path / "one" / "state.json").unlink()
    with pytest.raises(InputError, match="is a folder"):
        check_source(str(tmp_path / "one"))


@pytest.mark.parametrize("content", [b"ARROW1\0\0", b"\xff\xff\xff\xff\x10\0\0\0", b"PAR1PAR1", b"cut"])
def test_a_damaged_binary_file_is_unreadable(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "in.arrow"
    if content == b"cut":
        with ipc.new_stream(str(path), typed_table().schema) as writer:
            writer.write_table(typed_table())
        content = path.read_bytes()[:-200]
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        lines_of(path)
    assert caught.value.code is ErrorCode.INPUT_UNREADABLE


def test_the_other_files_of_kaldi_are_metadata(tmp_path: Path) -> None:
    path = write(tmp_path, "b good evening\na hello\nc bye\n", "text")
    write(tmp_path, "a anna\nb ben\n", "utt2spk")
    write(tmp_path, "a 1.50\nb 2\nx 3\n", "utt2dur")
    write(tmp_path, "anna f\nben m\n", "spk2gender")
    for other in ("spk2utt", "utt2spk.old", "wav.scp"):
        write(tmp_path, "a x\n", other)
    lines = lines_of(path, asked="kaldi")
    assert metadata(lines) == [
        {"utt2dur": "2", "utt2spk": "ben", "spk2gender": "m"},
        {"utt2dur": "1.50", "utt2spk": "anna", "spk2gender": "f"},
        {},
    ]
    kept = lines_of(path, Reading(keep=["spk2gender"], voices={"*": "heart"}), "kaldi")
    assert metadata(kept[:2]) == [{"spk2gender": "m"}, {"spk2gender": "f"}]
    assert kept[0]["generation"] == {"voice": "heart"}
    assert kept[2][0] is ErrorCode.INPUT_BAD_LINE


def test_ten_thousand_columns_are_read(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(10_000)]
    path = write(tmp_path, ",".join(["text", *names]) + "\n" + ",".join(["Hi", *names]) + "\n", "a.csv")
    assert metadata(lines_of(path)) == [dict(zip(names, names, strict=True))]


def test_gzip_of_rows_is_recognized(tmp_path: Path) -> None:
    path = write(tmp_path, gzip.compress(json.dumps(NEMO[0]).encode()), "a.json.gz")
    assert format_named(path) == "rows"
