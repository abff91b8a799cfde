"""`NightjarTTSService` in a real pipeline, against a real server."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Ears, NightjarServer, wait_until
from conversation import Conversation, Script, converse
from pipecat.frames.frames import (
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    MetricsFrame,
    OutputAudioRawFrame,
    StartFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    TTSStartedFrame,
    TTSStoppedFrame,
    TTSTextFrame,
    TTSUpdateSettingsFrame,
)
from pipecat.metrics.metrics import TTFBMetricsData, TTSUsageMetricsData
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.services.tts_service import TextAggregationMode
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import TransportParams
from pipecat_nightjar import NightjarTTSService, NightjarTTSSettings

FIRST, SECOND = "The library opens in the morning.", "Bring the green basket with you."
REPLY = f"{FIRST} {SECOND}"
#: A reply whose text comes in two parts: the first one ends within the second sentence, since a sentence is sent once the
#: next one begins.
RESTED = f"{FIRST} Then rest. {SECOND}"
SENTENCES = 300
LONG = "The old captain told a story about the northern sea and its many islands. " * SENTENCES


#: With it a text has the same times in each run.
SEEDED = {"generation_config": {"seed": 7}}


def word_times(server: NightjarServer) -> list[tuple[str, float, float]]:
    """The words of `REPLY` with the seed, and when the server says them."""
    audio = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24_000}
    body = {
        "model_id": "hibari",
        "transcript": REPLY,
        "output_format": audio,
        "add_timestamps": True,
        **SEEDED,
    }
    answer = server.post("/tts/sse", body)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.splitlines() if line]
    times = [one["word_timestamps"] for one in events if one["type"] == "timestamps"]
    return [word for one in times for word in zip(one["words"], one["start"], one["end"], strict=True)]


def service(
    server: NightjarServer, mode: TextAggregationMode | None = None, **settings: Any
) -> NightjarTTSService:
    chosen = NightjarTTSSettings(**{"model": "hibari", **settings})
    return NightjarTTSService(base_url=server.url, text_aggregation_mode=mode, settings=chosen)


def chinese_talker(
    chinese_server: NightjarServer, mode: TextAggregationMode | None = None
) -> NightjarTTSService:
    settings = NightjarTTSSettings(voice="vivian", extra=SEEDED)
    return NightjarTTSService(base_url=chinese_server.url, text_aggregation_mode=mode, settings=settings)


def saying(*replies: str) -> Script:
    async def script(conversation: Conversation) -> None:
        for count, reply in enumerate(replies, 1):
            await conversation.say(*reply.split(" ")[:1], *(f" {word}" for word in reply.split(" ")[1:]))
            await conversation.until_replies(count)

    return script


@pytest.mark.parametrize("mode", [TextAggregationMode.SENTENCE, TextAggregationMode.TOKEN])
@pytest.mark.parametrize("rate", [24_000, 8_000])
def test_a_reply_is_heard_at_the_rate_of_the_pipeline(
    server: NightjarServer, ears: Ears, rate: int, mode: TextAggregationMode
) -> None:
    done = asyncio.run(converse(service(server, mode), saying(REPLY), rate=rate))
    assert done.rates() == {rate}
    assert ears.word_error_rate(done.audio(), rate, REPLY) <= (0 if rate > 8_000 else 0.1)
    assert done.errors() == []
    assert len(done.below.of(TTSStartedFrame)) == len(done.below.of(TTSStoppedFrame)) == 1
    metrics = [data for frame in done.below.of(MetricsFrame) for data in frame.data]
    # One for the reply, beside the zero that every service begins with.
    assert [data.value > 0 for data in metrics if isinstance(data, TTFBMetricsData)] == [False, True]
    assert sum(data.value for data in metrics if isinstance(data, TTSUsageMetricsData)) >= len(REPLY)
    wait_until(server.is_idle)


def said(done: Conversation) -> list[str]:
    return [frame.text.strip() for frame in done.below.of(TTSTextFrame)]


def text_of(frames: list[TTSTextFrame]) -> str:
    """What Pipecat's conversations say after these frames."""
    assert all(frame.includes_inter_frame_spaces for frame in frames)
    return "".join(frame.text for frame in frames)


@pytest.mark.parametrize("mode", [TextAggregationMode.SENTENCE, TextAggregationMode.TOKEN])
def test_a_word_becomes_text_of_the_conversation_when_it_is_said(
    server: NightjarServer, mode: TextAggregationMode
) -> None:
    done = asyncio.run(converse(service(server, mode, extra=SEEDED), saying(REPLY)))
    assert said(done) == REPLY.split()
    assert text_of(done.below.of(TTSTextFrame)) == REPLY
    begins = [frame.pts or 0 for frame in done.below.of(TTSTextFrame)]
    times = [start for _, start, _ in word_times(server)]
    assert [(begin - begins[0]) / 1e9 for begin in begins] == pytest.approx(
        [at - times[0] for at in times], abs=0.001
    )


@pytest.mark.parametrize("mode", [TextAggregationMode.SENTENCE, TextAggregationMode.TOKEN])
def test_characters_of_a_chinese_reply_are_words_and_latin_words_keep_their_spaces(
    chinese_server: NightjarServer, mode: TextAggregationMode
) -> None:
    reply = "Yes. \u4f60\u597d\uff0c\u6211\u7528Python and Rust\u5199\u7a0b\u5e8f\u3002\u518d\u89c1\uff01"
    context = LLMContext()

    async def script(conversation: Conversation) -> None:
        await conversation.say(*reply)
        await conversation.until_replies(1)

    behind = [LLMContextAggregatorPair(context).assistant()]
    done = asyncio.run(converse(chinese_talker(chinese_server, mode), script, behind=behind))
    assert done.errors() == []
    assert len(said(done)) == 13
    assert text_of(done.below.of(TTSTextFrame)) == reply
    assert [message["content"] for message in context.get_messages()] == [reply]


@pytest.mark.parametrize("as_replies", [False, True])
def test_words_of_texts_in_a_row_are_said_with_their_own_audio(
    server: NightjarServer, as_replies: bool
) -> None:
    texts = (FIRST, SECOND, FIRST)

    async def script(conversation: Conversation) -> None:
        for text in texts:
            await (conversation.say(text) if as_replies else conversation.send(TTSSpeakFrame(text)))
        await conversation.until_replies(len(texts))

    done = asyncio.run(converse(service(server, extra=SEEDED), script))
    begins, seconds = dict[str, float](), dict[str, float]()
    for frame in done.below.frames:
        if isinstance(frame, TTSTextFrame):
            begins.setdefault(str(frame.context_id), (frame.pts or 0) / 1e9)
        elif isinstance(frame, TTSAudioRawFrame):
            name = str(frame.context_id)
            seconds[name] = seconds.get(name, 0.0) + len(frame.audio) / 2 / frame.sample_rate
    first, second, third = begins.values()
    assert [second - first, third - second] == pytest.approx([*seconds.values()][:2], abs=0.05)


def test_words_after_an_interruption_are_said_with_their_audio(server: NightjarServer) -> None:
    heard_at = list[float]()

    async def script(conversation: Conversation) -> None:
        await conversation.say(LONG[:600])
        await conversation.until_replies(1)
        heard_at.append(time.monotonic())
        await conversation.interrupt()
        await conversation.below.until(lambda: bool(conversation.below.of(InterruptionFrame)))
        await conversation.say(REPLY)
        await conversation.until_replies(2)
        heard_at.append(time.monotonic())

    done = asyncio.run(converse(service(server), script))
    words = done.below.of(TTSTextFrame)
    first = next(word for word in words if word.text.strip() == "library")
    assert (first.pts or 0) - (words[0].pts or 0) < 20e9, "40 s of speech were not heard"
    assert heard_at[1] - heard_at[0] < 20


def test_without_times_a_sentence_becomes_text_of_the_conversation_behind_its_audio(
    server: NightjarServer,
) -> None:
    untimed = service(server, extra={"add_timestamps": False})
    done = asyncio.run(converse(untimed, saying(REPLY)))
    kinds = [
        frame.text.strip() if isinstance(frame, TTSTextFrame) else "audio"
        for frame in done.below.frames
        if isinstance(frame, TTSTextFrame | TTSAudioRawFrame)
    ]
    parts = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    assert parts == ["audio", *FIRST.split(), "audio", *SECOND.split()]


def test_without_times_a_text_whose_sentences_the_server_finds_is_said_at_the_end_of_its_audio(
    server: NightjarServer,
) -> None:
    untimed = service(server, TextAggregationMode.TOKEN, extra={"add_timestamps": False})
    done = asyncio.run(converse(untimed, saying(REPLY)))
    frames = done.below.of(TTSTextFrame)
    assert text_of(frames) == REPLY
    assert min((frame.pts or 0) / 1e9 for frame in frames) >= len(done.audio()) / 2 / 24_000


@pytest.mark.parametrize("mode", [TextAggregationMode.SENTENCE, TextAggregationMode.TOKEN])
def test_words_of_a_reply_whose_settings_change_are_all_said(
    server: NightjarServer, mode: TextAggregationMode
) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.send(LLMFullResponseStartFrame())
        await conversation.send(LLMTextFrame(f"{FIRST} Then"))
        await conversation.below.until(
            lambda: len(said(conversation)) > 3 or mode is TextAggregationMode.TOKEN
        )
        await conversation.until_audio()
        await conversation.send(TTSUpdateSettingsFrame(delta=NightjarTTSSettings(language="English")))
        await conversation.send(LLMTextFrame(f" rest. {SECOND}"))
        await conversation.send(LLMFullResponseEndFrame())
        await conversation.until_replies(2)

    done = asyncio.run(converse(service(server, mode), script))
    assert text_of(done.below.of(TTSTextFrame)) == RESTED


def test_text_that_could_not_be_spoken_is_not_in_the_conversation_and_the_rest_is_in_order(
    server: NightjarServer,
) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.send(LLMFullResponseStartFrame())
        await conversation.send(LLMTextFrame(f"{FIRST} \u0421\u043f\u0430\u0441\u0438\u0431\u043e. Then"))
        await conversation.above.until(lambda: bool(conversation.errors()))
        await conversation.send(LLMTextFrame(f" rest. {SECOND}"))
        await conversation.send(LLMFullResponseEndFrame())
        await conversation.below.until(lambda: "you." in said(conversation))

    done = asyncio.run(converse(service(server), script))
    words = [frame for frame in done.below.of(TTSTextFrame) if frame.append_to_context]
    assert [frame.text.strip() for frame in words] == RESTED.split()
    assert text_of(words) == RESTED
    times = [frame.pts or 0 for frame in words]
    assert times == sorted(times)


def test_words_after_a_wait_for_text_are_said_with_their_audio(server: NightjarServer) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.send(LLMFullResponseStartFrame())
        await conversation.send(LLMTextFrame(f"{FIRST} Then"))
        await conversation.below.until(lambda: "morning." in said(conversation))
        seconds = len(conversation.audio()) / 2 / 24_000
        await asyncio.sleep(seconds + 3.0)
        await conversation.send(LLMTextFrame(f" rest. {SECOND}"))
        await conversation.send(LLMFullResponseEndFrame())
        await conversation.until_replies(1)

    done = asyncio.run(converse(service(server), script))
    pts = {frame.text.strip(): (frame.pts or 0) / 1e9 for frame in done.below.of(TTSTextFrame)}
    # The second sentence comes 3 s after the end of the first one; its audio alone would follow within 1.5 s.
    assert pts["Then"] - pts["morning."] > 3.0


def begin_of(done: Conversation, word: str) -> float:
    """When the word is said, in seconds."""
    return next((one.pts or 0) / 1e9 for one in done.below.of(TTSTextFrame) if one.text.strip() == word)


def seconds_until(done: Conversation, word: str) -> float:
    """The audio of a context up to the end of the sentence that ends with the word."""
    frames = done.below.frames
    place, last = next(
        (place, frame)
        for place, frame in enumerate(frames)
        if isinstance(frame, TTSTextFrame) and frame.text.strip() == word
    )
    return sum(
        len(frame.audio) / 2 / frame.sample_rate
        for frame in frames[:place]
        if isinstance(frame, TTSAudioRawFrame) and frame.context_id == last.context_id
    )


def test_words_after_a_silence_that_ended_their_context_are_said_with_their_audio(
    server: NightjarServer,
) -> None:
    settings = NightjarTTSSettings(model="hibari", extra=SEEDED)
    impatient = NightjarTTSService(base_url=server.url, stop_frame_timeout_s=0.5, settings=settings)

    def is_silent(conversation: Conversation) -> bool:
        last = conversation.below.frames[-1:]
        return "morning." in said(conversation) and any(isinstance(frame, TTSStoppedFrame) for frame in last)

    async def script(conversation: Conversation) -> None:
        await conversation.send(LLMFullResponseStartFrame())
        await conversation.send(LLMTextFrame(f"{FIRST} Then"))
        await conversation.below.until(lambda: is_silent(conversation))
        await conversation.send(LLMTextFrame(f" rest. {SECOND}"))
        await conversation.send(LLMFullResponseEndFrame())
        await conversation.below.until(lambda: "you." in said(conversation))

    done = asyncio.run(converse(impatient, script))
    assert len({frame.context_id for frame in done.below.of(TTSAudioRawFrame)}) == 1
    # Its audio follows that of the first sentence, which is still being played.
    assert begin_of(done, "Then") - begin_of(done, "The") == pytest.approx(
        seconds_until(done, "morning."), abs=0.3
    )


def test_words_after_a_wait_behind_other_audio_are_said_with_their_audio(server: NightjarServer) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.send(TTSSpeakFrame(LONG[:222]))
        await conversation.until_replies(1)
        await conversation.send(LLMFullResponseStartFrame())
        await conversation.send(LLMTextFrame("Yes. Then"))
        await conversation.below.until(lambda: "Yes." in said(conversation))
        # "Yes." would be over by then, but it comes after 14 s of other audio.
        await asyncio.sleep(1.8)
        await conversation.send(LLMTextFrame(f" rest. {SECOND}"))
        await conversation.send(LLMFullResponseEndFrame())
        await conversation.until_replies(2)

    done = asyncio.run(converse(service(server, extra=SEEDED), script))
    assert begin_of(done, "Then") - begin_of(done, "Yes.") == pytest.approx(
        seconds_until(done, "Yes."), abs=0.3
    )


class Loudspeaker(BaseOutputTransport):
    """Plays audio as it is heard, and notifies `reached` once it has played `until_seconds`."""

    def __init__(self, until_seconds: float) -> None:
        super().__init__(TransportParams(audio_out_enabled=True))
        self._left_seconds = until_seconds
        self.reached = asyncio.Event()

    async def start(self, frame: StartFrame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        seconds = len(frame.audio) / 2 / frame.sample_rate
        await asyncio.sleep(seconds)
        self._left_seconds -= seconds
        if self._left_seconds <= 0:
            self.reached.set()
        return True


def test_an_interruption_in_a_word_leaves_exactly_the_words_that_were_heard(server: NightjarServer) -> None:
    # The last word of the first sentence; the second one begins after a pause.
    _, start, end = word_times(server)[len(FIRST.split()) - 1]
    loudspeaker, context = Loudspeaker((start + end) / 2), LLMContext()
    behind = [loudspeaker, LLMContextAggregatorPair(context).assistant()]

    async def script(conversation: Conversation) -> None:
        await conversation.say(REPLY)
        await loudspeaker.reached.wait()
        await conversation.interrupt()
        await conversation.below.until(lambda: bool(conversation.below.of(InterruptionFrame)))

    asyncio.run(converse(service(server, extra=SEEDED), script, behind=behind))
    assert [message["content"] for message in context.get_messages()] == [FIRST]


def test_an_interruption_of_a_chinese_reply_leaves_the_beginning_of_its_text(
    chinese_server: NightjarServer,
) -> None:
    reply = "\u7528Python and Rust \u548c C \u5199\u7a0b\u5e8f\u5f88\u5feb\uff01\u518d\u89c1\uff01"
    loudspeaker, context = Loudspeaker(2.0), LLMContext()
    behind = [loudspeaker, LLMContextAggregatorPair(context).assistant()]

    async def script(conversation: Conversation) -> None:
        await conversation.say(*reply)
        await loudspeaker.reached.wait()
        await conversation.interrupt()
        await conversation.below.until(lambda: bool(conversation.below.of(InterruptionFrame)))

    asyncio.run(converse(chinese_talker(chinese_server), script, behind=behind))
    (heard,) = [str(message["content"]) for message in context.get_messages()]
    assert reply.startswith(heard)
    assert "Python and" in heard != reply


@pytest.mark.parametrize("mode", [TextAggregationMode.SENTENCE, TextAggregationMode.TOKEN])
def test_an_interruption_frees_the_slot_and_the_next_reply_is_heard_whole(
    server: NightjarServer, ears: Ears, mode: TextAggregationMode
) -> None:
    begin = 0

    async def script(conversation: Conversation) -> None:
        nonlocal begin
        before = server.metrics()["speech_engine_requests_total"]
        await conversation.send(TTSSpeakFrame(LONG))
        await conversation.until_audio()
        await conversation.interrupt()
        await conversation.below.until(lambda: bool(conversation.below.of(InterruptionFrame)))
        await asyncio.to_thread(wait_until, server.is_idle)
        # Without the cancellation the server, which has the whole text where it finds the sentences, would speak it all.
        assert server.metrics()["speech_engine_requests_total"] - before < SENTENCES
        begin = len(conversation.audio())
        await conversation.say(REPLY)
        await conversation.until_replies(1)

    done = asyncio.run(converse(service(server, mode), script))
    assert ears.word_error_rate(done.audio()[begin:], 24_000, REPLY) == 0
    assert done.errors() == []


def test_speech_goes_on_after_a_restart_of_the_server(own_server: NightjarServer, ears: Ears) -> None:
    begin = 0

    async def script(conversation: Conversation) -> None:
        nonlocal begin
        await conversation.say(LONG)
        await conversation.until_audio()
        await asyncio.to_thread(own_server.kill)
        await conversation.until_replies(1)
        begin = len(conversation.audio())
        own_server.start(wait=False)
        await asyncio.to_thread(wait_until, own_server.is_ready)
        await conversation.say(REPLY)
        await conversation.until_replies(2)

    speech = service(own_server)
    done = asyncio.run(converse(speech, script))
    assert ears.word_error_rate(done.audio()[begin:], 24_000, REPLY) == 0
    assert len(done.errors()) >= 1
    assert speech.is_usable


def test_a_server_that_stops_in_good_order_is_found_again(own_server: NightjarServer, ears: Ears) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.say(FIRST)
        await conversation.until_replies(1)
        await asyncio.to_thread(own_server.stop)
        # The text is sent before the server runs again.
        await conversation.say(SECOND)
        own_server.start(wait=False)
        await conversation.until_replies(2)

    done = asyncio.run(converse(service(own_server), script))
    assert ears.word_error_rate(done.audio(), 24_000, REPLY) == 0
    assert done.errors() == []


def test_a_text_waits_for_a_server_that_loads_its_model(tmp_path: Path) -> None:
    server = NightjarServer(tmp_path)

    async def script(conversation: Conversation) -> None:
        await conversation.above.until(lambda: bool(conversation.errors()))
        server.start(wait=False)
        await asyncio.to_thread(wait_until, server.is_loading)
        await conversation.say(FIRST)
        await conversation.until_replies(1)

    try:
        done = asyncio.run(converse(service(server), script))
    finally:
        server.stop()
    assert text_of(done.below.of(TTSTextFrame)) == FIRST
    assert len(done.audio()) > 0
    assert len(done.errors()) == 1, "only that of the start, when there is no server"


def test_two_services_speak_at_once(server: NightjarServer, ears: Ears) -> None:
    replies = ("The river was high after the rain.", "Seven boats were waiting near the bridge.")

    async def both() -> list[Conversation]:
        return await asyncio.gather(*(converse(service(server), saying(reply)) for reply in replies))

    for done, reply in zip(asyncio.run(both()), replies, strict=True):
        assert ears.word_error_rate(done.audio(), 24_000, reply) <= 0.2
        assert done.errors() == []


def test_several_texts_at_once_are_spoken_in_order_over_one_connection(
    server: NightjarServer, ears: Ears
) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.send(TTSSpeakFrame(FIRST))
        await conversation.send(TTSSpeakFrame(SECOND))
        await conversation.until_replies(2)

    done = asyncio.run(converse(service(server), script))
    assert len({frame.context_id for frame in done.below.of(TTSAudioRawFrame)}) == 2
    assert ears.word_error_rate(done.audio(), 24_000, REPLY) == 0


def test_a_text_without_words_leaves_the_rest_of_the_reply(server: NightjarServer, ears: Ears) -> None:
    done = asyncio.run(converse(service(server), saying(f"{FIRST} ?!? {SECOND}")))
    assert ears.word_error_rate(done.audio(), 24_000, REPLY) == 0


def test_the_voice_can_change_in_the_middle_of_a_reply(server: NightjarServer, ears: Ears) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.send(LLMFullResponseStartFrame())
        await conversation.send(LLMTextFrame(f"{FIRST} Yes."))
        await conversation.until_audio()
        await conversation.send(
            TTSUpdateSettingsFrame(delta=NightjarTTSSettings(voice="heart", language="English"))
        )
        await conversation.send(LLMTextFrame(f" {SECOND}"))
        await conversation.send(LLMFullResponseEndFrame())
        await conversation.until_replies(2)

    done = asyncio.run(converse(service(server), script))
    assert done.errors() == []
    assert ears.word_error_rate(done.audio(), 24_000, f"{FIRST} Yes. {SECOND}") <= 0.1


def test_a_voice_that_the_model_does_not_have_makes_the_service_unusable(server: NightjarServer) -> None:
    async def script(conversation: Conversation) -> None:
        await conversation.say(FIRST)
        await conversation.above.until(lambda: bool(conversation.errors()))

    speech = service(server, voice="nobody")
    done = asyncio.run(converse(speech, script))
    assert not speech.is_usable
    assert "input.unknown_voice" in done.errors()[0]


def test_a_wrong_key_makes_the_service_unusable_and_the_right_one_speaks(tmp_path, ears: Ears) -> None:
    server = NightjarServer(tmp_path, SPEECH_SERVE__API_KEY="right")
    server.start()
    try:
        settings = NightjarTTSSettings(model="hibari")
        wrong = NightjarTTSService(base_url=server.url, api_key="wrong", settings=settings)

        async def script(conversation: Conversation) -> None:
            await conversation.say(FIRST)

        done = asyncio.run(converse(wrong, script))
        assert not wrong.is_usable
        assert "401" in done.errors()[0]
        right = NightjarTTSService(base_url=server.url, api_key="right", settings=settings)
        done = asyncio.run(converse(right, saying(REPLY)))
        assert ears.word_error_rate(done.audio(), 24_000, REPLY) == 0
    finally:
        server.stop()
