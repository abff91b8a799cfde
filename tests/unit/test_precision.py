"""fp8 as `benchmarks.precision` emulates it: scales by block, products and convolutions, and what they change. The figures
and plots of docs/precision.md are those of its result."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, linear

from benchmarks import precision
from benchmarks.fp8 import Fp8, error_of, in_fp8, worst
from benchmarks.plots import draw


@pytest.fixture(autouse=True)
def same_noise() -> None:
    torch.manual_seed(3)


def test_each_block_of_weights_and_of_activations_has_a_scale_of_its_own() -> None:
    spread = 10.0 ** torch.tensor([[0.0, 4.0, -4.0], [-4.0, 0.0, 4.0]])
    weights = torch.randn(200, 300) * spread.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :300]
    found = in_fp8(weights, 128)
    for rows in (slice(0, 128), slice(128, 200)):
        for columns in (slice(0, 128), slice(128, 256), slice(256, 300)):
            assert 0.02 < error_of(found[rows, columns], weights[rows, columns]) < 0.035
    steps = torch.randn(5, 128) * 10.0 ** torch.arange(-6, 4, 2)[:, None]
    assert all(0.01 < error_of(one, other) < 0.04 for one, other in zip(in_fp8(steps, 1), steps, strict=True))
    # One scale for rows that differ this much rounds the smallest to 0.
    assert error_of(in_fp8(steps, 128)[0], steps[0]) == 1.0
    assert not in_fp8(torch.zeros(3, 4), 128).any()


def test_products_and_convolutions_with_the_given_weights_alone_are_in_fp8() -> None:
    x, chosen, other = (
        torch.randn(9, 256).bfloat16(),
        torch.randn(130, 256).bfloat16(),
        torch.randn(130, 256).bfloat16(),
    )
    exact, bias = linear(x.float(), chosen.float()), torch.randn(130).bfloat16()
    own = error_of(linear(x, chosen), exact)
    with Fp8([chosen]):
        made, shifted, same = linear(x, chosen), linear(x, chosen, bias), linear(x, other)
    assert torch.equal(same, linear(x, other))
    assert made.dtype == torch.bfloat16
    assert own < 0.003 < 0.03 < error_of(made, exact) < 0.045
    assert error_of(shifted, made.float() + bias.float()) < 0.004

    x, kernel = torch.randn(2, 160, 30).bfloat16(), torch.randn(7, 160, 3).bfloat16()
    with Fp8([kernel]):
        made = conv1d(x, kernel, dilation=4)
    rows = x.transpose(1, 2).flatten(0, 1)
    values = in_fp8(rows, 1).view(2, 30, 160)
    wanted = sum(values[:, 4 * at : 22 + 4 * at] @ in_fp8(kernel[:, :, at], 128).t() for at in range(3))
    assert isinstance(wanted, Tensor)
    assert error_of(made.transpose(1, 2), wanted) < 0.004
    assert error_of(made, conv1d(x.float(), kernel.float(), dilation=4)) > 0.03


def rows_of(work: Callable[..., None], *given: Any, **options: int) -> list[dict[str, Any]]:
    """The rows of a part of the benchmark, with random weights of next to no width."""
    rows = list[dict[str, Any]]()
    bench = SimpleNamespace(device=torch.device("cpu"), options=SimpleNamespace(**options), add=rows.append)
    work(bench, "tiny", *given)
    return rows


def test_each_part_in_fp8_moves_the_logits_that_it_makes() -> None:
    own, *parts = rows_of(precision.products, positions=12)
    assert [own["precision"], *{row["precision"] for row in parts}] == ["bfloat16", "fp8"]
    assert len({row["of"] for row in parts}) == len(parts) == 11
    for row in parts:
        assert row["residual_error"] > 1.3 * own["residual_error"], row["of"]
        moved = not row["of"].startswith("predictor")
        assert (row["first_error"] > 2 * own["first_error"]) == moved, row["of"]
        assert (row["first_error"] == own["first_error"]) != moved, row["of"]
        assert row["within_twice"] == (max(row["first_error_times"], row["residual_error_times"]) <= 2)
        assert row["first_kl"] >= own["first_kl"]
    every = parts[-1]
    assert every["of"] == "all"
    assert every["residual_error"] == max(row["residual_error"] for row in parts)


def test_units_in_fp8_move_the_samples() -> None:
    own, *parts = rows_of(precision.codec, 1.0, codec_frames=2)
    assert [row["of"] for row in parts] == [*(f"units of {width}" for width in (24, 12, 6, 3)), "all units"]
    assert all(row["samples_error"] > own["samples_error"] > 0 for row in parts)
    assert all(row["unit_error"] > 2 * row["unit_own_error"] for row in parts)
    assert own["snr_db"] > 15 > 1.2 + parts[-1]["snr_db"]


def test_float32_reads_what_each_model_drew_from_its_own_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "WINDOW", 12)
    exact, own, some, every = rows_of(precision.drift, rows=2, frames=20)
    assert exact["same_frames"] == [20, 20]
    assert max(max(row["same_frames"]) for row in (own, some, every)) < 20
    assert [one["from"] for one in every["windows"]] == [0, 12]
    for name in ("first_kl", "residual_kl"):
        # One pass over all frames gives the logits of the frames one by one.
        drawn, rounded, quantized = (row["windows"][0][name] for row in (exact, own, every))
        assert 0 <= drawn < 1e-9 < 1e-6 < rounded < quantized / 10
    chances = [
        window[f"{name}_log_probability"] for window in own["windows"] for name in ("first", "residual")
    ]
    assert all(-8 < one < -3 for one in chances)


def test_a_row_that_repeats_itself_is_counted() -> None:
    speech = torch.randint(0, 2000, (3, 200))
    speech[1, 90:] = speech[1, 90:95].repeat(22)
    assert precision.runaways(speech) == 1
    assert precision.runaways(speech[[0, 2]]) == 0


ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "benchmarks/results/precision.json").read_text())
MODELS = "0b6", "tiny", "checkpoint-design", "checkpoint-thetas"
#: Of which the page has the drift.
DRIFT = "checkpoint-design", "checkpoint-thetas"


def found_rows(part: str, **fields: Any) -> list[dict[str, Any]]:
    of = [row for row in FOUND["rows"] if row["part"] == part]
    return [row for row in of if all(row.get(name) == value for name, value in fields.items())]


def language_model_lines() -> Iterator[str]:
    for row in found_rows("products", model="0b6"):
        cells = [row.get("of", "nothing")]
        cells += [f"{1000 * row[name]:.2f}" for name in ("first_kl", "residual_kl")]
        cells += [f"{100 * row[name]:.0f} %" for name in ("first_top50", "residual_top50")]
        cells += [f"{100 * row[name]:.1f} %" for name in ("first_error", "residual_error")]
        yield table_line(*cells)
    for row in found_rows("products", model="0b6", precision="fp8"):
        same = [found_rows("products", model=name, of=row["of"])[0] for name in MODELS]
        yield table_line(row["of"], *(f"{worst(one):.1f}" for one in same))


def codec_lines() -> Iterator[str]:
    own, quiet = (found_rows("codec", model="0b6", scale=scale) for scale in (1.0, 0.5))
    for row, other in zip(own, quiet, strict=True):
        cells = [row.get("of", "nothing")]
        for one in (row, other):
            cells += [
                f"{one['snr_db']:.1f}",
                *(f"{one.get(f'{name}_times', 1):.1f}" for name in ("samples_error", "unit")),
            ]
        yield table_line(*cells)


def drift_lines() -> Iterator[str]:
    for row in (row for name in DRIFT for row in found_rows("drift", model=name)[1:]):
        first, *_, last = row["windows"]
        cells = [row["model"], row["of"] or row["precision"]]
        cells += [f"{1000 * one[name]:.2f}" for name in ("first_kl", "residual_kl") for one in (first, last)]
        for name in ("first", "residual"):
            cells.append(f"{statistics.mean(one[f'{name}_log_probability'] for one in row['windows']):.2f}")
        yield table_line(*cells, f"{row['runaways']} of {row['rows']}")


def table_line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def test_the_page_has_the_figures_and_plots_of_its_result(tmp_path: Path) -> None:
    page = (ROOT / "docs/precision.md").read_text()
    lines = [*language_model_lines(), *codec_lines(), *drift_lines()]
    tables = re.findall(r"(?m)^\|---.*\n((?:\|.*\n)+)", page)
    assert [line for table in tables for line in table.splitlines()] == lines
    assert f"commit `{FOUND['commit']}`" in page
    assert f"`{FOUND['device']}`" in page
    assert FOUND["faults"] == {}
    draw(FOUND, tmp_path)
    plots = {path.name for path in tmp_path.iterdir()}
    assert plots == set(re.findall(r"\(media/([\w-]+\.svg)\)", page))
    for name in plots:
        assert (ROOT / "docs/media" / name).read_text() == (tmp_path / name).read_text(), name
        assert (ROOT / "docs/media" / name).stat().st_size < 40_000


def test_no_part_of_the_language_model_keeps_to_twice_the_error_of_bfloat16() -> None:
    """The reason that the page gives why there is no setting."""
    parts = found_rows("products", precision="fp8")
    assert len(parts) == 11 * len(MODELS)
    assert not any(row["within_twice"] for row in parts)
    assert not any(row["within_twice"] for row in found_rows("codec", model="0b6", of="all units"))
