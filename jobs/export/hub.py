"""A Parquet export as a dataset of the Hugging Face hub, pushed by the library `datasets`.

The token is that of `huggingface_hub`: `HF_TOKEN`, or what `hf auth login` stored. It is handed to no one
but that library.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs.export.files import invalid
from pipelines.errors import ConfigError, ErrorCode, ServiceError

_LOG_IN = "Set HF_TOKEN, or log in with: hf auth login."


def check_push(format: str, to: str, repository: str) -> None:
    """Raises what keeps an export from being pushed, before it is written: the errors of `push`."""
    if format != "parquet" or "://" in to:
        message = "Only an export in the format parquet to a local folder can be pushed to the hub."
        raise invalid(message, "Add --format parquet, and name a local folder with --to, or none.")
    hub = _libraries()[1]
    if hub.get_token() is None:
        raise invalid("There is no token of the Hugging Face hub.", _LOG_IN)
    with _errors(repository):
        hub.utils.validate_repo_id(repository)
        hub.HfApi().whoami()


def push(folder: Path, repository: str, *, private: bool | None = None) -> str:
    """Pushes the splits of a Parquet export in `folder`, one shard for each file. Returns the address of
    the dataset.

    A dataset that is there gets the new content with one commit. `private`: of a dataset that is not there
    yet; None: as the organization has it. Raises `config.invalid` without a token, for a name that the hub
    does not take and for what it forbids, `server.unreachable` for a hub that does not answer,
    `config.missing_library` without `datasets`.
    """
    datasets, hub = _libraries()
    files: dict[str, list[str]] = {}
    for path in sorted(folder.glob("data/*.parquet")):
        files.setdefault(path.name.split("-")[0], []).append(str(path))
    if not files:
        raise invalid("The export has no items that could be pushed.", "See why with: nightjar items JOB.")
    with _errors(repository):
        # Streamed: the library would write all audio into its cache first.
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
        message = "Pushing to the hub needs the library datasets."
        raise ConfigError(
            ErrorCode.CONFIG_MISSING_LIBRARY, message, "Install it with: pip install datasets."
        ) from None
    return datasets, huggingface_hub


@contextmanager
def _errors(repository: str) -> Generator[None, None, None]:
    """Errors of the hub's library as ours. Their texts name addresses and numbers of requests, and no
    token."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    # That of the HTTP library that this version uses, whichever it is.
    http_error: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except HFValidationError as error:
        message = f"The hub takes no dataset with the name {repository[:100]!r}."
        raise invalid(message, "Name it as ORGANIZATION/NAME.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status >= 500 or status == 429:
            raise _unreachable(f"The Hugging Face hub answers with status {status}.") from error
        message = f"The Hugging Face hub refuses to write {repository[:100]!r} (status {status})."
        advice = f"Use a token that may write there. {_LOG_IN}"
        raise invalid(message, advice) from error
    except OfflineModeIsEnabled as error:
        raise _unreachable("The Hugging Face hub is switched off by HF_HUB_OFFLINE.") from error
    except (http_error, ConnectionError) as error:
        raise _unreachable("The Hugging Face hub does not answer.") from error


def _unreachable(message: str) -> ServiceError:
    return ServiceError(
        ErrorCode.SERVER_UNREACHABLE,
        message,
        "Check the network and HF_ENDPOINT, then give the same command.",
    )
