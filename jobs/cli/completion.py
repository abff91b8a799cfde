"""What a shell completes in the place of a value: files, models, voices and formats of exports. Nothing is loaded or downloaded, and what
cannot be read completes to nothing, since a shell has no place for an error."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

from pipelines.errors import NightjarError


def files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files and folders, by the shell's own rules."""
    return [CompletionItem(incomplete, type="file")]


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of models; where none begins so, folders of checkpoints."""
    from pipelines.registry import model_names

    return _beginning(incomplete, model_names()) or files(ctx, param, incomplete)


def voices(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The voices of the model that is named before, and the stored ones if it can clone."""
    from pipelines.registry import PUBLISHED, describe

    model = str(ctx.params.get("model") or "hibari")
    with suppress(NightjarError):
        can = (PUBLISHED[model][1].card if model in PUBLISHED else describe(model)).capabilities
        return _beginning(incomplete, [*can.voices, *(_stored(ctx) if can.cloning else ())])
    return []


def stored_voices(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the stored voices."""
    with suppress(NightjarError):
        return _beginning(incomplete, _stored(ctx))
    return []


def export_formats(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the formats of `nightjar export`."""
    from jobs.export.formats import format_names

    return _beginning(incomplete, format_names())


def _stored(ctx: click.Context) -> list[str]:
    from jobs.settings import load_settings
    from jobs.voices import voice_folder

    return voice_folder(load_settings(home=ctx.params.get("home"))).names()


def _beginning(incomplete: str, names: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
