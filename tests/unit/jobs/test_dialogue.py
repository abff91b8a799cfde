"""Lines of an input file: what is accepted, and the code of everything that is not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.dialogue import MAX_EXAMPLE_ID_CHARACTERS, parse_line, speech_position, spoken_text
from jobs.formatting import printable
from pipelines.errors import ErrorCode, InputError
from pipelines.request import Generation, Message


def line(example_id: object = "a", messages: object = None, **rest: object) -> bytes:
    return json.dumps(
        {
            "example_id": example_id,
            "messages": [["user", "text", "hi"]] if messages is None else messages,
            **rest,
        }
    ).encode()


def test_a_whole_line() -> None:
    parsed, _ = parse_line(
        line(
            "utt 1",
            [["system", "text", "calm"], ["user", "audio", "x.wav"]],
            generation={"voice": "v", "cfg": 2},
        )
    )
    assert parsed.example_id == "utt 1"
    assert parsed.typed_messages() == (Message("system", "text", "calm"), Message("user", "audio", "x.wav"))
    assert parsed.generation == Generation(voice="v", cfg=2.0)


@pytest.mark.parametrize(
    "example_id",
    [
        "../../x",
        "x" * MAX_EXAMPLE_ID_CHARACTERS,
        "日本語",
        "two\nlines",
        "'; DROP TABLE items; --",
        "$(rm -rf /)",
        " ",
        "\x7f",
    ],
)
def test_an_example_id_is_data(example_id: str) -> None:
    assert parse_line(line(example_id))[0].example_id == example_id


MESSAGES = b'"messages":[["user","text","hi"]]}'


@pytest.mark.parametrize(
    ("raw", "example_id"),
    [
        (b' {"id":"a",%b' % MESSAGES, "a"),
        (b'{"note":"example_id","id":7,%b' % MESSAGES, "7"),
        (b'{"id":"a","example_id":"a",%b' % MESSAGES, "a"),
        (b'{"id":null,"example_id":"a",%b' % MESSAGES, "a"),
        (b'{"id":["x"],"example_id":"a",%b' % MESSAGES, "a"),
        (b'{"id":"\\u00e9\\n",%b' % MESSAGES, "\u00e9\n"),
    ],
)
def test_an_id_is_an_example_id(raw: bytes, example_id: str) -> None:
    dialogue, line = parse_line(raw)
    assert dialogue.example_id == example_id
    # Every reader of the line finds it; what else it says is still there.
    assert json.loads(line) == {**json.loads(raw), "example_id": example_id}


def test_two_ids_that_differ_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="`example_id` and `id` differ: 'a' and 'b'") as caught:
        parse_line(b'{"example_id":"a","id":"b",%b' % MESSAGES)
    assert caught.value.code is ErrorCode.INPUT_BAD_LINE
    with pytest.raises(InputError, match="no `example_id`"):
        parse_line(b"{%b" % MESSAGES)


BAD = [
    (b"{", ErrorCode.INPUT_BAD_JSON),
    (b"hello", ErrorCode.INPUT_BAD_JSON),
    (line() + b" x", ErrorCode.INPUT_BAD_JSON),
    (line() + line(), ErrorCode.INPUT_BAD_JSON),
    (b'{"example_id":"\xff","messages":[["user","text","hi"]]}', ErrorCode.INPUT_BAD_JSON),
    (b'{"example_id":"a","messages":[["user","text","hi"]],"other":"\xff"}', ErrorCode.INPUT_BAD_JSON),
    (b'{"example_id":"\\ud800","messages":[["user","text","hi"]]}', ErrorCode.INPUT_BAD_JSON),
    (b'{"example_id":"a","messages":[["user","text","\\udc00"]]}', ErrorCode.INPUT_BAD_JSON),
    (b'{"example_id":"a","messages":[],"deep":' + b"[" * 100_000, ErrorCode.INPUT_BAD_JSON),
    (b'{"example_id":"a","messages":NaN}', ErrorCode.INPUT_BAD_JSON),
    (b"[]", ErrorCode.INPUT_BAD_LINE),
    (b"null", ErrorCode.INPUT_BAD_LINE),
    (b"{}", ErrorCode.INPUT_BAD_LINE),
    (b'{"example_id":"a"}', ErrorCode.INPUT_BAD_LINE),
    (line(5), ErrorCode.INPUT_BAD_LINE),
    (b'{"id":"",%b' % MESSAGES, ErrorCode.INPUT_BAD_LINE),
    (b'{"id":null,%b' % MESSAGES, ErrorCode.INPUT_BAD_LINE),
    (b'{"id":true,%b' % MESSAGES, ErrorCode.INPUT_BAD_LINE),
    (b'{"id":"\\ud800",%b' % MESSAGES, ErrorCode.INPUT_BAD_JSON),
    (b'{"id":%b,%b' % (b"1" * 5000, MESSAGES), ErrorCode.INPUT_BAD_JSON),
    (line(""), ErrorCode.INPUT_BAD_LINE),
    (line("a\0b"), ErrorCode.INPUT_BAD_LINE),
    (line("x" * (MAX_EXAMPLE_ID_CHARACTERS + 1)), ErrorCode.INPUT_BAD_LINE),
    (line("日" * 700), ErrorCode.INPUT_BAD_LINE),
    (line("a", []), ErrorCode.INPUT_BAD_LINE),
    (line("a", {}), ErrorCode.INPUT_BAD_LINE),
    (line("a", [["user", "text"]]), ErrorCode.INPUT_BAD_LINE),
    (line("a", [["user", "text", "hi", 1]]), ErrorCode.INPUT_BAD_LINE),
    (line("a", [["user", "text", 5]]), ErrorCode.INPUT_BAD_LINE),
    (line("a", [[None, "text", "hi"]]), ErrorCode.INPUT_BAD_LINE),
    (line("a", [["robot", "text", "hi"]]), ErrorCode.INPUT_BAD_ROLE),
    (line("a", [["User", "text", "hi"]]), ErrorCode.INPUT_BAD_ROLE),
    (line("a", [["user", "smell", "hi"]]), ErrorCode.INPUT_BAD_MODALITY),
    (line(generation={"sed": 1}), ErrorCode.INPUT_BAD_GENERATION),
    (line(generation={"seed": "1"}), ErrorCode.INPUT_BAD_GENERATION),
    (line(generation={"top_k": 1.5}), ErrorCode.INPUT_BAD_GENERATION),
    (line(generation={"temperature": True}), ErrorCode.INPUT_BAD_GENERATION),
    (line(generation=[]), ErrorCode.INPUT_BAD_GENERATION),
    (
        b'{"example_id":"a","messages":[["user","text","hi"]],"generation":{"cfg":1e999}}',
        ErrorCode.INPUT_BAD_GENERATION,
    ),
]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'"hello"', "Expected `object`, got `str`."),
        (line("a", "hello"), "Expected `array`, got `str` - at `$.messages`."),
        (line("a", [["user", "film", "x"]]), "Invalid enum value 'film' - at `$.messages[0][1]`."),
    ],
)
def test_a_wrong_shape_is_said_with_its_place(raw: bytes, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_line(raw)
    assert caught.value.message == message


@pytest.mark.parametrize(("raw", "code"), BAD)
def test_a_bad_line_has_a_code(raw: bytes, code: ErrorCode) -> None:
    with pytest.raises(InputError) as caught:
        parse_line(raw)
    assert caught.value.code is code
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 600
    assert caught.value.advice


@pytest.mark.parametrize(
    "number",
    [
        "9" * 4301,
        "-" + "9" * 4301,
        "1" * 400_000,
        '"a\\\\", "m":' + "1" * 5000,
        '"\\"", "m":[[' + "1" * 5000 + "]]",
    ],
)
def test_an_integer_that_python_cannot_read_is_refused_wherever_it_stands(number: str) -> None:
    for raw in (line()[:-1] + b',"n":%b}' % number.encode(), b'{"n":%b,' % number.encode() + line()[1:]):
        with pytest.raises(InputError, match="integer of") as caught:
            parse_line(raw)
        assert caught.value.code is ErrorCode.INPUT_BAD_JSON


@pytest.mark.parametrize(
    "value",
    [
        "9" * 4300,
        '"' + "9" * 5000 + '"',
        '"\\"' + "9" * 5000 + '"',
        "0." + "9" * 5000,
        "9" * 5000 + "e-5",
        "9" * 5000 + ".5",
    ],
)
def test_long_numbers_that_python_reads_pass(value: str) -> None:
    raw = line()[:-1] + b',"n":%b}' % value.encode()
    parse_line(raw)
    assert "n" in json.loads(raw)


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: json.dumps([text]).encode()))
def test_any_bytes_end_in_a_dialogue_or_an_input_error(raw: bytes) -> None:
    with pytest.raises(InputError):
        parse_line(raw)


def test_the_place_of_the_speech() -> None:
    assert speech_position([("user", "text")]) == 1
    assert (
        speech_position(
            [("user", "text"), ("assistant", "text"), ("assistant", "audio"), ("assistant", "audio")]
        )
        == 2
    )


def test_the_spoken_text() -> None:
    messages = [
        Message("system", "text", "s"),
        Message("user", "text", " a "),
        Message("user", "audio", "x"),
        Message("user", "text", "b"),
    ]
    assert spoken_text(messages) == "a\nb"


def test_clean_text_is_fit_for_a_terminal() -> None:
    assert printable("a\x1b[31m\0\n\u202e") == "a\\x1b[31m\\x00\\n\\u202e"
    assert len(printable("x" * 10_000, 500)) < 600
