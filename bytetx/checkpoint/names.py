"""The name of a checkpoint, for people: a hub id or a folder's own name, never a path."""

from pathlib import Path

from bytetx.checkpoint.demo import DEMO_NAME, DEMO_PACKAGE
from bytetx.checkpoint.gguf.file import GGUF_SUFFIX


def checkpoint_name(folder: Path) -> str:
    """A hub id for a folder of the hub's cache, else the folder's own name."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1].name.removeprefix("models--").replace("--", "/")
    return DEMO_NAME if folder.parent.name == DEMO_PACKAGE else folder.name


def checkpoint_path(folder: Path) -> Path:
    """The GGUF file that a folder was made of, the first of several; else the folder itself."""
    links = (path for path in sorted(folder.glob(f"*{GGUF_SUFFIX}")) if path.is_symlink())
    return next((path.resolve() for path in links), folder)


def name_of(path_or_id: str) -> str:
    """The checkpoint_name of a folder, else the hub id as it is."""
    folder = Path(path_or_id).expanduser()
    is_folder = path_or_id.startswith((".", "/", "~")) or folder.is_dir()
    return (checkpoint_name(folder) or "model") if is_folder else path_or_id
