"""Fish Speech S2 on our own engine: its tensors, prompts that share a voice, sequences in any company, and
opening it without vLLM."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.frame import FrameTensors
from kernels.reference import next_inputs
from kernels.sampler import process_first
from pipelines.engine.core import EngineOptions
from pipelines.engine.engine import Engine, NativeHost
from pipelines.engine.executor import EagerExecutor, PrefillRun
from pipelines.engine.opening import NativeModelOptions
from pipelines.engine.state import PagedKV, SlotState
from pipelines.errors import ConfigError, ErrorCode, ModelError, SynthesisError
from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.model import (
    FishModel,
    load_weights,
    memory_needs,
    plan_sizes,
    shared_prefixes,
    take_weights,
)
from pipelines.fish_speech.prompt import Conversation, Reference, Vocabulary
from pipelines.registry import describe, open_pipeline
from pipelines.request import Event, Generation, Message, SynthesisRequest, stream, submit
from pipelines.tokens import TokenRequest, Tokens, TokenSampling
from tests.support.fish_checkpoint import GOLDEN, whole
from tests.support.golden_checkpoint import weightless
from tests.support.vllm_kit import Waiter

SECONDS = 240
CPU = torch.device("cpu")
CONFIG = FishConfig.from_folder(whole())
VOCABULARY = Vocabulary.from_folder(CONFIG)
END = len(CONFIG.semantic)
OPTIONS = EngineOptions(slots=6, pages=128, page_size=16, max_context=512)


class CountingModel(FishModel):
    """Counts the positions that it prefills."""

    prefilled = 0

    def prefill(self, runs: Sequence[PrefillRun], state: SlotState, kv: PagedKV) -> None:
        self.prefilled += sum(len(run.embeddings) for run in runs)
        super().prefill(runs, state, kv)


@cache
def model() -> CountingModel:
    torch.set_num_threads(1)
    return CountingModel(CONFIG, load_weights(CONFIG, torch.float32, CPU), OPTIONS.max_context)


def open_host(share: bool = True, **sizes: int) -> NativeHost:
    options = replace(OPTIONS, **sizes)
    executor = EagerExecutor(model(), options)
    ids = np.array([*CONFIG.semantic, CONFIG.end])
    prefixes = partial(shared_prefixes, semantic=CONFIG.semantic) if share else lambda _: ()
    return NativeHost(Engine(executor, options), ids, prefixes, CONFIG.codebooks)


def voice(residual: int = 0) -> Reference:
    """A golden recording, its residual codes changed by so much: its ids are the same for all."""
    with np.load(GOLDEN / "arrays" / "clone_one_ref.npz") as data:
        codes = data["reference_codes_0"].T
    changed = np.column_stack((codes[:, :1], (codes[:, 1:] + residual) % CONFIG.codec.residual_codes))
    return Reference("The train to the city leaves at nine.", changed)


def asked(
    text: str, *voices: Reference, most: int = 12, seed: int = 1, temperature: float = 0.8
) -> TokenRequest:
    prompt = Conversation(VOCABULARY, CONFIG.codebooks, voices).ask(text)
    sampling = TokenSampling(most, temperature, 30, 0.9, seed=seed, stop_ids=(CONFIG.end,))
    return TokenRequest(text, prompt, sampling)


def made(host: NativeHost, *requests: TokenRequest) -> list[Tokens]:
    waiters = [Waiter() for _ in requests]
    for request, waiter in zip(requests, waiters):
        host.submit(request, waiter)
    return [waiter.future.result(SECONDS) for waiter in waiters]


class TestTensors:
    def test_the_head_is_the_semantic_tokens_and_the_end_and_rows_that_are_never_drawn(self) -> None:
        tensors = model().tensors
        assert len(tensors.head) % 64 == 0
        assert 0 < len(tensors.head) - END - 1 < 64
        assert not tensors.head[END + 1 :].any()
        assert tensors.draw.ends == (END,)
        rules = tensors.draw
        logits = process_first(
            torch.zeros(1, len(tensors.head)),
            torch.zeros(1, len(tensors.head), dtype=torch.bool),
            torch.ones(1),
            torch.zeros(1, dtype=torch.bool),
            rules.ends,
            rules.suppress_from,
        )
        assert logits[0].isfinite().nonzero()[:, 0].tolist() == list(range(END + 1))

    def test_every_row_of_the_head_has_an_input_of_the_depth(self) -> None:
        """A row with NaN draws any of them; it ends that request alone, and not the frame of all."""
        tensors = model().tensors
        assert tensors.depth is not None
        assert len(tensors.depth.inputs) >= len(tensors.head)
        assert tensors.depth.starts.tolist() == [0] * CONFIG.codebooks
        next_inputs(
            tensors.feedback,
            torch.full((1, CONFIG.codebooks), len(tensors.head) - 1).clamp(max=63),
            torch.zeros(1).long(),
        )

    def test_a_frame_is_fed_back_as_a_prompt_holds_it(self) -> None:
        reference = voice()
        prompt = Conversation(VOCABULARY, CONFIG.codebooks, [reference]).ask("Good.")
        embedded = model().embed(prompt)
        ids = np.array(prompt.ids)
        spoken = (ids >= CONFIG.semantic.start) & (ids < CONFIG.semantic.stop)
        codes = torch.from_numpy(reference.codes)
        assert torch.equal(
            embedded[torch.from_numpy(spoken)], next_inputs(model().tensors.feedback, codes, codes[:, 0])
        )
        assert not torch.equal(
            embedded, model().embed(Conversation(VOCABULARY, CONFIG.codebooks, [voice(1)]).ask("Good."))
        )

    def test_rotations_are_those_of_the_published_tables(self) -> None:
        """Rounded to bfloat16, whatever the model's type, and turned in float32."""
        tensors = model().tensors
        assert tensors.depth is not None
        for stack in (tensors.backbone, tensors.depth.stack):
            assert torch.equal(stack.rope_table, stack.rope_table.bfloat16().float())
            assert stack.wide_rope
        assert tensors.backbone.layers[0].q_norm is not None
        assert tensors.depth.stack.layers[0].q_norm is None


class Table(dict[str, Tensor]):
    """Tensors by name, as a checkpoint gives them."""

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, device: object = None
    ) -> Tensor:
        assert tuple(self[name].shape) == tuple(shape), name
        return self[name].to(dtype)


def stored() -> Table:
    return Table(
        {name: tensor for path in whole().glob("*.safetensors") for name, tensor in load_file(path).items()}
    )


def frame_of(config: FishConfig, table: Table) -> FrameTensors:
    return FishModel(config, take_weights(table, config, torch.float32, CPU), 64).tensors


class TestWeights:
    @pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
    def test_what_is_wrong_is_named(self, tmp_path: Path, fault: str) -> None:
        folder = shutil.copytree(whole(), tmp_path / "checkpoint", copy_function=shutil.copyfile)
        path, index = folder / "model-00002-of-00003.safetensors", folder / "model.safetensors.index.json"
        name, tensors, content = (
            "text_model.model.layers.0.attention.wo.weight",
            load_file(path),
            json.loads(index.read_text()),
        )
        if fault == "missing":
            del tensors[name], content["weight_map"][name]
        elif fault == "extra":
            name = "text_model.model.layers.7.ffn_norm.weight"
            tensors[name], content["weight_map"][name] = torch.zeros(48), path.name
        else:
            tensors[name] = torch.zeros(48, 48)
        save_file(tensors, path)
        index.write_text(json.dumps(content))
        with pytest.raises(ModelError, match=name.replace(".", r"\.")) as caught:
            load_weights(FishConfig.from_folder(folder), torch.float32, CPU)
        assert caught.value.code is ErrorCode.MODEL_BAD_CHECKPOINT

    def test_separate_queries_keys_and_values_are_the_same_model(self) -> None:
        table, apart = stored(), stored()
        for name in [name for name in apart if name.endswith("wqkv.weight")]:
            for letter, part in zip("qkv", apart.pop(name).split([64, 32, 32])):
                apart[name.replace("wqkv", f"w{letter}")] = part
        one, other = frame_of(CONFIG, table), frame_of(CONFIG, apart)
        assert one.depth is not None
        assert other.depth is not None
        for mine, theirs in zip(
            one.backbone.layers + one.depth.stack.layers, other.backbone.layers + other.depth.stack.layers
        ):  # pyright: ignore[reportOperatorIssue]
            assert torch.equal(mine.qkv, theirs.qkv)

    def test_a_fast_ar_of_another_width_has_a_projection(self) -> None:
        config, table = replace(CONFIG, fast=replace(CONFIG.fast, hidden=32)), stored()
        for key in [
            key for key in table if key.startswith("audio_decoder.") and "codebook_embeddings" not in key
        ]:
            narrow = (
                table[key]
                if ".w1." in key or ".w3." in key or "wqkv" in key or key.count(".") == 2
                else table[key][:32]
            )
            table[key] = (
                narrow[:32]
                if narrow.dim() == 1
                else narrow[:, :32]
                if "wo." not in key and "w2." not in key
                else narrow
            )
        table["audio_decoder.project_in.weight"] = torch.randn(32, 48)
        table["audio_decoder.project_in.bias"] = torch.randn(32)
        depth = frame_of(config, table).depth
        assert depth is not None
        assert depth.project is not None
        assert torch.equal(depth.project[0], table["audio_decoder.project_in.weight"])
        assert torch.equal(depth.project[1], table["audio_decoder.project_in.bias"])


class TestVoices:
    def test_the_second_request_of_a_voice_prefills_its_text_alone_and_says_the_same(self) -> None:
        requests = [
            asked(text, voice(), seed=seed)
            for seed, text in enumerate(("Good morning.", "The rain falls on the quiet street."))
        ]
        with closing(open_host(share=False)) as host:
            alone = [made(host, one)[0] for one in requests]
        with closing(open_host()) as host:
            for one, wanted in zip(requests, alone):
                before = model().prefilled
                np.testing.assert_array_equal(made(host, one)[0].codes, wanted.codes)
        shared = requests[1].prompt.shared[0] // OPTIONS.page_size * OPTIONS.page_size
        assert shared > 60
        assert model().prefilled - before == len(requests[1].prompt) - 1 - shared

    def test_equal_ids_of_other_codes_are_another_voice(self) -> None:
        requests = [asked("Good morning.", voice(residual)) for residual in (0, 1)]
        assert requests[0].prompt.ids == requests[1].prompt.ids
        with closing(open_host(share=False)) as host:
            alone = [made(host, one)[0] for one in requests]
        assert not np.array_equal(alone[0].codes, alone[1].codes)
        with closing(open_host()) as host:
            for one, wanted in zip(requests, alone):
                np.testing.assert_array_equal(made(host, one)[0].codes, wanted.codes)

    def test_a_prefix_is_the_system_message(self) -> None:
        prompt = asked("Good morning.", voice()).prompt
        (prefix,) = shared_prefixes(prompt, CONFIG.semantic)
        assert (prefix.length,) == prompt.shared
        other = asked("Not the same text.", voice()).prompt
        assert [*shared_prefixes(other, CONFIG.semantic)] == [prefix]
        assert not shared_prefixes(replace(prompt, shared=()), CONFIG.semantic)

    def test_a_prefix_is_known_by_all_that_is_in_it_wherever_shorter_ones_end(self) -> None:
        prompt = asked("Good morning.", voice()).prompt
        (length,) = prompt.shared
        ends = ((length,), (3, length), (3, length - 2, length))
        found = [shared_prefixes(replace(prompt, shared=each), CONFIG.semantic) for each in ends]
        assert len({one[-1] for one in found}) == 1
        assert found[1][0] == found[2][0]
        assert len({one.content for one in found[2]}) == 3


def test_alone_is_as_together_with_any_settings() -> None:
    """Drawn and greedy, wide and narrow, with too few pages for all."""
    requests = [
        asked("Good morning.", seed=3, most=30),
        asked("The rain falls.", voice(), seed=4, most=30, temperature=1.3),
    ]
    requests += [
        asked("There are 12 months.", temperature=0.0, most=40),
        asked("Do not wake the baby.", voice(), voice(1), seed=5),
    ]
    wide = replace(requests[0].sampling, top_k=0, top_p=1.0, seed=9)
    requests.append(replace(requests[0], sampling=wide))
    alone = []
    for one in requests:
        with closing(open_host(share=False)) as host:
            alone += made(host, one)
    assert all(one.codes is not None and len(one.codes) for one in alone)
    with closing(open_host(pages=24, reserve_frames=0)) as host:
        for one, wanted in zip(made(host, *requests, *requests), [*alone, *alone]):
            np.testing.assert_array_equal(one.codes, wanted.codes)
            assert one.finish == wanted.finish


DIALOGUE = (
    "<|speaker:1|>There are 12 months in a year, 7 days in a week, and you can read this text aloud with a calm voice. "
    "<|speaker:0|>Good morning, how are you today? I have not seen you here since the last week of May. "
    "<|speaker:0|>That is nice."
)


def spoken(name: str, text: str = DIALOGUE, **generation: float) -> SynthesisRequest:
    return SynthesisRequest(name, (Message("user", "text", text),), Generation(**generation))  # pyright: ignore[reportArgumentType]


def test_who_is_left_or_aborted_between_turns_frees_its_slot() -> None:
    with closing(open_pipeline(str(whole()), max_context=512, keep_unfinished=True)) as pipeline:
        alone = submit(pipeline, spoken("alone", temperature=0.0)).result(SECONDS)
        chunks = stream(pipeline, spoken("left"))
        next(chunks)
        chunks.close()  # pyright: ignore[reportAttributeAccessIssue]
        heard: list[Event] = []
        victim, neighbour = (
            pipeline.start(spoken("victim"), heard.append),
            submit(pipeline, spoken("neighbour", temperature=0.0)),
        )
        victim.cancel()
        np.testing.assert_array_equal(neighbour.result(SECONDS).samples, alone.samples)
        assert (alone.meta["engine"], alone.meta["turns"]) == ("native", 2)
        stats = pipeline.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert not heard


class TestOpening:
    def test_it_opens_and_is_named_without_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "vllm", None)
        card = describe(str(whole()))
        assert (card.engine, card.engines) == ("native", ("native", "vllm"))
        open_pipeline(str(whole()), max_context=256).close()
        with pytest.raises(ModelError, match="extra `vllm`") as caught:
            open_pipeline(str(whole()), engine="vllm")
        assert caught.value.code is ErrorCode.MODEL_MISSING_EXTRA

    @pytest.mark.parametrize("engine", ["auto", "native", "vllm"])
    def test_an_unknown_option_is_named(self, engine: str) -> None:
        with pytest.raises(ConfigError, match="'slot'"):
            open_pipeline(str(whole()), engine=engine, slot=3)

    def test_graphs_are_refused_on_a_cpu_before_anything_is_loaded(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="The graph executor"):
            open_pipeline(str(weightless(whole(), tmp_path)), engine="native", device="cpu", executor="graph")

    def test_it_opens_for_streams(self) -> None:
        with closing(open_pipeline(str(whole()), max_context=256, streams=4, slots=6)) as pipeline:
            assert pipeline.info.slots == 6
            asked = SynthesisRequest(
                "one", (Message("user", "text", "Good."),), Generation(max_seconds=0.2, temperature=0.0)
            )
            with pytest.raises(SynthesisError) as caught:
                list(stream(pipeline, asked))
        assert caught.value.code is ErrorCode.SYNTH_NO_EOS

    def test_memory_is_counted_by_the_page(self) -> None:
        needs = memory_needs(CONFIG, torch.bfloat16, 64)
        assert needs.page == 2 * 3 * 2 * 16 * 64 * 2
        assert needs.weights > (whole() / "codec.pth").stat().st_size

    def test_its_sizes_follow_from_the_checkpoint(self) -> None:
        sizes = plan_sizes(CONFIG, NativeModelOptions(slots=3, max_context=300), CPU, torch.float32)
        assert (sizes.slots, sizes.max_context) == (3, 300)
        assert sizes.frame_seconds == pytest.approx(2048 / 44_100)
