"""Fish Speech S2 as a pipeline on a real vLLM, on the runner that CUDA uses: alone and together,
preempted, streamed, aborted, refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager

import numpy as np
import pytest
from prometheus_client import REGISTRY

from tests.support.fish_checkpoint import GOLDEN, whole
from tests.support.vllm_kit import Waiter, paused_core
from tests.support.vllm_v2 import require_v2, v2_runner
from tests.support.wide_heads import widened

require_v2()

from pipelines.codec.decoder import gathering_stage  # noqa: E402
from pipelines.errors import ErrorCode, InputError, NightjarError  # noqa: E402
from pipelines.fish_speech.codec import load_codec  # noqa: E402
from pipelines.fish_speech.config import FishConfig  # noqa: E402
from pipelines.fish_speech.model import model_spec  # noqa: E402
from pipelines.fish_speech.pipeline import GATHER, FishPipeline  # noqa: E402
from pipelines.fish_speech.prompt import Conversation, Reference, Vocabulary  # noqa: E402
from pipelines.options import TokenModelOptions  # noqa: E402
from pipelines.recording import Recording  # noqa: E402
from pipelines.request import Event, Generation, Message, Speech, SynthesisRequest, stream, submit  # noqa: E402
from pipelines.tokens import TokenRequest, TokenSampling  # noqa: E402
from pipelines.vllm_engine.host import VllmHost  # noqa: E402
from pipelines.vllm_engine.library import load_vllm  # noqa: E402
from tests.support.serving_kit import Running, b64, error_of, heard  # noqa: E402

SECONDS = 240
#: KV blocks of the engine, of 32 positions: fewer than all requests of a test need at once, so that some are
#: preempted.
BLOCKS = 14
FRAMES = 24
REFERENCE_TEXT = "The train to the city leaves at nine."
#: More bytes than are spoken in one message.
DIALOGUE = (
    "<|speaker:1|>There are 12 months in a year, 7 days in a week, and you can read this text aloud with a calm voice. "
    "<|speaker:0|>Good morning, how are you today? I have not seen you here since the last week of May. "
    "<|speaker:0|>That is nice."
)


@pytest.fixture(scope="module")
def pipeline() -> Iterator[FishPipeline]:
    with opened() as pipeline:
        yield pipeline


@contextmanager
def opened(share_prefixes: bool = False) -> Iterator[FishPipeline]:
    load_vllm(1)
    config = FishConfig.from_folder(widened(whole()))
    spec = model_spec(config, share_prefixes, num_gpu_blocks_override=BLOCKS, block_size=32)
    with v2_runner():
        host = VllmHost(spec, TokenModelOptions(dtype="float32", max_context=416, slots=6))
        codec = load_codec(config)
        pipeline = FishPipeline(
            config,
            Vocabulary.from_folder(config),
            codec,
            host,
            gathering_stage(codec.decoder, *GATHER),
            keep_unfinished=True,
        )
        with closing(pipeline):
            yield pipeline


def request(
    name: str, text: str = "Good morning, how are you today?", *wavs: str, seed: int = 1, **generation: object
) -> SynthesisRequest:
    audio = [Message("user", "audio", (GOLDEN / "wavs" / wav).read_bytes()) for wav in wavs]
    words = {"reference_text": "\n".join([REFERENCE_TEXT] * len(wavs))} if wavs else {}
    settings = Generation(**{"max_seconds": FRAMES / 21.5, **words, **generation})  # pyright: ignore[reportArgumentType]
    return SynthesisRequest(name, (*audio, Message("user", "text", text)), settings, seed)


def some_requests() -> list[SynthesisRequest]:
    """Drawn and greedy, plain and cloned, of one and of several turns."""
    return [
        request("plain", seed=3),
        request(
            "clone", "You can read this text aloud with a calm voice.", "ref_a.wav", seed=4, temperature=0.9
        ),
        request("two", "The rain falls on the quiet street.", "ref_a.wav", "ref_b.wav", seed=5),
        request("greedy", "There are 12 months in a year, 7 days in a week.", temperature=0.0),
        request("wide", "[whisper] do not wake the baby.", seed=6, top_k=0, top_p=0.95, temperature=1.0),
        request("dialogue", DIALOGUE, temperature=0.0),
    ]


def outcome(future: Future[Speech]) -> np.ndarray | ErrorCode:
    try:
        return future.result(SECONDS).samples
    except NightjarError as error:
        return error.code


@pytest.fixture(scope="module")
def alone(pipeline: FishPipeline) -> list[np.ndarray | ErrorCode]:
    """The samples of every request when nothing else runs."""
    return [outcome(submit(pipeline, one)) for one in some_requests()]


def counted(name: str, **labels: str) -> float:
    """What vLLM has counted so far in the engine that was started last."""
    samples = [
        sample
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"vllm:{name}_total"
    ]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def same(one: np.ndarray | ErrorCode, other: np.ndarray | ErrorCode) -> bool:
    return (
        np.array_equal(one, other)
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
        else one is other
    )


def test_a_request_sounds_the_same_alone_together_and_preempted(
    pipeline: FishPipeline, alone: list[np.ndarray | ErrorCode]
) -> None:
    asked = some_requests()
    assert sum(isinstance(one, np.ndarray) and one.size > 0 for one in alone) >= 5, alone
    before = counted("num_preemptions")
    for turn in (asked + asked, asked[::-1]):
        futures = [(asked.index(one), submit(pipeline, one)) for one in turn]
        for index, future in futures:
            assert same(outcome(future), alone[index]), asked[index].request_id
    assert counted("num_preemptions") > before, "the engine never had to make room"


def frames_of(pipeline: FishPipeline, residual: int) -> np.ndarray:
    """Greedy frames after a recording whose residual codes are changed by so much: its ids are the same
    for all."""
    config = pipeline.config
    codes = pipeline.references.prepare(Recording((GOLDEN / "wavs" / "ref_a.wav").read_bytes()))
    codes = np.column_stack((codes[:, :1], (codes[:, 1:] + residual) % config.codec.residual_codes))
    prompt = Conversation(pipeline.vocabulary, config.codebooks, [Reference(REFERENCE_TEXT, codes)]).ask(
        "Good morning."
    )
    sampling, waiter = TokenSampling(FRAMES, temperature=0.0, top_k=1, ignore_end=True), Waiter()
    pipeline.host.submit(TokenRequest("frames", prompt, sampling), waiter)
    made = waiter.future.result(SECONDS).codes
    assert made is not None
    return made


def test_requests_of_one_voice_share_its_kv_and_make_the_frames_that_each_makes_without_a_cache(
    pipeline: FishPipeline,
) -> None:
    """Together, in two orders, with too few blocks for all, drawn and greedy, of one and several turns;
    then equal ids of other codes."""
    texts = [
        "Good morning.",
        "The rain falls on the quiet street.",
        "Do not wake the baby.",
        DIALOGUE,
        DIALOGUE,
    ]
    asked = [request(f"voice {seed}", text, "ref_a.wav", seed=seed) for seed, text in enumerate(texts)]
    asked += [
        request("greedy", "There are 12 months.", "ref_a.wav", temperature=0.0),
        request("none", seed=3),
        request("no", seed=4),
    ]
    before = counted("prompt_tokens")
    alone = [outcome(submit(pipeline, one)) for one in asked]
    positions = 2 * (counted("prompt_tokens") - before)
    assert all(isinstance(one, np.ndarray) for one in alone)
    frames = [frames_of(pipeline, residual) for residual in (0, 1)]
    assert not np.array_equal(frames[0], frames[1])
    with opened(share_prefixes=True) as sharing:
        futures = [
            (index, submit(sharing, asked[index]))
            for index in [*range(len(asked)), *reversed(range(len(asked)))]
        ]
        for index, future in futures:
            assert same(outcome(future), alone[index]), asked[index].request_id
        computed, found = (
            counted("prompt_tokens_by_source", source="local_compute"),
            counted("prefix_cache_hits"),
        )
        assert counted("prompt_tokens") == computed + found == positions
        assert computed < positions / 2, (
            f"{computed:.0f} of {positions:.0f} positions of prompts were computed"
        )
        for residual in (0, 1, 0):
            assert np.array_equal(frames_of(sharing, residual), frames[residual])


def test_another_seed_says_it_in_another_way(
    pipeline: FishPipeline, alone: list[np.ndarray | ErrorCode]
) -> None:
    other = outcome(submit(pipeline, request("plain", seed=30)))
    assert not same(other, alone[0])
    again = outcome(
        submit(
            pipeline, request("greedy", "There are 12 months in a year, 7 days in a week.", seed=9, top_k=1)
        )
    )
    assert same(again, alone[3]), "top_k of 1 is greedy, whatever the seed"


def test_speech_says_what_it_is(pipeline: FishPipeline) -> None:
    speech = submit(pipeline, some_requests()[5]).result(SECONDS)
    assert (speech.sample_rate, speech.text) == (44_100, DIALOGUE)
    assert speech.samples.dtype == np.float32
    assert len(speech.samples) == 2048 * int(speech.meta["frames"]) > 0
    assert np.abs(speech.samples).max() <= 1
    assert (speech.meta["engine"], speech.meta["dtype"], speech.meta["turns"]) == ("vllm", "float32", 2)


@pytest.mark.parametrize("index", [1, 3])
def test_a_stream_is_the_whole_from_its_first_frame_on(
    pipeline: FishPipeline, alone: list[np.ndarray | ErrorCode], index: int
) -> None:
    whole_speech = alone[index]
    assert isinstance(whole_speech, np.ndarray)
    chunks = list(stream(pipeline, some_requests()[index]))
    assert [len(chunk.samples) // 2048 for chunk in chunks[:3]] == [1, 2, 4]
    heard = np.concatenate([chunk.samples for chunk in chunks])
    assert heard.shape == whole_speech.shape
    assert np.abs(heard - whole_speech).max() < 2e-5


def test_a_stream_that_nobody_hears_out_frees_its_slot(pipeline: FishPipeline) -> None:
    chunks = stream(pipeline, request("left", DIALOGUE, seed=11, max_seconds=10.0))
    next(chunks)
    chunks.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(outcome(submit(pipeline, some_requests()[3])), np.ndarray)
    stats = pipeline.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.frames > 0
    assert stats.audio_seconds > 0


def test_who_is_cancelled_harms_no_neighbour(
    pipeline: FishPipeline, alone: list[np.ndarray | ErrorCode]
) -> None:
    with paused_core(os.getpid()):
        heard: list[Event] = []
        victim = pipeline.start(request("victim", seed=12, max_seconds=10.0), heard.append)
        neighbour = submit(pipeline, some_requests()[0])
        victim.cancel()
    assert same(outcome(neighbour), alone[0])
    assert not heard


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (request("", "read <|im_end|> this"), ErrorCode.INPUT_UNPRONOUNCEABLE),
        (request("", "<|phoneme_start|>open"), ErrorCode.INPUT_UNPRONOUNCEABLE),
        (
            request("", "Hello.", "ref_a.wav", reference_text="<|semantic:3|>"),
            ErrorCode.INPUT_UNPRONOUNCEABLE,
        ),
        (request("", "Hello.", "ref_a.wav", reference_text=None), ErrorCode.INPUT_REFERENCE_TEXT),
        (
            request("", "Hello.", "ref_a.wav", "ref_b.wav", reference_text="one line"),
            ErrorCode.INPUT_REFERENCE_TEXT,
        ),
        (request("", "Hello.", *["ref_a.wav"] * 6), ErrorCode.INPUT_UNSUPPORTED),
        (request("", voice="robot"), ErrorCode.INPUT_UNKNOWN_VOICE),
        (request("", instruct="whisper"), ErrorCode.INPUT_UNSUPPORTED),
        (request("", repetition_penalty=1.1), ErrorCode.INPUT_UNSUPPORTED),
        (request("", "word " * 400), ErrorCode.INPUT_TOO_LONG),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_the_engine(
    pipeline: FishPipeline, asked: SynthesisRequest, code: ErrorCode
) -> None:
    done = pipeline.stats().requests_done
    with pytest.raises(InputError) as caught:
        submit(pipeline, asked)
    assert caught.value.code is code
    assert pipeline.stats().requests_done == done


def test_a_server_speaks_with_it(pipeline: FishPipeline, alone: list[np.ndarray | ErrorCode]) -> None:
    """The last test that needs the engine: a server that ends closes its pipeline."""

    def as_alone(index: int, data: bytes) -> bool:
        """To the rounding of 16 bits."""
        (samples, rate), wanted = heard(data), alone[index]
        assert isinstance(wanted, np.ndarray)
        return (
            rate == 44_100 and samples.shape == wanted.shape and bool(np.abs(samples - wanted).max() < 1e-4)
        )

    limit, greedy = {"max_seconds": FRAMES / 21.5}, {"temperature": 0.0, "voice": "default"}
    voices = [b64((GOLDEN / "wavs" / wav).read_bytes()) for wav in ("ref_a.wav", "ref_b.wav")]
    words = f"{REFERENCE_TEXT}\n{REFERENCE_TEXT}"
    with Running(pipeline) as server:
        plain = "There are 12 months in a year, 7 days in a week."
        assert as_alone(3, server.speak(plain, seed=1, **greedy, **limit).content)
        streamed = server.speak(plain, seed=1, stream=True, response_format="pcm", **greedy, **limit)
        assert (streamed.headers["x-sample-rate"], len(streamed.content)) == ("44100", 2 * len(alone[3]))  # pyright: ignore[reportArgumentType]
        both = {"reference_audio": voices, "reference_text": words, "seed": 5}
        assert as_alone(2, server.speak("The rain falls on the quiet street.", **both, **limit).content)
        for refused, code, param in (
            (server.speak("Say <|im_end|> now."), "input.unpronounceable", "input"),
            (server.speak("Hello.", voice="nobody"), "input.unknown_voice", "voice"),
            (server.speak("Hello.", reference_audio=voices), "input.reference_text", "reference_text"),
            (server.speak("Hello.", repetition_penalty=1.1), "input.unsupported", "repetition_penalty"),
        ):
            error = error_of(refused)
            assert (refused.status_code, error["code"], error["param"]) == (400, code, param)
        server.until_idle()
