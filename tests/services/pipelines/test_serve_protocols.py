"""ElevenLabs' and vLLM-Omni's WebSockets: their messages, what ends what, the key, and wrong messages."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
import soundfile
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from pipelines.request import Word
from pipelines.serving.elevenlabs import alignment
from tests.services.pipelines.test_serve_times import TimedVoice, expected, middles_of
from tests.services.pipelines.test_serve_websocket import TEXT, UNITS, samples_of, spoken
from tests.support.serving_kit import PATIENCE_SECONDS, Running, b64, wav
from tests.support.stream_voice import StreamVoice
from tests.support.websocket_kit import talk

MULTI, SINGLE = "multi-stream-input", "stream-input"
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


def address(kind: str, name: str = "ada") -> str:
    return f"/v1/text-to-speech/{name}/{kind}"


@contextmanager
def wire(
    server: Running, path: str, headers: dict[str, str] | None = None, **query: object
) -> Iterator[Wire]:
    url = f"{server.url.replace('http', 'ws', 1)}{path}?{urlencode(query)}"
    with connect(url, additional_headers=headers, compression=None, max_size=None, proxy=None) as socket:
        yield Wire(socket)


class Wire:
    """One connection."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    def send(self, *views: dict[str, Any] | str | bytes) -> None:
        for view in views:
            self.socket.send(json.dumps(view) if isinstance(view, dict) else view)

    def next(self) -> Any:
        message = self.socket.recv(PATIENCE_SECONDS)
        return message if isinstance(message, bytes) else json.loads(message)

    def until(self, key: str, value: object) -> list[Any]:
        """The messages up to one that has this field."""
        messages = [self.next()]
        while isinstance(messages[-1], bytes) or messages[-1].get(key) != value:
            messages.append(self.next())
        return messages

    def until_final(self, name: str = "a") -> list[dict[str, Any]]:
        """The messages of a context of ElevenLabs; there must be no other."""
        messages = self.until("isFinal", True)
        assert {one["contextId"] for one in messages} == {name}
        return messages

    def until_done(self) -> list[Any]:
        """The messages of an utterance of vLLM-Omni."""
        return self.until("type", "session.done")

    def closed(self) -> int | None:
        """The code of the end, before which no message may come."""
        assert list(self.socket) == []
        return self.socket.close_code


def multi(server: Running, **query: object) -> Any:
    return wire(server, address(MULTI), **{"output_format": "pcm_24000", "seed": 7, **query})


def said(text: object = "", name: object = "a", **fields: Any) -> dict[str, Any]:
    return {"text": text, "context_id": name, **fields}


def closing(name: str = "a") -> dict[str, Any]:
    return {"context_id": name, "close_context": True}


def sound(messages: list[Any]) -> bytes:
    """The audio in messages of ElevenLabs."""
    return b"".join(base64.b64decode(one.get("audio") or "") for one in messages)


class TestElevenLabs:
    @pytest.mark.parametrize("size", [1, 10, 100])
    def test_texts_in_pieces_give_the_speech_of_the_joined_text(
        self, server: Running, voice: StreamVoice, size: int
    ) -> None:
        with multi(server, model_id="tone", language_code="en") as client:
            client.send(said(" ", voice_settings={"stability": 0.5}))
            client.send(*(said(TEXT[begin : begin + size]) for begin in range(0, len(TEXT), size)))
            client.send({"context_id": "a", "flush": True}, closing())
            messages = client.until_final()
        assert sound(messages) == spoken(UNITS)
        assert voice.texts == UNITS
        assert {(one.generation.voice, one.generation.language) for one in voice.requests} == {("ada", "en")}
        route = "/v1/text-to-speech/{voice_id}/multi-stream-input"
        counted = server.metrics()
        assert counted[f"speech_http_requests_total{{route={route},status=200}}"] == 1
        assert counted[f"speech_first_audio_seconds_count{{route={route}}}"] == 1

    @pytest.mark.parametrize(("kind", "subtype", "rate"), [("pcm", "PCM_16", 16_000), ("ulaw", "ULAW", 8000)])
    def test_bare_formats(self, server: Running, kind: str, subtype: str, rate: int) -> None:
        with multi(server, output_format=f"{kind}_{rate}") as client:
            client.send(said(TEXT, flush=True), closing())
            data = sound(client.until_final())
        raw: dict[str, Any] = {"format": "RAW", "channels": 1, "samplerate": rate, "subtype": subtype}
        found, _ = soundfile.read(io.BytesIO(data), dtype="float32", endian="LITTLE", **raw)
        wanted = samples_of(UNITS, rate=rate)
        assert len(found) == len(wanted)
        assert np.abs(found - wanted).max() < 0.02

    @pytest.mark.parametrize(
        ("name", "kind"), [("mp3_22050_32", "MP3"), ("opus_48000_32", "OGG"), (None, "MP3")]
    )
    def test_files(self, server: Running, name: str | None, kind: str) -> None:
        query = {"seed": 7, **({"output_format": name} if name else {})}
        with wire(server, address(MULTI), **query) as client:
            client.send(said(UNITS[0], flush=True), closing())
            file = io.BytesIO(sound(client.until_final()))
        assert soundfile.info(file).format == kind
        file.seek(0)
        found, _ = soundfile.read(file, dtype="float32")
        assert np.abs(found).max() > 0.2

    @pytest.mark.parametrize("absolute", [False, True])
    def test_each_character_has_its_time(self, absolute: bool) -> None:
        query = {"sync_alignment": "true"} if absolute else {}
        with Running(TimedVoice()) as server, multi(server, **query) as client:
            client.send(said(TEXT, flush=True), closing())
            messages = client.until_final()
        begin = 0.0
        timed = [one for one in messages if one.get("alignment")]
        assert len(timed) == len(UNITS)
        for one, word in zip(timed, expected(UNITS), strict=True):
            times = one["alignment"]
            assert one["normalizedAlignment"] == times
            assert "".join(times["chars"]) == word.text + " "
            starts, durations = times["charStartTimesMs"], times["charDurationsMs"]
            assert len(starts) == len(durations) == len(times["chars"])
            assert starts == sorted(starts)
            assert starts[1:] == [at + lasts for at, lasts in zip(starts, durations, strict=True)][:-1]
            assert begin + starts[0] / 1000 == pytest.approx(word.start_s, abs=0.002)
            assert begin + starts[-1] / 1000 == pytest.approx(word.end_s, abs=0.002)
            begin += 0.0 if absolute else (starts[-1] + durations[-1]) / 1000

    def test_times_of_characters_are_those_of_the_decoded_mp3(self) -> None:
        """Each text is an MP3 of its own, with delay and whole frames."""
        query = {"sync_alignment": "true", "output_format": "mp3_22050_32"}
        with Running(TimedVoice()) as server, multi(server, **query) as client:
            client.send(said(TEXT, flush=True), closing())
            messages = client.until_final()
        words = [
            Word(
                "".join(times["chars"]),
                times["charStartTimesMs"][0] / 1000,
                times["charStartTimesMs"][-1] / 1000,
            )
            for one in messages
            if (times := one.get("alignment"))
        ]
        assert [word.text for word in words] == [f"{unit} " for unit in UNITS]
        assert middles_of(sound(messages), words) == pytest.approx([0.0] * len(UNITS), abs=0.002)

    def test_characters_of_scripts_without_spaces_have_none_behind_them(self) -> None:
        times = alignment(["\u4f60", "\u597d\uff0c", "Ada", "is"], [1, 2, 3, 4], [2, 2.5, 4, 4.5], 1)
        assert "".join(times["chars"]) == "\u4f60\u597d\uff0cAda is "
        assert times["charStartTimesMs"] == [0, 1000, 1250, 2000, 2333, 2667, 3000, 3000, 3250, 3500]
        assert times["charDurationsMs"] == [1000, 250, 750, 333, 334, 333, 0, 250, 250, 0]
        assert alignment(["\u597d"], [1], [2], 1)["charDurationsMs"] == [1000]

    @pytest.mark.parametrize("name", ["auto_mode", "sync_alignment"])
    def test_a_value_of_the_query_is_true_or_false(self, server: Running, name: str) -> None:
        with multi(server, **{name: "True"}) as client:
            client.send(said(TEXT, flush=True), closing())
            client.until_final()
        with pytest.raises(InvalidStatus) as refused, multi(server, **{name: "perhaps"}):
            pass
        assert refused.value.response.status_code == 400
        assert name.encode() in refused.value.response.body

    def test_in_auto_mode_each_text_is_spoken_when_it_arrives(
        self, server: Running, voice: StreamVoice
    ) -> None:
        with multi(server, auto_mode="true") as client:
            client.send(said("Please hol"), said("d no more"))
            server.until(lambda: voice.texts == ["Please hol", "d no more"])
            client.send(closing())
            client.until_final()

    def test_an_interruption_frees_the_slot_and_drops_what_is_not_flushed(
        self, server: Running, voice: StreamVoice
    ) -> None:
        with multi(server) as client:
            client.send(said("Please hold. Not this."))
            client.next()
            client.send(closing())
            assert client.until_final()[-1] == {"isFinal": True, "contextId": "a"}
            server.until(lambda: voice.running == 0)
            # The name is free again, and a second end is not answered.
            client.send(closing(), said("Hello. ", flush=True), closing())
            assert sound(client.until_final()) == spoken(["Hello."])
        assert "Not this." not in voice.texts

    def test_what_is_flushed_is_spoken_after_the_end_and_a_second_end_stops_it(
        self, server: Running, voice: StreamVoice
    ) -> None:
        with multi(server) as client:
            client.send(said("Please hold. And this.", flush=True), said(), closing())
            client.next()
            client.send(said("Too late.", "b"), closing())
            assert sound(client.until_final()) != spoken(["Please hold.", "And this."])
            server.until(lambda: voice.running == 0)
            client.send(said("Please hold. And this.", flush=True), closing())
            first = client.until("contextId", "a")[-1]
            voice.let_go()
            messages = [first, *client.until_final()]
            assert sound(messages) == spoken(["Please hold.", "And this."])

    def test_an_empty_text_keeps_a_context_alive_and_opens_none(self, voice: StreamVoice) -> None:
        options = {"context_idle_seconds": 1.5, "contexts_per_connection": 1}
        with Running(voice, **options) as server, multi(server) as client:
            client.send({"text": ""}, said("", "b"), {"context_id": "c", "flush": True}, said(" "))
            for _ in range(8):
                with pytest.raises(TimeoutError):
                    client.socket.recv(0.3)
                client.send(said(""))
            client.send(said("Hello. ", flush=True), closing())
            assert sound(client.until_final()) == spoken(["Hello."])

    def test_the_socket_closes_after_what_is_flushed(self, server: Running, voice: StreamVoice) -> None:
        with multi(server) as client:
            client.send(said("Please hold.", flush=True))
            client.next()
            client.send(said("Not this", "b"), {"close_socket": True})
            assert client.until("isFinal", True)[-1]["contextId"] == "b"
            voice.let_go()
            assert client.until("isFinal", True)[-1]["contextId"] == "a"
            assert client.closed() == 1000
        assert voice.texts == ["Please hold."]

    def test_one_text_ends_with_an_empty_one(self, server: Running) -> None:
        path = address(SINGLE)
        with wire(server, path, output_format="pcm_24000", seed=7) as client:
            client.send({"text": " ", "xi_api_key": "any"}, {"text": TEXT, "try_trigger_generation": True})
            client.send({"text": ""})
            assert sound(client.until_final("default")) == spoken(UNITS)
            assert client.closed() == 1000
        with wire(server, path) as client:
            client.send({"text": ""})
            assert client.closed() == 1000

    def test_a_failure_ends_its_context_for_every_client(self, server: Running, voice: StreamVoice) -> None:
        with multi(server) as client:
            client.send(said("I break.", flush=True))
            last = client.until_final()[-1]
            assert (last["error"], last["status_code"]) == ("synth.engine", 503)
            client.send(said("Hello. ", flush=True), closing())
            assert sound(client.until_final()) == spoken(["Hello."])
            for number in range(33):
                client.send(said(" ", f"c{number}"))
            busy = client.next()
            assert (busy["contextId"], busy["error"], busy["isFinal"]) == ("c32", "too_many_contexts", True)
            assert busy["retry_after"] == 1

    def test_a_full_server_says_so(self, server: Running, voice: StreamVoice) -> None:
        with talk(server.url) as many, multi(server) as client:
            for number in range(8):
                many.say(f"c{number}", "Please hold.")
            server.until(lambda: server.busy()[:2] == (4, 4))
            client.send(said("Hello. "))
            busy = client.until_final()[-1]
            assert (busy["error"], busy["status_code"]) == ("rate_limit_exceeded", 429)
            voice.let_go()
            for number in range(8):
                many.hear(f"c{number}")

    @pytest.mark.parametrize(
        ("path", "query", "status", "code"),
        [
            (address(MULTI, "nobody"), {}, 400, "input.unknown_voice"),
            (address(MULTI, "a%2F..%2Fb"), {}, 404, "not_found"),
            (address(MULTI), {"model_id": "eleven_flash_v2_5"}, 404, "model_not_found"),
            (address(MULTI), {"language_code": "tlh"}, 400, "input.unknown_language"),
            (address(MULTI), {"output_format": "wav_24000"}, 400, "invalid_value"),
            (address(MULTI), {"output_format": "pcm"}, 400, "invalid_value"),
            (address(MULTI), {"output_format": "pcm_7"}, 400, "invalid_value"),
            (address(MULTI), {"seed": "x"}, 400, "invalid_value"),
            (address(MULTI), {"temperature": "-1"}, 400, "input.bad_generation"),
            (address(SINGLE), {"seed": "-1"}, 400, "invalid_value"),
            (address("stream"), {}, 404, "not_found"),
            (address("multi-stream-input/"), {}, 404, "not_found"),
            ("/v1/text-to-speech/multi-stream-input", {}, 404, "not_found"),
        ],
    )
    def test_a_wrong_address_is_refused_at_the_handshake(
        self, server: Running, path: str, query: dict[str, Any], status: int, code: str
    ) -> None:
        with pytest.raises(InvalidStatus) as refused, wire(server, path, **query):
            pass
        assert refused.value.response.status_code == status
        assert json.loads(refused.value.response.body)["error"]["code"] == code

    @pytest.mark.parametrize(
        ("message", "name", "code"),
        [
            ("", None, "input.bad_json"),
            ("{", None, "input.bad_json"),
            ("[]", None, "input.bad_json"),
            (b"{}", None, "invalid_value"),
            ('{"text": "\\ud800", "context_id": "a"}', None, "input.bad_json"),
            (said(5), "a", "invalid_value"),
            ({"text": 5}, "default", "invalid_value"),
            (said("Hello.", ""), "", "invalid_value"),
            (said("Hello.", "c" * 201), None, "invalid_value"),
            (said("Hello.", 5), None, "invalid_value"),
            (said("Hello.", flush="yes"), "a", "invalid_value"),
            ({"context_id": "a", "close_context": 1}, "a", "invalid_value"),
            ({"close_socket": "true"}, "default", "invalid_value"),
            (said("word " * 1001), "a", "input.too_long"),
            (said("I refuse.", flush=True), "a", "input.unpronounceable"),
        ],
    )
    def test_a_wrong_message_is_answered_and_disturbs_nobody(
        self, server: Running, message: Any, name: str | None, code: str
    ) -> None:
        with multi(server) as client, talk(server.url) as other:
            client.send(message)
            error = client.next()
            assert (error["error"], error["contextId"], error["isFinal"]) == (code, name, name is not None)
            assert error["message"].endswith(".")
            client.send(said("Hello. ", "d", flush=True), closing("d"))
            assert sound(client.until_final("d")) == spoken(["Hello."])
            other.say("e", "Hello.", generation_config={"seed": 7})
            assert other.hear("e") == spoken(["Hello."])


def test_keys_come_as_each_client_sends_them(voice: StreamVoice) -> None:
    ways = [
        (address(MULTI), {"xi-api-key": "s3cret"}),
        (address(SINGLE), {"xi-api-key": "s3cret"}),
        (OMNI, {"Authorization": "Api-Key s3cret"}),
        (OMNI, {"Authorization": "Bearer s3cret"}),
    ]
    with Running(voice, keys=("s3cret",), wait=False) as server:
        server.until(lambda: server.health() == 200)
        for path, headers in ways:
            with wire(server, path, headers):
                pass
            for wrong in ({}, {name: f"{value}x" for name, value in headers.items()}):
                with pytest.raises(InvalidStatus) as refused, wire(server, path, wrong):
                    pass
                assert refused.value.response.status_code == 401
        with wire(server, OMNI, api_key="s3cret"):
            pass
        counted = server.metrics(authorization="Bearer s3cret")
        route = "/v1/text-to-speech/{voice_id}/multi-stream-input"
        assert counted[f"speech_http_requests_total{{route={route},status=401}}"] == 2


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


def test_a_server_that_stops_speaks_what_it_has_over_every_protocol(voice: StreamVoice) -> None:
    with Running(voice) as server, multi(server) as one, wire(server, OMNI) as other:
        one.send(said("Please hold.", flush=True))
        one.next()
        other.send(CONFIG, {"type": "input.text", "text": "Please hold."}, {"type": "input.done"})
        other.next()
        server.server.stop()
        one.send(said("Not any more.", "b"))
        assert one.until("error", "shutting_down")
        voice.let_go()
        one.send(closing())
        one.until_final()
        other.until_done()
        for client in (one, other):
            with pytest.raises(ConnectionClosed):
                client.socket.recv(PATIENCE_SECONDS)
            assert client.socket.close_code == 1001
