"""Pushes a Parquet export to the Hugging Face hub, with the library `datasets`.

The token is that of `huggingface_hub`: `HF_TOKEN`, or the one that `hf auth login` stored. Only that library
reads it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.errors import ConfigError, ErrorCode, ServiceError, invalid

_LOG_IN = "Set HF_TOKEN, or log in with: hf auth login."


def check_push(format: str, to: str, repository: str) -> None:
    """Raises the errors of `push` that can be known before the export is written."""
    if format != "parquet" or "://" in to:
        raise invalid(
            "Only an export in the format parquet to a local folder can be pushed to the hub.",
            "Add --format parquet, and a local folder with --to, or leave --to out.",
        )
    hub = _libraries()[1]
    if hub.get_token() is None:
        raise invalid("There is no token for the Hugging Face hub.", _LOG_IN)
    with _errors(repository):
        hub.utils.validate_repo_id(repository)
        hub.HfApi().whoami()


def push(folder: Path, repository: str, *, private: bool | None) -> str:
    """Pushes the splits of a Parquet export in `folder`, one shard per file. Returns the address of the
    dataset.

    An existing dataset gets the new content with one commit. `private`: whether a new dataset is private;
    None: the organization's default. Raises `config.invalid` without a token, and for a name or a push that
    the hub refuses, `server.unreachable` if the hub does not answer, `config.missing_library` without
    `datasets`.
    """
    datasets, hub = _libraries()
    files: dict[str, list[str]] = {}
    for path in sorted(folder.glob("data/*.parquet")):
        files.setdefault(path.name.split("-")[0], []).append(str(path))
    if not files:
        raise invalid("The export has no items to push.", "See why with: nightjar items JOB.")
    with _errors(repository):
        # Streamed, because the library would otherwise write all audio into its cache first.
        splits = datasets.load_dataset("parquet", data_files=files, streaming=True)
        # The audio is in the files already.
        pushed = splits.push_to_hub(
            repository, private=private, embed_external_files=False, commit_message="Made by Nightjar"
        )
        return str(getattr(pushed, "repo_url", "")) or f"{hub.constants.ENDPOINT}/datasets/{repository}"


def _libraries() -> tuple[Any, Any]:
    try:
        import datasets
        import huggingface_hub
    except ModuleNotFoundError:
        raise ConfigError(
            ErrorCode.CONFIG_MISSING_LIBRARY,
            "Pushing to the hub needs the library datasets.",
            "Install it with: pip install datasets.",
        ) from None
    return datasets, huggingface_hub


@contextmanager
def _errors(repository: str) -> Generator[None]:
    """Turns errors of the hub's library into Nightjar's errors. The original texts contain addresses and
    request numbers, but no token."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    # The error of the HTTP library that this version uses.
    http_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except HFValidationError as error:
        raise invalid(
            f"The hub does not accept the dataset name {repository[:100]!r}.",
            "Use a name such as ORGANIZATION/NAME.",
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status >= 500 or status == 429:
            raise _unreachable(f"The Hugging Face hub answers with status {status}.") from error
        raise invalid(
            f"The Hugging Face hub refuses to write {repository[:100]!r} (status {status}).",
            f"Use a token with write access. {_LOG_IN}",
        ) from error
    except OfflineModeIsEnabled as error:
        raise _unreachable("The Hugging Face hub cannot be used while HF_HUB_OFFLINE is set.") from error
    except (http_error, ConnectionError) as error:
        raise _unreachable("The Hugging Face hub does not answer.") from error


def _unreachable(message: str) -> ServiceError:
    return ServiceError(
        ErrorCode.SERVER_UNREACHABLE,
        message,
        "Check the network and HF_ENDPOINT, then run the same command again.",
    )
