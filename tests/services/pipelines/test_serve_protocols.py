"""ElevenLabs' WebSockets: their messages, what ends what, and wrong messages; keys and the end of a server over every
protocol."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soundfile
from websockets.exceptions import ConnectionClosed, InvalidStatus

from pipelines.request import Word
from pipelines.serving.elevenlabs import alignment
from tests.services.pipelines.test_serve_omni import CONFIG, OMNI
from tests.services.pipelines.test_serve_times import TimedVoice, expected, middles_of
from tests.services.pipelines.test_serve_websocket import TEXT, UNITS, samples_of, spoken
from tests.support.serving_kit import PATIENCE_SECONDS, Running
from tests.support.stream_voice import StreamVoice
from tests.support.websocket_kit import talk, wire

MULTI, SINGLE = "multi-stream-input", "stream-input"


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

    def test_times_of_a_name_that_is_used_again_begin_anew(self) -> None:
        with Running(TimedVoice()) as server, multi(server) as client:
            starts: list[list[int]] = []
            for _ in range(2):
                client.send(said(UNITS[0], flush=True), closing())
                messages = client.until_final()
                starts += [one["alignment"]["charStartTimesMs"] for one in messages if one.get("alignment")]
        assert starts[0] == starts[1]

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
            # The voice is held, and the server ends the speech of an idle context within a minute or so.
            client.patience_seconds = 20
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
        error = json.loads(refused.value.response.body)["error"]
        assert error["code"] == code
        assert "pcm_s16le" not in error["message"], "that is another protocol's name"

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
