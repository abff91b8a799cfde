"""Quality checks without a model: gates, verdicts, the config of the spec."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from jobs.checks import (
    CHECKS,
    METERS,
    OF_ENGINES,
    PRESETS,
    Bound,
    Check,
    MeterCard,
    Quality,
    quality_of,
    scores_with,
)
from jobs.job_options import job_of
from jobs.ledger.records import JobSpec, Score
from jobs.spec import frozen_spec, spec_sha
from pipelines.audio import activity, frame_powers, longest_pause, trim_silence
from pipelines.duration import Pace, is_prose, text_units
from pipelines.errors import ConfigError, ErrorCode, SynthesisError
from pipelines.hibari import describe as describe_hibari
from pipelines.request import Generation, Meta, Speech, Word
from tests.support.fakes import sine
from tests.support.quality_kit import RATE, speechlike
from worker.quality.meters import BUILT_IN, Utterance, open_meter
from worker.quality.verdict import (
    CheckedDraw,
    History,
    check_draw,
    clipped_share,
    failed_draw,
    judged,
)

BASIC = quality_of("basic")
assert BASIC is not None
PACE = Pace(0.2, 0.06, low=0.7, high=1.5)
TEXT = "The bridge was built by hand, stone by stone, in ten years."


def scores_of(
    samples: NDArray[np.float32], quality: Quality = BASIC, text: str = TEXT, **meta: str
) -> dict[str, Score]:
    speech = Speech(samples, RATE, text, meta=dict(meta))
    return dict(check_draw(0, 7, speech, quality, text, Generation()).record.scores)


def limits(name: str, bound: Bound | None) -> str:
    return "from the speaking rate" if name == "duration" else str(bound or "")


def failed(scores: Mapping[str, Score]) -> set[str]:
    return {name for name, score in scores.items() if score.passed is False}


class TestGates:
    def test_speech_and_tones_pass(self) -> None:
        assert failed(scores_of(speechlike())) == set()
        for seed in range(0, 400, 7):
            assert failed(scores_of(sine("a text of some length", seed))) == set()

    @pytest.mark.parametrize("gain_after", [0.9, 0.3])
    def test_clipping_is_seen_at_any_later_gain(self, gain_after: float) -> None:
        clipped = np.clip(speechlike() * 8, -1, 1) * np.float32(gain_after)
        assert failed(scores_of(clipped.astype(np.float32))) == {"clipped"}
        assert clipped_share(speechlike()) == 0

    def test_the_share_of_flat_tops_counts_the_middles_of_three_equal_samples_near_the_peak(self) -> None:
        draw = np.random.default_rng(5)
        noise = draw.normal(0, 1, 3000)
        steps = np.round(noise[:600] * 4) / 4
        held = np.repeat(noise[:400], 4)
        spoken = speechlike(0.2)
        # A peak of two samples, just above the flat tops.
        rare = np.concatenate([np.clip(spoken, -0.1, 0.1), [0.101, 0.101]])
        for samples in (
            *(np.clip(noise, -1, 1), np.clip(noise, -0.99, 1), np.clip(noise, -0.9, 1), np.sign(noise)),
            *(steps, held, spoken, rare, noise[:1], held[:2], held[:3], np.ones(3)),
        ):
            wave = samples.astype(np.float32)
            levels = np.abs(wave)
            middles = sum(
                wave[at] == wave[at - 1] == wave[at + 1] and levels[at] >= levels.max() * np.float32(0.98)
                for at in range(1, len(wave) - 1)
            )
            share = clipped_share(wave)
            assert share == (middles / len(wave) if (levels == levels.max()).sum() >= 3 else 0)
            # The ledger accepts no number of NumPy.
            assert type(share) is float

    def test_silence_pauses_level_and_a_missing_end(self) -> None:
        speech, silence = speechlike(2.0), np.zeros(4 * RATE, np.float32)
        assert failed(scores_of(np.concatenate([speech, silence, silence]))) == {"silence"}
        assert failed(scores_of(np.concatenate([speech, silence, speech, speech]))) == {"pause"}
        assert "loudness" in failed(scores_of(speech * np.float32(0.01)))
        assert failed(scores_of(speech, finish="length")) == {"ended"}
        assert failed(scores_of(speech, finish="stop")) == set()

    def test_the_quick_count_of_frames_is_that_of_the_detector(self) -> None:
        # The faint parts are silent only beside speech as loud as this.
        loud, faint = (
            (4 * speechlike(seconds, seed) for seconds, seed in ((1.0, 0), (0.7, 3))),
            np.float32(0.002),
        )
        speech = np.concatenate([np.full(3000, faint), next(loud), np.full(9000, faint), next(loud)])
        powers = frame_powers(speech, RATE)
        active = powers > max(float(powers.max()) * 1e-4, 1e-6)
        sounding, pause, power = activity(powers)
        assert (sounding, pause) == (np.count_nonzero(active), longest_pause(active))
        assert power == pytest.approx(float(powers[active].mean()), rel=1e-5)
        assert activity(np.zeros(5, np.float32)) == (0, 0, 0.0)

    def test_the_length_is_a_gate_only_where_a_pace_was_learned(self) -> None:
        paced = msgspec.structs.replace(BASIC, paces=(PACE,))
        whole = speechlike(PACE.expected_seconds(TEXT))
        assert "duration" not in scores_of(whole)
        assert failed(scores_of(whole, paced)) == set()
        assert failed(scores_of(whole[: len(whole) // 2], paced)) == {"duration"}
        assert failed(scores_of(np.concatenate([whole, whole]), paced)) == {"duration"}

    @pytest.mark.parametrize(
        "text",
        [
            "Yes. No. Yes. No.",
            "Hi.",
            "It costs $1,234.56.",
            "<b>Bold</b> words are here",
            "About 7,000,000 people came by",
            "Help!!!! me now please",
            "Use HTTP and FTP, said the man",
        ],
    )
    def test_a_text_that_is_no_prose_may_be_of_nearly_any_length(self, text: str) -> None:
        assert not is_prose(text)
        expected = PACE.expected_seconds(text)
        assert PACE.fits(expected * 3, expected, text)
        assert not PACE.fits(expected * 6 + 6, expected, text)

    def test_plain_sentences_are_prose(self) -> None:
        assert all(
            map(
                is_prose,
                [TEXT, "The kettle is boiling.", "今天天气很好。", "Well, she said, that is a “fine” café."],
            )
        )

    def test_units_of_other_scripts_and_a_pace_for_each_voice(self) -> None:
        assert text_units("abc 12.") == 7 + 2 * 4 + 2
        assert text_units("今天") > 2 * text_units("to")
        for_anna, for_all = Pace(0, 1, 0, 1, voice="Anna"), Pace(0, 2, 0, 1)
        assert for_anna.applies_to("anna", None)
        assert for_all.applies_to(None, "English")
        assert not for_anna.applies_to("bob", None)
        assert not Pace(0, 1, 0, 1, language="de").applies_to(None, "English")

    def test_trimming_cuts_both_ends_and_nothing_else(self) -> None:
        speech = np.concatenate([np.zeros(RATE, np.float32), sine("abc", 1), np.zeros(RATE, np.float32)])
        cut = trim_silence(Speech(speech, RATE), 100).samples
        assert len(sine("abc", 1)) + 0.18 * RATE <= len(cut) <= len(sine("abc", 1)) + 0.25 * RATE
        silence = Speech(np.zeros(RATE, np.float32), RATE)
        assert trim_silence(silence, 0) is silence

    def test_trimming_moves_the_words(self) -> None:
        samples = np.concatenate([np.zeros(RATE, np.float32), sine("abc", 1), np.zeros(RATE, np.float32)])
        said = (Word("a", 0.2, 1.02), Word("b", 1.02, 1.06), Word("c", 1.06, 2.9))
        cut = trim_silence(Speech(samples, RATE, words=said, phonemes=said[1:2]), 100)
        moved = 1.02 - cut.words[1].start_s
        assert 0.85 <= moved <= 0.95
        assert cut.words[0] == Word("a", 0.0, pytest.approx(1.02 - moved))  # type: ignore[arg-type]
        assert cut.words[1] == cut.phonemes[0] == said[1].moved(-moved)
        assert cut.words[2].end_s == pytest.approx(len(cut.samples) / RATE, abs=1e-4)


class TestDraws:
    def check(self, samples: NDArray[np.float32], number: int = 0) -> History:
        return History().after(check_draw(number, 7, Speech(samples, RATE), BASIC, TEXT, Generation()), 5)

    def test_a_verdict_names_the_first_failure_and_explains_it(self) -> None:
        bad = np.clip(speechlike() * 12, -1, 1).astype(np.float32)
        best = self.check(bad).best
        assert best is not None
        assert best.record.code is ErrorCode.QA_CLIPPED
        assert "`clipped` is 0." in best.message
        assert "maximum 0.001" in best.message
        assert not best.record.kept

    def test_the_best_of_bad_draws_fails_least_and_the_earlier_one_wins_a_tie(self) -> None:
        clipped = np.clip(speechlike() * 12, -0.5, 0.5).astype(np.float32)
        worse = np.concatenate([clipped, np.zeros(12 * RATE, np.float32)])
        history = History()
        for number, samples in enumerate(
            [np.full(9, np.nan, np.float32), np.zeros(99, np.float32), worse, clipped, clipped]
        ):
            history = history.after(
                check_draw(number, number, Speech(samples, RATE), BASIC, TEXT, Generation()), 10
            )
        assert history.best is not None
        assert history.best.record.draw == 3
        assert history.engine_ms == 50
        codes = [draw.code for draw in history.draws]
        assert codes == [ErrorCode.SYNTH_NAN, ErrorCode.SYNTH_SILENT, *[ErrorCode.QA_CLIPPED] * 3]

    def test_two_draws_that_fail_alike_end_the_draws(self) -> None:
        silence, gone = np.zeros(99, np.float32), SynthesisError(ErrorCode.SYNTH_NO_EOS, "It did not end.")

        def checked(samples: np.ndarray, number: int) -> CheckedDraw:
            speech = Speech(samples, RATE)
            return check_draw(number, number, speech, BASIC, TEXT, Generation())

        silent = History().after(checked(silence, 0), 5)
        assert not History().ended_by(checked(silence, 0), sampled=True)
        assert silent.ended_by(checked(silence, 1), sampled=True)
        assert not silent.ended_by(checked(np.full(99, np.nan, np.float32), 1), sampled=True)
        clipped = np.clip(speechlike() * 12, -1, 1).astype(np.float32)
        bad = History().after(checked(clipped, 0), 5)
        assert bad.ended_by(checked(clipped, 1), sampled=True)
        assert not bad.ended_by(checked(clipped * np.float32(0.5), 1), sampled=True)
        # A model that samples may end with the next seed; one that does not fails again.
        endless = History().after(failed_draw(0, 0, gone), 5)
        assert [endless.ended_by(failed_draw(1, 1, gone), sampled=sampled) for sampled in (True, False)] == [
            False,
            True,
        ]

    def test_readings_take_the_place_of_cheap_scores_and_fail_by_their_bounds(self) -> None:
        strict = PRESETS["strict"]
        assert strict is not None
        draw = check_draw(0, 7, Speech(speechlike(), RATE), strict, TEXT, Generation())
        assert draw.record.code is None
        cheap = draw.record.scores
        readings = {"silence": (0.2, "silero"), "wer": (0.1, "the bridge")}
        good = judged(0, 7, Speech(speechlike(), RATE), strict, readings, cheap)
        assert good.record.code is None
        assert good.record.scores.keys() == {*cheap, "wer"}
        assert good.record.scores["silence"] == Score(0.2, True, "silero")
        readings = {"wer": (0.9, "something else"), "made_up": (3.0, "")}
        bad = judged(0, 7, Speech(speechlike(), RATE), strict, readings, cheap)
        assert bad.record.code is ErrorCode.QA_WER
        assert "something else" in bad.message
        assert bad.record.scores["made_up"].passed is None

    def test_scores_are_short_in_json(self) -> None:
        data = msgspec.json.encode({"wer": Score(0.1, True, "heard"), "x": Score(2.0)})
        assert data == b'{"wer":[0.1,true,"heard"],"x":[2.0,null,""]}'
        assert msgspec.json.decode(data, type=dict[str, Score])["x"] == Score(2.0)


class TestConfig:
    def test_a_file_changes_a_preset_and_single_values_change_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "qa.toml"
        path.write_text(
            'draws = 5\non_fail = "keep"\n[bounds.wer]\nhigh = 0.2\n[meters.asr]\nmodel = "small"\n'
        )
        quality = quality_of(
            "strict",
            path,
            ["bounds.wer.high=0.3", "meters.distillmos=false", "bounds.pause=false", "trim=true"],
        )
        assert quality is not None
        assert (quality.draws, quality.on_fail, quality.trim) == (5, "keep", True)
        assert quality.bounds["wer"] == Bound(high=0.3)
        assert quality.meters == {"asr": {"model": "small"}}
        assert "pause" not in quality.bounds

    @pytest.mark.parametrize(
        "override",
        [
            "draws=0",
            "draws=21",
            "nonsense=1",
            "bounds.wer.hihg=1",
            "novalue",
            "on_fail=throw",
            "trim_keep_ms=-1",
            "..=1",
            f"draws={'[' * 9999}",
        ],
    )
    def test_what_makes_no_sense_is_refused_before_anything_is_written(self, override: str) -> None:
        with pytest.raises(ConfigError):
            quality_of("basic", None, [override])

    @pytest.mark.parametrize(
        "override", ["bounds.pause.high=Infinity", "bounds.wer.high=NaN", "meters.asr.beam=-Infinity"]
    )
    def test_a_number_that_json_does_not_have_is_refused(self, override: str) -> None:
        with pytest.raises(ConfigError, match="infinity"):
            quality_of("basic", None, [override])

    @pytest.mark.parametrize("where", ["override", "file"])
    def test_a_key_of_thousands_of_parts_is_refused_in_a_sentence(self, tmp_path: Path, where: str) -> None:
        line = f"bounds{'.x' * 3000}=1"
        path = tmp_path / "qa.toml"
        path.write_text(line)
        with pytest.raises(ConfigError, match="not KEY=VALUE" if where == "override" else "quality"):
            quality_of("basic", path if where == "file" else None, [line] if where == "override" else [])

    def test_a_pace_without_seconds_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "qa.toml"
        pace = "[[paces]]\nbase_seconds = {}\nseconds_per_unit = {}\nlow = 0.5\nhigh = 2\n"
        path.write_text(pace.format(0, 0))
        with pytest.raises(ConfigError, match="zero length"):
            quality_of("basic", path)
        path.write_text(pace.format(1, 0) + pace.format(0, 0.1))
        assert quality_of("basic", path) is not None

    def test_a_name_that_nothing_answers_to_is_refused_with_those_that_exist(self) -> None:
        for preset, override, said in (
            ("basic", "bounds.wer.high=0.2", "meters.asr={}"),
            ("strict", "bounds.dnsmos.low=3", "meters.dnsmos={}"),
            ("basic", "bounds.loudnes.low=-30", "loudness"),
            ("strict", "bounds.wre.high=0.2", "wer"),
            ("basic", "meters.whisper={}", "asr, distillmos, dnsmos, silero, speaker"),
        ):
            with pytest.raises(ConfigError) as caught:
                quality_of(preset, None, [override])
            assert said in caught.value.advice

    def test_a_bound_with_its_meter_is_taken_and_goes_with_its_meter(self) -> None:
        quality = quality_of("basic", None, ["meters.asr={}", "bounds.wer.high=0.2"])
        assert quality is not None
        assert quality.bounds["wer"] == Bound(high=0.2)
        without = quality_of("strict", None, ["meters.asr=false"])
        assert without is not None
        assert {"wer", "cer"}.isdisjoint(without.bounds)
        assert "distillmos" in without.bounds
        with pytest.raises(ConfigError):
            quality_of("strict", None, ["meters.asr=false", "bounds.wer.high=0.2"])

    def test_the_examples_of_the_page_can_be_used(self, tmp_path: Path) -> None:
        page = (Path(__file__).parents[3] / "docs" / "quality.md").read_text("utf-8")
        block = page[page.index("    draws = 5") :].partition("\n\n")[0]
        path = tmp_path / "qa.toml"
        path.write_text(textwrap.dedent(block), "utf-8")
        for preset in ("basic", "strict"):
            quality = quality_of(preset, path)
            assert quality is not None
            assert (quality.meters, quality.bounds["wer"]) == ({"asr": {"model": "small"}}, Bound(high=0.2))
        for line in re.findall(r"`--qa (\w+) ((?:--qa-set \S+ ?)+)`", page):
            assert quality_of(line[0], None, re.findall(r"--qa-set (\S+)", line[1])) is not None
        assert "--qa strict --qa-set bounds.wer.high=0.2" in page

    def test_the_table_of_the_page_is_the_registry(self) -> None:
        page = (Path(__file__).parents[3] / "docs" / "quality.md").read_text("utf-8")
        assert [line for line in page.splitlines() if re.match(r"\| `\w+` \|.*`(qa|synth)\.", line)] == [
            f"| `{name}` | {check.meaning} | {limits(name, check.basic)} | {limits(name, check.strict)} | `{check.code.value}` |"
            for name, check in CHECKS.items()
        ]

    def test_a_row_and_a_class_are_a_new_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        meter = MeterCard("peak", ("numpy",), "pip install numpy", ("numpy",))
        monkeypatch.setitem(
            CHECKS,
            "peak",
            Check(
                "peak", ErrorCode.QA_CLIPPED, "highest sample", "high", strict=Bound(high=0.5), meter=meter
            ),
        )
        monkeypatch.setitem(METERS, "peak", meter)
        peak = SimpleNamespace(measure=lambda sample: {"peak": (float(sample.samples.max()), "")})
        monkeypatch.setitem(BUILT_IN, "peak", lambda: peak)
        with pytest.raises(ConfigError, match=r"but no meter measures it.*meters\.peak"):
            quality_of("basic", None, ["bounds.peak.high=0.5"])
        quality = quality_of("basic", None, ["bounds.peak.high=0.5", "meters.peak={}"])
        assert quality is not None
        speech = Speech(speechlike(), RATE, TEXT)
        draw = check_draw(0, 1, speech, quality, TEXT, Generation())
        readings = open_meter("peak", {}).measure(Utterance(np.full(9, 0.75, np.float32), RATE, TEXT))
        found = judged(0, 1, speech, quality, readings, draw.record.scores)
        assert (found.record.code, found.message) == (
            ErrorCode.QA_CLIPPED,
            "`peak` is 0.75, allowed: maximum 0.5.",
        )

    def test_what_the_worker_measures_itself_is_what_the_registry_says(self) -> None:
        assert BASIC is not None
        paced = msgspec.structs.replace(BASIC, paces=(PACE,))
        assert scores_of(speechlike(), paced).keys() == scores_with(()) - {*OF_ENGINES}
        measured: Meta = {"log_probability": -2.5, "lowest_log_probability": -4.0}
        codes = np.arange(60, dtype=np.int16).reshape(30, 2)
        speech = Speech(speechlike(), RATE, TEXT, meta=measured, codes=codes, frame_samples=RATE // 10)
        scores = check_draw(0, 7, speech, paced, TEXT, Generation()).record.scores
        assert scores.keys() == scores_with(())
        assert [scores[name].value for name in OF_ENGINES] == [-2.5, -4.0, 0.0]

    @pytest.mark.parametrize(
        ("bound", "code"),
        [
            ("log_probability.low=-2", "qa.score"),
            ("lowest_log_probability.low=-3.9", "qa.score"),
            ("repetition.high=1", "synth.runaway"),
            ("log_probability.low=-2.5", None),
            ("repetition.high=1.3", None),
        ],
    )
    def test_scores_of_the_engine_need_no_samples(self, bound: str, code: str | None) -> None:
        spec, _ = job_of({"output": "codes", "qa_set": [f"bounds.{bound}"]})
        assert spec.quality is not None
        measured: Meta = {"log_probability": -2.5, "lowest_log_probability": -4.0}
        codes = np.zeros((30, 2), np.int16)
        codes[13:, 0] = range(17)  # the first 13 frames repeat one code 12 times, which takes 1.2 s
        none = np.zeros(0, np.float32)
        speech = Speech(none, RATE, TEXT, meta=measured, codes=codes, frame_samples=RATE // 10)
        assert check_draw(0, 7, speech, spec.quality, TEXT, Generation()).record.code == code

    def test_a_model_without_codes_has_no_such_bounds(self) -> None:
        quality = quality_of("basic", None, ["bounds.log_probability.low=-3"])
        with pytest.raises(ConfigError, match=r"hibari has no codec.*`log_probability`"):
            frozen_spec(JobSpec("hibari", quality=quality), describe_hibari())

    def test_a_repetition_is_of_codes(self) -> None:
        with pytest.raises(ConfigError, match="needs codes"):
            job_of({"qa_set": ["bounds.repetition.high=1"]})
        spec, _ = job_of({"output": "both", "qa_set": ["bounds.repetition.high=1"]})
        assert spec.quality is not None
        assert spec.quality.bounds["repetition"] == Bound(high=1)

    def test_a_model_of_one_language_is_heard_in_it(self) -> None:
        card = describe_hibari()
        frozen = frozen_spec(JobSpec("hibari", quality=quality_of("strict")), card).quality
        assert frozen is not None
        assert frozen.meters["asr"] == {"language": "English"}
        own = quality_of("strict", None, ["meters.asr.language=de"])
        assert frozen_spec(JobSpec("hibari", quality=own), card).quality.meters["asr"] == {"language": "de"}  # pyright: ignore[reportOptionalMemberAccess]

    def test_checks_that_are_off_cannot_be_configured(self) -> None:
        assert quality_of("off") is None
        with pytest.raises(ConfigError):
            quality_of("off", None, ["draws=2"])

    def test_the_models_pace_is_frozen_into_the_spec(self) -> None:
        card = describe_hibari()
        spec = frozen_spec(JobSpec("hibari", quality=BASIC), card)
        assert spec.quality is not None
        assert spec.quality.paces == (card.pace,)
        own = msgspec.structs.replace(BASIC, paces=(PACE,))
        other = frozen_spec(JobSpec("hibari", quality=own), card)
        assert other.quality == own
        assert len({spec_sha(spec), spec_sha(other), spec_sha(frozen_spec(JobSpec("hibari"), card))}) == 3
        assert msgspec.json.decode(msgspec.json.encode(spec), type=JobSpec) == spec
