"""The dataset card of a Parquet export: README.md with the header that the Hugging Face hub and `datasets` read.

Source: https://huggingface.co/docs/hub/datasets-cards.
"""

from __future__ import annotations

from itertools import groupby

import msgspec

from jobs.export.plan import Plan
from jobs.ledger.records import Job

#: Upper bound of the examples -> the hub's word for it.
_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"), (10**8, "10M<n<100M"))


def dataset_card(job: Job, plan: Plan) -> bytes:
    """The card of a job's dataset; splits without an item are not in it, since their files do not exist."""
    splits = [(name, list(parts)) for name, parts in groupby(plan.parts, lambda part: part.split)]
    counts = [(name, sum(part.items for part in parts), sum(part.audio_bytes for part in parts)) for name, parts in splits]
    size = next((word for bound, word in _SIZES if plan.items < bound), "100M<n<1B")
    configs = [f"  - split: {name}\n    path: data/{name}-*.parquet" for name, _, _ in counts]
    header = [
        f"pretty_name: {_text(job.name or job.id)}",
        "task_categories:",
        "- text-to-speech",
        "tags:",
        "- synthetic",
        "- audio",
        "size_categories:",
        f"- {size}",
    ]
    if configs:
        header += ["configs:", "- config_name: default", "  data_files:", *configs]
    rows = [f"| {name} | {items} | {audio_bytes} |" for name, items, audio_bytes in counts]
    spec = msgspec.json.format(msgspec.json.encode(job.spec, order="sorted"), indent=2).decode()
    body = [
        f"# {_line(job.name or job.id)}",
        "",
        f"Synthetic speech, made by Nightjar job `{job.id}` with the model `{_line(job.spec.model)}`"
        + (f" at revision `{_line(job.spec.model_revision)}`." if job.spec.model_revision else "."),
        "",
        "| split | examples | bytes of audio |",
        "|---|---|---|",
        *rows,
        "",
        f"{plan.left_out} items of the job have no audio and are left out. `audio` is the file as it was made, `text` what it was asked",
        "to say, `role` whose turn that is; `seed` and the spec make the same speech again. The license of the texts and of the",
        "model applies.",
        "",
        "```json",
        spec,
        "```",
        "",
        f"Input SHA-256: `{job.input_sha256}`; spec SHA-256: `{job.spec_sha}`. More is in `provenance.json`.",
    ]
    return "\n".join(["---", *header, "---", "", *body, ""]).encode()


def _text(value: str) -> str:
    """A string of YAML: every JSON string is one."""
    return msgspec.json.encode(value).decode()


def _line(value: str) -> str:
    return " ".join(value.replace("`", "'").split())
