"""Where the time of a frame goes at 512 to 1,024 slots, at a short and a long context.

    NIGHTJAR_COMMIT=... python -m benchmarks.qwen3_tts_rows --sizes 0b6 --json rows.json
    python -m benchmarks.qwen3_tts_rows --device cpu --tiny

The closed loop of `benchmarks.qwen3_tts`, once for each number of slots: at the context of utterances of 3
to 15 s with their texts (108 positions on average), then with 192 positions more in every prompt (300).
`split_ms` cuts a row's milliseconds of a frame of all slots: `prefill` and `idle` as the engine's stream
had them, `codec` as the codec takes alone, measured first, and `lm` the rest, in which the frames run
beside the codec. `clocks` are those of the window. The rows that matter most come first; nothing is
started after `--minutes`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.gpu import Bench, parser, serves
from benchmarks.qwen3_load import Load
from benchmarks.qwen3_tts import MORE_TEXT, Throughput, table
from benchmarks.random_models.qwen3_tts import PUBLISHED_CODEC, TINY_CODEC, dummy_decoder

#: The ends of the range first, then what lies between.
SLOTS = (512, 1024, 768, 640, 896)
#: Slots beside the rows: as many as utterances end in eight frames of 512 rows.
SPARE = 32


@dataclass(frozen=True, slots=True)
class Case:
    """One row: slots, and positions that prompts have more."""

    slots: int
    more_text: int
    #: Slots beside the rows, whose requests wait prefilled.
    spare: int = 0


def cases(slots: Sequence[int], more_texts: Sequence[int], spare: Sequence[int] = ()) -> Iterator[Case]:
    """All of them, the short context first.

    `spare`: numbers of slots that are measured at the short context with spare slots as well.
    """
    for more_text in more_texts:
        for count in slots:
            yield Case(count, more_text)
            if count in spare and not more_text:
                yield Case(count, more_text, SPARE)


def split_ms(row: dict[str, Any], codec_us: float | None) -> dict[str, float]:
    """Milliseconds of a frame of all slots by what the device did; together they are `ms_per_frame`. Empty
    where no device was watched."""
    if "stream_frames" not in row or not row.get("ms_per_frame"):
        return {}
    whole, codec = (
        row["ms_per_frame"],
        0.0 if row["part"] == "lm" else row["slots"] * (codec_us or 0.0) / 1000,
    )
    found = {"prefill": whole * row["stream_prefill"], "idle": whole * row["stream_idle"], "codec": codec}
    return {"lm": whole - sum(found.values()), **found}


def split_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The split of every row, with its clock."""
    lines: list[str] = []
    for row in rows:
        if "audio_s_per_s" not in row or row["part"] == "codec":
            continue
        parts = "".join(f"  {name} {ms:6.2f}" for name, ms in row.get("split_ms", {}).items())
        clock = f"  {row['clocks']['mhz']:.0f} MHz {row['clocks']['watts']:.0f} W" if "clocks" in row else ""
        spare = f"+{row['spare_slots']} " if row.get("spare_slots") else ""
        about = f"{row['size']:5}{row['part']:4}{row['slots']:6} {spare}context {row['context']:4.0f}"
        lines.append(
            f"{about}{row['audio_s_per_s']:8,.0f} RTFx{row['ms_per_frame'] or 0:8.2f} ms ={parts}{clock}"
        )
    return lines


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--sizes", nargs="*", default=["0b6"])
    made.add_argument("--slots", nargs="*", type=int, default=list(SLOTS))
    made.add_argument(
        "--more-text",
        nargs="*",
        type=int,
        default=[0, MORE_TEXT],
        help="positions that every prompt has more",
    )
    made.add_argument(
        "--lm",
        nargs="*",
        type=int,
        default=[],
        help="numbers of slots that are measured without the codec as well",
    )
    made.add_argument(
        "--spare",
        nargs="*",
        type=int,
        default=[],
        help=f"numbers of slots that are measured with {SPARE} spare ones as well",
    )
    made.add_argument("--seconds", type=float, default=1.5, help="seconds of each window")
    made.add_argument("--windows", type=int, default=3)
    made.add_argument(
        "--minutes", type=float, default=8.0, help="minutes after which nothing more is started"
    )
    made.add_argument("--turns", type=int, help="frames a scheduling turn, instead of the engine's choice")
    made.add_argument(
        "--admit-turns",
        type=int,
        help="turns that newcomers may wait for company, instead of the engine's choice",
    )
    options = made.parse_args()
    until = time.monotonic() + 60 * options.minutes
    shortest, longest, seconds = (0.3, 0.8, 0.3) if options.tiny else (3.0, 15.0, options.seconds)
    sizes, windows = (["tiny"], 2) if options.tiny else (options.sizes, options.windows)
    bench = Bench(
        "qwen3_tts_rows",
        options,
        load={"shortest_s": shortest, "longest_s": longest, "window_s": seconds, "windows": windows},
        switch_ms=serves(),
    )
    decoder = dummy_decoder(TINY_CODEC if options.tiny else PUBLISHED_CODEC, bench.device, bench.dtype)
    left_out: list[str] = []
    for size in sizes:
        work = Throughput(bench, size, decoder, Load(shortest, longest, seconds))
        codec: list[float] = []
        bench.attempt(
            f"{size} codec", lambda work=work, codec=codec: codec.append(_codec_us(work, options.tiny))
        )
        for case in cases(options.slots, options.more_text, options.spare):
            name = f"{size} {case.slots}+{case.spare} +{case.more_text}"
            if time.monotonic() >= until:
                left_out.append(name)
                continue
            work.load = Load(shortest, longest, seconds, more_text=case.more_text)
            parts = (
                ("all", "lm") if case.slots in options.lm and not (case.more_text or case.spare) else ("all",)
            )
            bench.attempt(name, partial(_measure, work, case, parts, windows, codec[0] if codec else None))
        del work
    bench.keep(left_out=left_out)
    print(table(bench.rows))
    print("\n".join(split_lines(bench.rows)))
    print(f"no time was left for: {', '.join(left_out) or 'nothing'}")
    print(f"faults: {', '.join(bench.faults) or 'none'}")
    return 1 if bench.faults else 0


def _codec_us(work: Throughput, tiny: bool) -> float:
    work.codec(tiny)
    return work.bench.rows[-1]["us_per_frame"]


def _measure(
    work: Throughput, case: Case, parts: Sequence[str], windows: int, codec_us: float | None
) -> None:
    before = len(work.bench.rows)
    work.measure(case.slots, parts, windows, spare_slots=case.spare)
    for row in work.bench.rows[before:]:
        row["split_ms"] = split_ms(row, codec_us)
    work.bench.write()


if __name__ == "__main__":
    raise SystemExit(main())
