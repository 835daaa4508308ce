"""Where a checkpoint's files are, a local folder or a hub id, and its JSON files."""

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

# Everything a load may read, in any subfolder; weights in other formats are never fetched.
_HUB_PATTERNS = ("*.json", "*.txt", "*.model", "*.safetensors")
_HUB_IGNORED = ("onnx/*", "openvino/*")

# Classes of a checkpoint's own code that would compute something else than the family does.
_MODEL_CLASSES = ("AutoConfig", "AutoModel")


def resolve_checkpoint(
    path_or_id: str | Path, *, revision: str | None = None, local_files_only: bool = False
) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded, or found in the cache when offline.

    Raises CheckpointError where the folder is no checkpoint or the hub cannot answer.
    """
    folder = _checked_path(path_or_id)
    if folder.is_dir():
        if not any((folder / name).is_file() for name in ("config.json", "modules.json")):
            raise CheckpointError(
                f"{folder} has no config.json; give the folder that save_pretrained wrote"
            )
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; give the checkpoint's folder or a hub id")
    if str(path_or_id).startswith((".", "/", "~")):
        raise CheckpointError(f"there is no folder {folder}; give a checkpoint's folder or hub id")
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
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{str(path_or_id)!r} is no local folder, it is not in the local hub cache, and the "
            "hub was not asked or did not answer; download it once while online, or give a folder"
        ) from error
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{str(path_or_id)!r} is neither a local folder nor a checkpoint the hub gave: {error}"
        ) from error


def _checked_path(path_or_id: str | Path) -> Path:
    """The name as a path, whether something is there or not; CheckpointError for no name at all."""
    if not str(path_or_id):
        raise CheckpointError("the checkpoint's name is empty; give its folder or a hub id")
    try:
        path = Path(path_or_id).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long; ~ of nobody
        raise CheckpointError(f"{str(path_or_id)!r} cannot be opened: {error}") from error
    return path


def transformer_folder(folder: Path) -> Path:
    """Where config.json and the weights are: `folder`, or the subfolder of it that a
    sentence-transformers modules.json names for its Transformer module (such as 0_Transformer).

    Raises CheckpointError where modules.json is damaged, names no such module, or leads outside.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return folder
    modules = read_json_objects(path)
    places = [
        module.get("path", "")
        for module in modules
        if str(module.get("type", "")).rpartition(".")[2] == "Transformer"
    ]
    if not places:
        kinds = ", ".join(str(module.get("type")) for module in modules)
        raise CheckpointError(f"{path} names no Transformer module, only: {kinds or 'nothing'}")
    return module_folder(path, places[0])


def module_folder(path: Path, place: object) -> Path:
    """The folder `place` that modules.json, at `path`, names; it must be there and inside."""
    if not isinstance(place, str) or Path(place).is_absolute() or ".." in Path(place).parts:
        raise CheckpointError(f"{path}: module path {place!r} must lie inside the folder")
    if not (path.parent / place).is_dir():
        raise CheckpointError(f"{path} names the folder {place!r}, which is not there")
    return path.parent / place


def load_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json.

    Code that a checkpoint brings never runs, so one whose model is defined by its own code is
    refused: the family of its model_type would compute something else.
    """
    config = read_json(folder / "config.json")
    auto_map = config.get("auto_map")
    classes = auto_map if isinstance(auto_map, dict) else {}
    if own := [name for name in classes if str(name).startswith(_MODEL_CLASSES)]:
        raise CheckpointError(
            f"{folder / 'config.json'}: auto_map names the checkpoint's own code for "
            f"{', '.join(own)}, and bytetx never runs such code; where the weights are those of a "
            f"plain {config.get('model_type')!r}, remove auto_map from a copy of the file"
        )
    return config


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
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
