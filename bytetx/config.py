"""Where a checkpoint's files are, a local folder or a hub id, and its JSON, read with care."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)

from bytetx.errors import CheckpointError

# Everything a load may read; weights in other formats are never fetched.
_HUB_PATTERNS = ("*.json", "*.txt", "*.model", "*.safetensors", "*/*.json", "*/*.safetensors")
_HUB_IGNORED = ("onnx/*", "openvino/*", "*.onnx")


def resolve_checkpoint(
    path_or_id: str | Path, *, revision: str | None = None, local_files_only: bool = False
) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded, or found in the cache when offline.

    Raises CheckpointError where the folder has no config.json or the hub cannot answer.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        if not any((folder / name).is_file() for name in ("config.json", "modules.json")):
            raise CheckpointError(
                f"{folder} has no config.json; give the folder that save_pretrained wrote"
            )
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; give the checkpoint's folder or a hub id")
    try:
        return Path(
            snapshot_download(
                str(path_or_id),
                revision=revision,
                local_files_only=local_files_only,
                allow_patterns=list(_HUB_PATTERNS),
                ignore_patterns=list(_HUB_IGNORED),
            )
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{path_or_id!r} is neither a local folder nor a checkpoint the hub gave: {error}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError names the file and the place where it breaks."""
    content = _parse_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def read_json_objects(path: Path) -> list[dict[str, Any]]:
    """A JSON list of objects from a file; CheckpointError as read_json."""
    content = _parse_json(path)
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise CheckpointError(f"{path} must hold a JSON list of objects")
    return content


def _parse_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error


def load_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json. It may not ask for code of its own: none is ever run."""
    return read_json(folder / "config.json")
