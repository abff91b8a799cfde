"""vLLM-Omni's WebSocket: its messages, what ends what, and wrong messages."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.services.pipelines.test_serve_times import TimedVoice, expected
from tests.services.pipelines.test_serve_websocket import TEXT, UNITS, spoken
from tests.support.serving_kit import Running, b64, wav
from tests.support.stream_voice import StreamVoice
from tests.support.websocket_kit import wire

OMNI = "/v1/audio/speech/stream"
CONFIG = {"type": "session.config", "response_format": "pcm", "stream_audio": True, "seed": 7}


@pytest.fixture
def voice() -> StreamVoice:
    return StreamVoice()


@pytest.fixture
def server(voice: StreamVoice) -> Iterator[Running]:
    with Running(voice, slots=4, waiting_room=4, context_characters=5000) as running:
        yield running
        running.until_idle()


class TestOmni:
    def test_utterances_are_spoken_one_after_the_other(self, server: Running, voice: StreamVoice) -> None:
        with wire(server, OMNI) as client:
            client.send({**CONFIG, "voice": "bob", "language": "english", "task_type": "CustomVoice"})
            pieces = [TEXT[begin : begin + 10] for begin in range(0, len(TEXT), 10)]
            client.send(*({"type": "input.text", "text": piece} for piece in pieces), {"type": "input.done"})
            client.send({"type": "input.text", "text": "Please hold."}, {"type": "input.done"})
            client.send(
                {"type": "input.done"}, {"type": "input.text", "text": "Hello."}, {"type": "input.done"}
            )
            voice.let_go()
            for number, units in enumerate([UNITS, ["Please hold."], [], ["Hello."]]):
                *messages, last = client.until_done()
                assert (last["utterance_index"], last["total_sentences"]) == (number, bool(units))
                assert b"".join(one for one in messages if isinstance(one, bytes)) == (
                    spoken(units) if units else b""
                )
                if units:
                    start, done = messages[0], messages[-1]
                    assert (start["type"], start["format"], start["sample_rate"]) == (
                        "audio.start",
                        "pcm",
                        24_000,
                    )
                    assert (done["type"], done["error"]) == ("audio.done", False)
                    assert done["total_bytes"] == len(spoken(units))
        assert {(one.generation.voice, one.generation.language) for one in voice.requests} == {
            ("bob", "english")
        }
        counted = server.metrics()
        assert counted[f"speech_http_requests_total{{route={OMNI},status=200}}"] == 4

    @pytest.mark.parametrize("asked", ["word_timestamps", "timestamp_type"])
    def test_words_have_the_times_since_the_beginning_of_the_utterance(self, asked: str) -> None:
        in_objects = asked == "word_timestamps"
        with Running(TimedVoice()) as server, wire(server, OMNI) as client:
            client.send({**CONFIG, "language": "Auto", asked: True if in_objects else "word"})
            for _ in range(2):
                client.send({"type": "input.text", "text": TEXT}, {"type": "input.done"})
                *messages, done, _ = client.until_done()
                words = expected(UNITS)
                alignment = done["timestamp_info"]["word_alignment"]
                assert alignment["words"] == [word.text for word in words]
                ends = alignment["word_end_times_seconds"]
                assert ends == pytest.approx([word.end_s for word in words], abs=0.001)
                chunks = [one for one in messages if isinstance(one, bytes)]
                if in_objects:
                    assert chunks == []
                    *parts, last = [one for one in messages if one["type"] == "audio.chunk"]
                    chunks = [base64.b64decode(one["audio_b64"]) for one in parts]
                    assert {one["timestamps"] for one in parts} == {None}
                    assert last["audio_b64"] == ""
                    assert [one["word"] for one in last["timestamps"]] == alignment["words"]
                    in_ms = [one["end_ms"] for one in last["timestamps"]]
                    assert in_ms == [round(1000 * end) for end in ends]
                assert b"".join(chunks) == spoken(UNITS)

    def test_a_failure_ends_its_utterance_and_no_other(self, server: Running, voice: StreamVoice) -> None:
        with wire(server, OMNI) as client:
            client.send(CONFIG, {"type": "input.text", "text": "I break. "})
            assert client.next()["type"] == "audio.start"
            assert isinstance(client.next(), bytes)
            error, done = client.next(), client.next()
            assert (error["type"], error["status_code"], error["error_code"]) == (
                "error",
                503,
                "synth.engine",
            )
            assert (done["type"], done["error"]) == ("audio.done", True)
            # The rest of its text is dropped, and its end is answered once.
            client.send({"type": "input.text", "text": "Not this."}, {"type": "input.done"})
            ended = client.next()
            assert (ended["type"], ended["utterance_index"], ended["total_sentences"]) == (
                "session.done",
                0,
                0,
            )
            client.send({"type": "input.text", "text": "I refuse."}, {"type": "input.done"})
            assert client.next()["error_code"] == "input.unpronounceable"
            assert client.next()["utterance_index"] == 1
            client.send({"type": "input.text", "text": "Hello."}, {"type": "input.done"})
            assert b"".join(one for one in client.until_done() if isinstance(one, bytes)) == spoken(
                ["Hello."]
            )
        assert voice.texts == ["I break.", "Hello."]

    def test_a_client_who_leaves_in_mid_utterance_holds_no_slot(
        self, server: Running, voice: StreamVoice
    ) -> None:
        with wire(server, OMNI) as client:
            client.send(CONFIG, {"type": "input.text", "text": "Please hold."}, {"type": "input.done"})
            client.send({"type": "input.text", "text": "Please hold."}, {"type": "input.done"})
            client.next()
            client.socket.socket.close()
            server.until_idle()
        assert voice.running == 0
        assert len(voice.texts) == 1

    def test_a_close_speaks_what_is_done_and_drops_the_rest(
        self, server: Running, voice: StreamVoice
    ) -> None:
        with wire(server, OMNI) as client:
            client.send(CONFIG, {"type": "input.text", "text": "Please hold."}, {"type": "input.done"})
            client.next()
            client.send({"type": "input.text", "text": "Not this."}, {"type": "session.close"})
            voice.let_go()
            messages = client.until_done()
            assert b"".join(one for one in messages if isinstance(one, bytes)) == spoken(["Please hold."])
            assert client.closed() == 1000

    def test_an_utterance_without_an_end_is_spoken_and_its_end_is_still_answered(
        self, voice: StreamVoice
    ) -> None:
        with Running(voice, context_idle_seconds=0.2) as server, wire(server, OMNI) as client:
            client.send(CONFIG, {"type": "input.text", "text": "It is lat"})
            messages = client.until("type", "audio.done")
            assert b"".join(one for one in messages if isinstance(one, bytes)) == spoken(["It is lat"])
            client.send({"type": "input.text", "text": "e."}, {"type": "input.done"})
            assert client.next()["type"] == "session.done"

    def test_a_recording_in_the_configuration_is_the_voice(self) -> None:
        voice = StreamVoice(cloning=True)
        with Running(voice) as server, wire(server, OMNI) as client:
            client.send({**CONFIG, "ref_audio": b64(wav(1.0)), "ref_text": "A sine."})
            client.send({"type": "input.text", "text": "Hello."}, {"type": "input.done"})
            client.until_done()
            for wrong, code in (
                ("!!!", "input.audio_unreadable"),
                ("http://x/y.wav", "input.audio_forbidden"),
                (b64(b"RIFF"), "input.audio_unreadable"),
            ):
                client.send({**CONFIG, "ref_audio": wrong})
                assert client.next()["error_code"] == code
            # The configuration before it still holds.
            client.send({"type": "input.text", "text": "Hello."}, {"type": "input.done"})
            client.until_done()
        assert [len(request.messages) for request in voice.requests] == [2, 2]
        assert voice.requests[1].generation.reference_text == "A sine."

    @pytest.mark.parametrize(
        ("fields", "code"),
        [
            ({"voice": "nobody"}, "input.unknown_voice"),
            ({"speaker": "nobody"}, "input.unknown_voice"),
            ({"model": "other"}, "model_not_found"),
            ({"language": "tlh"}, "input.unknown_language"),
            ({"speed": 2.0}, "input.unsupported"),
            ({"instructions": "Whisper."}, "input.unsupported"),
            ({"stream_audio": False}, "input.unsupported"),
            ({"response_format": "wav"}, "input.unsupported"),
            ({"response_format": None}, "input.unsupported"),
            ({"voice": 5}, "invalid_value"),
            ({"temperature": -1}, "input.bad_generation"),
            ({"seed": "x"}, "invalid_value"),
            ({"timestamp_type": "phoneme"}, "invalid_value"),
            ({"word_timestamps": "yes"}, "invalid_value"),
        ],
    )
    def test_a_wrong_configuration_is_answered(
        self, server: Running, fields: dict[str, Any], code: str
    ) -> None:
        with wire(server, OMNI) as client:
            client.send({**CONFIG, **fields}, {"type": "input.done"})
            assert client.next()["error_code"] == code
            assert "session.config" in client.next()["message"]
            client.send(
                {**CONFIG, "voice": "ada"}, {"type": "input.text", "text": "Hello."}, {"type": "input.done"}
            )
            assert spoken(["Hello."]) in b"".join(
                one for one in client.until_done() if isinstance(one, bytes)
            )

    @pytest.mark.parametrize(
        ("message", "code"),
        [
            ("{", "input.bad_json"),
            ("[]", "input.bad_json"),
            (b"\x00\x01", "invalid_value"),
            ({}, "invalid_value"),
            ({"type": "voice.add"}, "invalid_value"),
            ({"type": ["input.text"]}, "invalid_value"),
            ({"type": "input.text", "text": 5}, "invalid_value"),
            ({"type": "input.text", "text": None}, "invalid_value"),
            ({"type": "input.text", "text": "word " * 1001}, "input.too_long"),
            (CONFIG, "invalid_value"),
        ],
    )
    def test_a_wrong_message_leaves_the_utterance(self, server: Running, message: Any, code: str) -> None:
        with wire(server, OMNI) as client:
            client.send(CONFIG, {"type": "input.text", "text": "Hel"}, message)
            error = client.next()
            assert (error["type"], error["error_code"]) == ("error", code)
            client.send({"type": "input.text", "text": "lo."}, {"type": "input.done"})
            assert b"".join(one for one in client.until_done() if isinstance(one, bytes)) == spoken(
                ["Hello."]
            )

    def test_utterances_that_wait_are_bounded(self, voice: StreamVoice) -> None:
        with Running(voice, contexts_per_connection=2) as server, wire(server, OMNI) as client:
            client.send(CONFIG)
            for _ in range(3):
                client.send({"type": "input.text", "text": "Please hold."}, {"type": "input.done"})
            busy = client.until("type", "error")[-1]
            assert (busy["status_code"], busy["error_code"]) == (429, "too_many_contexts")
            voice.let_go()
            done = [client.until_done()[-1] for _ in range(3)]
            assert [one["total_sentences"] for one in done] in ([1, 1, 0], [0, 1, 1])
