"""Fetches a checkpoint from the hub; each cause of failure has its own message."""

from pathlib import Path

from huggingface_hub import list_repo_files, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from bytetx.errors import CheckpointError

# Everything a load may read, in any subfolder; weights in other formats are never fetched.
# The last are layers of a few MiB, BGE-M3's and sentence-transformers', read by torch's loader of
# plain tensors.
_HUB_PATTERNS = (
    *("*.json", "*.txt", "*.model", "*.model.v*", "*.jinja", "*.safetensors"),
    *("sparse_linear.pt", "colbert_linear.pt"),
    *(f"*_{kind}/pytorch_model.bin" for kind in ("Dense", "LayerNorm", "WeightedLayerPooling")),
)
_HUB_IGNORED = ("onnx/*", "openvino/*")


def snapshot(
    repo: str, *, revision: str | None, local_files_only: bool, more: tuple[str, ...] = ()
) -> Path:
    """A hub repository's files in the local cache. Each cause of failure has its own message.

    more: names of files that are fetched besides.
    """
    at = "" if revision is None else f" at revision {revision!r}"
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                local_files_only=local_files_only,
                allow_patterns=[*_HUB_PATTERNS, *more],
                ignore_patterns=list(_HUB_IGNORED),
            )
        )
    except HFValidationError as error:
        raise CheckpointError(
            f"{repo!r} is neither a local folder nor a hub id: {error}"
        ) from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"{repo!r} is gated: accept its terms on huggingface.co, then log in with "
            "`hf auth login` (or set HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{repo!r} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo!r} is no local folder, and the hub has no such model: check the name; for a "
            "private one, log in with `hf auth login` (or set HF_TOKEN)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{repo!r} is no local folder, it is not in the local hub cache{at}, and "
            f"{_offline_reason(error, local_files_only)}; download it once while online, or give a "
            "folder"
        ) from error
    except Exception as error:  # the hub's client also raises what its HTTP library does
        raise CheckpointError(
            f"{repo!r} is neither a local folder nor a checkpoint the hub gave: {_line(error)}"
        ) from error


def _offline_reason(error: Exception, local_files_only: bool) -> str:
    """Why the hub gave nothing."""
    cause = error.__cause__
    if local_files_only:
        return "the hub was not asked (offline was asked for)"
    if isinstance(cause, OfflineModeIsEnabled):
        return "the hub was not asked (HF_HUB_OFFLINE is set)"
    return f"the hub cannot be reached ({'no answer' if cause is None else _line(cause)})"


def _line(error: BaseException) -> str:
    """Kind and text of an error of another library, whose texts have several lines."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def hub_names(repo: str, revision: str | None) -> list[str]:
    """All files of a hub repository, those that are not fetched, too; [] where it does not say."""
    try:
        return list(list_repo_files(repo, revision=revision))
    except Exception:  # the hub's client or its HTTP library raises it: offline, most likely
        return []
