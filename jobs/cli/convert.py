"""`nightjar models convert`: a training checkpoint to the published layout."""

from __future__ import annotations

from pathlib import Path

import click

from jobs.cli.context import NamedPath
from jobs.cli.output import Output


@click.command(name="convert")
@click.argument("source", type=NamedPath(path_type=Path))
@click.option("--like", required=True, type=NamedPath(path_type=Path), help="Folder with config.json, tokenizer and chat template.")
@click.option("--out", required=True, type=NamedPath(path_type=Path), help="New folder.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32", "same"]), default="bfloat16", show_default=True, help="Of the weights.")
def convert(source: Path, like: Path, out: Path, dtype: str) -> None:
    """Convert SOURCE, a SpeechLM training checkpoint (.pt), to a folder of safetensors. Nothing in it is run."""
    import torch

    from pipelines.speechlm.convert import convert as write

    count = write(source, like, out, None if dtype == "same" else getattr(torch, dtype))
    Output(as_json=False).line(f"{count} tensors written to {out}.")
