"""The errors of the times of words, against the exact ones of `hibari`, in the texts of examples/evening.jsonl.

    python -m benchmarks.words [--align DIR] [--texts N]

The times are those of the aligner in the folder `--align`, by default the small one of the tests, and the estimates of streams. The
other rows are the shares of speech with a skipped and with a repeated word that the aligner's score finds, with the bound that 97 % of
the good speech passes. The word is the longest one of its text.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np

from benchmarks.common import ROOT, Result, parser, processor_name, read
from pipelines.hibari.pipeline import HibariPipeline
from pipelines.request import Message, SynthesisRequest, Word, submit
from pipelines.serving.word_estimates import WordEstimates
from worker.quality.meters import Utterance, open_meter

#: The share of good speech that passes the bound.
GOOD_SHARE = 0.97
CHUNK_SECONDS = 0.08


def main() -> int:
    options = read(parser(__doc__, ""), align=str(ROOT / "tests" / "support" / "aligner"), texts=1_000)
    result = Result("words", options, processor_name())
    meter, voice = open_meter("align", {"model": options.align}), HibariPipeline()
    errors, scores = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)

    def compare(name: str, found: Iterable[Word], exact: Iterable[Word]) -> None:
        for one, other in zip(found, exact, strict=True):
            errors[name] += abs(one.start_s - other.start_s), abs(one.end_s - other.end_s)

    lines = (ROOT / "examples" / "evening.jsonl").read_text(encoding="utf-8").splitlines()
    messages = (message for line in lines for message in json.loads(line)["messages"])
    for seed, (_, _, text) in enumerate(islice(messages, options.texts)):
        request = SynthesisRequest("words", (Message("user", "text", text),), seed=seed, timestamps=True)
        speech = submit(voice, request).result()
        samples, rate = speech.samples, speech.sample_rate
        longest = max(speech.words[:-1], key=lambda word: word.end_s - word.start_s)
        begin, end = (round(at * rate) for at in (longest.start_s, longest.end_s))
        for name, parts in (
            ("good", (samples,)),
            ("skipped", (samples[:begin], samples[end:])),
            ("repeated", (samples[:end], samples[begin:])),
        ):
            reading: Any = meter.measure(Utterance(np.concatenate(parts), rate, text))["align"]
            scores[name].append(reading[0])
            if name == "good":
                compare("aligner", reading.words, speech.words)
        estimates, step = WordEstimates(rate), round(CHUNK_SECONDS * rate)
        chunks = [samples[at : at + step] for at in range(0, len(samples), step)]
        found = [word for chunk in chunks for word in estimates.add(chunk, text, False)]
        compare("estimates", [*found, *estimates.add(samples[:0], text, True)], speech.words)
    voice.close()
    for name, seconds in errors.items():
        median, most = 1000 * np.percentile(seconds, (50, 95))
        result.add({"part": name, "edges": len(seconds), "median_ms": float(median), "p95_ms": float(most)})
    bound = np.quantile(scores.pop("good"), 1 - GOOD_SHARE)
    for name, measured in scores.items():
        result.add({"part": name, "found": float(np.mean(np.array(measured) < bound))})
    return result.end("part", "edges", "median_ms", "p95_ms", "found")


if __name__ == "__main__":
    raise SystemExit(main())
