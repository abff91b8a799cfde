"""How Fish Speech S2 draws: noise that belongs to a request, and steps whose rows do not know their neighbours."""

from __future__ import annotations

import pytest
import torch

from pipelines.fish_speech.config import FishConfig
from pipelines.fish_speech.fast_ar import FastAr, Pieces, fast_tensors
from pipelines.fish_speech.frame import RANKS, WINDOW, FrameGraphs, FrameMaker, Rows, draw, probabilities, ranked, uniform_noise
from pipelines.nn.checkpoint import Checkpoint
from tests.support.fish_checkpoint import whole
from tests.unit.kernels.test_cuda_graphs import Device

CONFIG = FishConfig.from_folder(whole())
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def maker() -> FrameMaker:
    torch.set_num_threads(1)
    with Checkpoint.open(CONFIG.folder) as checkpoint:
        tensors = fast_tensors(CONFIG, checkpoint)
    fast = FastAr(CONFIG)
    fast.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return FrameMaker(CONFIG, fast.requires_grad_(False), CPU)


def some_rows(count: int, seed: int = 0, top_k: int = 30) -> Rows:
    dice = torch.Generator().manual_seed(seed)
    return Rows(
        torch.randn(count, CONFIG.slow.dim, generator=dice),
        3 * torch.randn(count, len(CONFIG.semantic) + 1, generator=dice),
        torch.randint(CONFIG.semantic.start, CONFIG.semantic.stop, (count, WINDOW), generator=dice),
        torch.full((count,), 0.8),
        torch.full((count,), 0.9),
        torch.full((count,), top_k),
        torch.arange(count) * 1_000_003 + (1 << 40),
        torch.arange(count) % 7,
    )


def row(rows: Rows, index: int) -> Rows:
    return Rows(*(tensor[index : index + 1] for tensor in rows.tensors()))


def test_noise_is_of_seed_frame_stream_and_rank_alone() -> None:
    seeds, frames = torch.tensor([5, 5, 6, (1 << 63) - 1]), torch.tensor([0, 1, 0, 99])
    noise = uniform_noise(seeds, frames, 11, RANKS)
    assert noise.shape == (4, 11, RANKS)
    assert noise.unique().numel() > 0.999 * noise.numel()
    assert (noise > 0).all()
    assert (noise < 1).all()
    assert torch.equal(uniform_noise(seeds[2:3], frames[2:3], 11, RANKS)[0], noise[2])
    assert torch.equal(uniform_noise(seeds, frames, 3, 10), noise[:, :3, :10]), "more streams or ranks change no number"
    many = uniform_noise(torch.arange(2000), torch.zeros(2000, dtype=torch.long), 1, 4)
    assert abs(float(many.mean()) - 0.5) < 0.01
    assert abs(float(many.var()) - 1 / 12) < 0.003


def test_draws_have_the_distribution_that_was_asked_for() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0]])
    candidates = ranked(logits, 0)
    chances = probabilities(candidates, torch.tensor([0.7]), torch.tensor([0.95]), torch.tensor([4]))
    count = 20_000
    noise = uniform_noise(torch.arange(count), torch.zeros(count, dtype=torch.long), 1, 5)[:, 0]
    wide = ranked(logits.expand(count, -1), 0)
    drawn = draw(wide, chances.expand(count, -1), noise)
    share = torch.bincount(drawn, minlength=5) / count
    assert (share - chances[0]).abs().max() < 0.012
    assert share[4] == 0


def test_the_token_that_crosses_top_p_is_dropped_and_one_always_stays() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    candidates, one = ranked(logits, 0), torch.ones(1)
    everything = torch.tensor([0])
    assert (probabilities(candidates, one, torch.tensor([0.79]), everything)[0] > 0).tolist() == [True, False, False]
    assert (probabilities(candidates, one, torch.tensor([0.81]), everything)[0] > 0).tolist() == [True, True, False]
    assert (probabilities(candidates, one, torch.tensor([0.01]), everything)[0] > 0).tolist() == [True, False, False]
    assert probabilities(candidates, one, torch.tensor([1.1]), everything)[0].tolist() == pytest.approx([0.5, 0.3, 0.2])


def test_few_candidates_are_the_first_of_all() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    few, every = ranked(logits, 20), ranked(logits, 0)
    assert torch.equal(few.order, every.order[:, :20])
    assert torch.allclose(few.cumulative, every.cumulative[:, :20])


def test_a_row_does_not_know_its_neighbours(maker: FrameMaker) -> None:
    rows = some_rows(9)
    with torch.inference_mode():
        tokens, codes = maker(rows)
        alone = [maker(row(rows, index)) for index in range(9)]
    assert torch.equal(tokens, torch.cat([token for token, _ in alone]))
    assert torch.equal(codes, torch.cat([code for _, code in alone]))
    assert torch.equal(codes[:, 0], (tokens - CONFIG.semantic.start).clamp(0, CONFIG.fast.vocab - 1))
    assert len({tuple(code) for code in codes.tolist()}) == 9


def test_all_candidates_draw_what_few_would(maker: FrameMaker) -> None:
    """A neighbour that asks for more than the usual candidates takes the whole batch off its graph: nothing changes for the others."""
    rows, graphs = some_rows(5), FrameGraphs(maker, 8)
    with torch.inference_mode():
        for one, other in zip(graphs(rows, wide=False), graphs(rows, wide=True)):
            assert torch.equal(one, other)


def test_a_graph_without_room_is_captured_again_when_what_lay_unused_is_given_back(
    maker: FrameMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    device.full_ends = (0,)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: device.aside)
    graphs, rows = FrameGraphs(maker, 8), some_rows(4)
    with torch.inference_mode():
        graph, inputs, made = graphs._graph(4, rows)
        want = maker(inputs)
    assert device.log.count("given back") == 1
    assert len(inputs.hidden) == 4
    assert [torch.equal(one, other) for one, other in zip(made, want)] == [True, True]
    del graph


def test_repetition_is_avoided_by_the_second_draw(maker: FrameMaker) -> None:
    rows = some_rows(200, seed=3)
    empty = Rows(rows.hidden, rows.logits, torch.zeros_like(rows.window), *rows.tensors()[3:])
    with torch.inference_mode():
        free, _ = maker(empty)
        kept, _ = maker(rows)
    hit = (rows.window == free[:, None]).any(-1)
    assert 5 < int(hit.sum()) < 195
    assert torch.equal(free[~hit], kept[~hit])
    assert not torch.equal(free[hit], kept[hit])


def test_top_k_of_one_is_the_likeliest(maker: FrameMaker) -> None:
    rows = some_rows(6, top_k=1)
    with torch.inference_mode():
        tokens, codes = maker(rows)
        again, same = maker(Rows(*rows.tensors()[:6], rows.seeds + 5, rows.frames + 1))
    best = rows.logits.argmax(-1)
    assert torch.equal(tokens, torch.tensor([*CONFIG.semantic, CONFIG.end])[best])
    assert torch.equal(tokens, again)
    assert torch.equal(codes, same)


def test_compiled_pieces_draw_the_same(maker: FrameMaker) -> None:
    """Through the compiler's own front; its kernels are for a GPU."""
    rows, pieces = [some_rows(count) for count in (5, 9, 1, 2)], maker.fast.pieces
    with torch.inference_mode():
        plain = [maker(one) for one in rows]
        maker.fast.pieces = Pieces.compiled(backend="eager")
        try:
            for one, before in zip(rows, plain):
                for made, want in zip(maker(one), before):
                    assert torch.equal(made, want)
        finally:
            maker.fast.pieces = pieces
