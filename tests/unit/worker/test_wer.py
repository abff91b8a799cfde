"""Word errors: what was asked beside what was heard."""

from __future__ import annotations

import pytest

from jobs.checks import quality_of
from pipelines.request import Generation, Speech
from tests.support.quality_kit import RATE, speechlike
from worker.quality.meters import Reading, error_rates
from worker.quality.verdict import check_draw, judged


def plain(rates: dict[str, Reading]) -> dict[str, tuple[float, bool]]:
    """The rates without what was heard."""
    return {name: (rate.value, rate.judged) for name, rate in rates.items()}


class TestWords:
    def test_spelling_numbers_and_contractions_are_no_errors(self) -> None:
        rates = error_rates("Mr. Smith didn't pay twenty-five dollars.", "mister smith did not pay $25")
        assert plain(rates) == {"cer": (0.0, True), "wer": (0.0, True)}

    @pytest.mark.parametrize(
        ("asked", "heard"),
        [
            ("John 3:16 is a verse that many know.", "John three sixteen is a verse that many know"),
            ("Tom & Jerry ran to the house.", "Tom and Jerry ran to the house."),
            ("It's 5% off for R&D today.", "It is five percent off for R and D today."),
            ("Sales rose 12.5% at AT&T.", "Sales rose twelve point five percent at AT and T"),
            ("We meet at 10:30 on May 5th, 2021.", "We meet at ten thirty on May 5, 2021."),
            (
                "It was 20°C outside, not 68 °F.",
                "It was 20 degrees Celsius outside, not 68 degrees Fahrenheit.",
            ),
            ("Take bus No. 7 to gate #12.", "Take bus number seven to gate number 12."),
            ("About 7,000,000 people came by.", "About seven million people came by."),
            ("Then 2+2=4, as it should.", "Then two plus two equals four, as it should."),
        ],
    )
    def test_signs_and_numbers_are_compared_as_they_are_spoken(self, asked: str, heard: str) -> None:
        assert (
            plain(error_rates(asked, heard))
            == plain(error_rates(heard, asked))
            == {"cer": (0.0, True), "wer": (0.0, True)}
        )

    @pytest.mark.parametrize("text", ["Hi.", "John 3:16", "Tom & Jerry", "It's 5%", "Yes. No.", "你好"])
    def test_of_a_short_text_the_rates_decide_nothing(self, text: str) -> None:
        strict = quality_of("strict")
        assert strict is not None
        rates = error_rates(text, "something else entirely was heard", "zh" if text == "你好" else "en")
        assert rates["cer"].value > 0.3
        speech = Speech(speechlike(), RATE)
        cheap = check_draw(0, 7, speech, strict, text, Generation()).record.scores
        draw = judged(0, 7, speech, strict, rates, cheap)
        assert draw.record.code is None
        assert [draw.record.scores[name].passed for name in rates] == [None] * len(rates)

    def test_a_text_just_long_enough_is_judged(self) -> None:
        assert error_rates("a b c d", "")["wer"][:3] == (1.0, "", True)
        assert error_rates("a b c", "")["wer"][:3] == (1.0, "", False)
        assert [error_rates(text, "")["cer"].judged for text in ("abcdefghijkl", "abcdefghijk")] == [
            True,
            False,
        ]
        assert [error_rates(text, "", "zh")["cer"].judged for text in ("今天天气很好", "天气很好")] == [
            True,
            False,
        ]

    def test_rates_are_edits_over_what_was_asked(self) -> None:
        assert error_rates("one red apple fell", "one red pear fell")["wer"].value == 0.25
        assert error_rates("stop", "stop stop stop")["wer"].value == 2.0
        assert plain(error_rates("a cat", "")) == {"cer": (1.0, False), "wer": (1.0, False)}
        assert error_rates("...", "anything") == {}

    def test_scripts_without_spaces_have_no_word_errors(self) -> None:
        assert plain(error_rates("今天天气很好", "今天天汽很好", "Chinese")) == {
            "cer": (pytest.approx(1 / 6), True)
        }
