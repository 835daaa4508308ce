"""Finds a checkpoint, in a local folder or on the hub, and reads its config.json."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bytetx.checkpoint.families import Families
from bytetx.checkpoint.gguf.file import GGUF_SUFFIX, gguf_of
from bytetx.checkpoint.side_files import (
    FLAG,
    PATH,
    TABLE,
    TEXT,
    TOKEN_IDS,
    Field,
    check_fields,
    either,
    integer,
    list_of,
    read_json,
    read_json_objects,
)
from bytetx.errors import CheckpointError

# Classes of a checkpoint's own code that would compute something else than the family does.
_MODEL_CLASSES = ("AutoConfig", "AutoModel")

# Keys of config.json that every family has; bytetx.checkpoint.config checks a family's own.
_CONFIG = {
    "activation_fn": TEXT,
    "architectures": list_of(TEXT),
    "auto_map": either(TABLE, list_of(TEXT)),
    "eos_token_id": TOKEN_IDS,
    "is_decoder": FLAG,
    "model_type": TEXT,
    "quantization_config": TABLE,
    "sbert_ce_default_activation_function": TEXT,
    "sentence_transformers": TABLE,
    "tokenizer_class": TEXT,
}
ADAPTER_CONFIG = "adapter_config.json"
GLINER_CONFIG = "gliner_config.json"
PICKLED = "pytorch_model.bin"  # read only as plain tensors, and only where a kind needs it
# Architectures of encoders that lie in a GLiNER model's file, of versions 1 and 2.
GLINER, GLINER2 = "GLiNER", "GLiNER2"
GLINER2_TYPE = "extractor"
GLINER2_ENCODER = "encoder_config/config.json"
_ADAPTER = {"base_model_name_or_path": TEXT, "revision": TEXT}
MODULES: dict[str, Field] = {
    "idx": integer(0),
    "name": TEXT,
    "path": PATH,
    "type": TEXT,
}

# Writes safetensors and all settings of a GLiNER model.
GLINER_SAVE = (
    "python -c \"import gliner as g; g.GLiNER.from_pretrained('.').save_pretrained('.', "
    'safe_serialization=True)"'
)

_MAX_MODULES = 256  # those in use have at most a dozen

# Classes of sentence-transformers' first module; the second is the name of sparse encoders before
# version 5.4.
TRANSFORMERS = ("Transformer", "MLMTransformer")
# Its first module in a model of token vectors alone.
STATIC = "StaticEmbedding"


def resolve_checkpoint(
    path_or_id: str | Path, *, revision: str | None = None, local_files_only: bool = False
) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded, or found in the cache when offline.

    The same is done for the base model of a LoRA adapter.
    Raises CheckpointError where the folder is no checkpoint or the hub cannot answer.
    """
    folder = _resolve(path_or_id, revision=revision, local_files_only=local_files_only)
    adapter_base(transformer_folder(folder), local_files_only=local_files_only)
    return folder


def resolve_adapter(path_or_id: str | Path) -> Path:
    """The local folder of a LoRA adapter alone; its base model is not looked for.

    Raises CheckpointError as resolve_checkpoint does.
    """
    return _resolve(path_or_id, revision=None, local_files_only=False)


def _resolve(path_or_id: str | Path, *, revision: str | None, local_files_only: bool) -> Path:
    folder = _checked_path(path_or_id)
    if folder.is_dir():
        names = _names(folder)
        if (found := _only_gguf(folder, names)) is not None:
            return _gguf_folder(found, folder.resolve().name or "model")
        _check_kind(str(folder), names)
        return folder
    if folder.is_file() and folder.suffix.lower() == GGUF_SUFFIX:
        return _gguf_folder(folder, folder.name)
    if folder.suffix.lower() == ".onnx":
        raise CheckpointError(
            f"{folder}: bytetx does not read ONNX; give the folder of the checkpoint in "
            "safetensors that it was exported from: dtype='int8' of bytetx.load quantises it"
        )
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; give the checkpoint's folder or a hub id")
    if str(path_or_id).startswith((".", "/", "~")):
        raise CheckpointError(f"there is no folder {folder}; give a checkpoint's folder or hub id")
    # Here alone: the hub's client takes a quarter of a second to import, and folders need none.
    from bytetx.checkpoint import hub

    fetch = partial(
        hub.snapshot, str(path_or_id), revision=revision, local_files_only=local_files_only
    )
    folder = fetch()
    is_extractor = is_gliner(folder) or (folder / GLINER2_ENCODER).is_file()
    if is_extractor and not any(folder.glob("*.safetensors")):
        folder = fetch(more=(PICKLED,))  # what their packages write
    names = _names(folder)
    if not local_files_only and not any(name.endswith(".safetensors") for name in names):
        names = hub.hub_names(str(path_or_id), revision) or names
    _refuse_hub_gguf(str(path_or_id), names)
    _check_kind(repr(str(path_or_id)), names)
    _check_hub_weights(str(path_or_id), names, folder)
    return folder


def _gguf_folder(path: Path, name: str) -> Path:
    # Here alone: it brings the library tokenizers, which a plan needs not.
    from bytetx.checkpoint.gguf.folder import gguf_folder

    return gguf_folder(path, name=name)


def _only_gguf(folder: Path, names: list[str]) -> Path | None:
    """The GGUF file that is a folder's model; None where its weights are of another format.

    Raises CheckpointError where there are several.
    """
    if any(name.endswith(".safetensors") for name in names):
        return None
    found = gguf_of(names)
    if len(found) > 1:
        more = f" and {len(found) - 12} more" if len(found) > 12 else ""
        raise CheckpointError(
            f"{folder} holds {len(found)} GGUF models: {', '.join(found[:12])}{more}; give the "
            "path of one of them"
        )
    return folder / found[0] if found else None


def _names(folder: Path) -> list[str]:
    """The files of a folder, and of its subfolders, which may be modules with their own weights."""
    try:
        outer = sorted(folder.iterdir())
        inner = [path for part in outer if part.is_dir() for path in sorted(part.iterdir())]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    return [path.relative_to(folder).as_posix() for path in outer + inner if path.is_file()]


def _check_kind(where: str, names: list[str]) -> None:
    """Raises CheckpointError where the files are no checkpoint that bytetx reads, with their kind.

    names: of the files, relative to the checkpoint's folder.
    """
    if not {"config.json", "modules.json", ADAPTER_CONFIG, GLINER_CONFIG} & set(names):
        raise CheckpointError(
            f"{where} has no config.json; give the folder that save_pretrained wrote"
        )


def _refuse_hub_gguf(repo: str, names: list[str]) -> None:
    """Raises CheckpointError for a hub repository of GGUF files, in which each is a model."""
    found = gguf_of(names)
    if found and not any(name.endswith(".safetensors") for name in names):
        raise CheckpointError(
            f"{repo!r} has its weights in GGUF ({', '.join(found[:6])}), of which each file is a "
            f"model: download the one that you want (hf download {repo} {found[0]}) and give its "
            "path"
        )


def _check_hub_weights(repo: str, names: list[str], folder: Path) -> None:
    """Raises CheckpointError where a hub repository has no weights that are fetched.

    names: its files.  folder: those that were fetched.
    """
    if any(name.endswith(".safetensors") for name in names) or (folder / PICKLED).is_file():
        return
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    held = f"only {', '.join(pickles[:3])}" if pickles else "none in a format that bytetx knows"
    raise CheckpointError(
        f"{repo!r} has no weights in safetensors, {held}; pickle files can run code when they are "
        "opened and are refused: look for a revision with safetensors (the hub's own converter "
        "opens pull requests: revision='refs/pr/N'), or convert a copy that you trust"
    )


def _checked_path(path_or_id: str | Path) -> Path:
    """The name as a path, whether something is there or not; CheckpointError for no name at all."""
    if not str(path_or_id):
        raise CheckpointError("the checkpoint's name is empty; give its folder or a hub id")
    try:
        path = Path(path_or_id).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:  # a name that is too long; ~ of an unknown user
        raise CheckpointError(f"{str(path_or_id)!r} cannot be opened: {error}") from error
    return path


def transformer_folder(folder: Path) -> Path:
    """Where config.json and the weights are: `folder`, or the subfolder of it that a
    sentence-transformers modules.json names for its Transformer or StaticEmbedding module (such as
    0_Transformer).
    `folder` as well where it begins with a Router, each of whose routes has one of its own.

    Raises CheckpointError where modules.json is damaged, lacks such a module, or leaves the folder.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return folder
    modules = read_modules(path)
    names = [
        module.get("path", "")
        for module in modules
        if str(module.get("type", "")).rpartition(".")[2] in (*TRANSFORMERS, STATIC)
    ]
    if not names and any(is_router(str(module.get("type"))) for module in modules):
        return folder
    if not names:
        kinds = ", ".join(str(module.get("type")) for module in modules)
        raise CheckpointError(
            f"{path} names no Transformer or StaticEmbedding module, only: {kinds or 'nothing'}"
        )
    return module_folder(path, names[0])


def read_modules(path: Path) -> list[dict[str, Any]]:
    """The modules of a modules.json, in the order of the file, as sentence-transformers runs them.

    Raises CheckpointError where it is damaged.
    """
    modules = read_json_objects(path, MODULES)
    if len(modules) > _MAX_MODULES:
        raise CheckpointError(
            f"{path} names {len(modules):,} modules, more than {_MAX_MODULES}; it is damaged"
        )
    return modules


def is_router(name: str) -> bool:
    """Whether a module's class is sentence-transformers' Router, or Asym, its name of before."""
    kind = name.rpartition(".")[2]
    return name.startswith("sentence_transformers.") and kind in ("Router", "Asym")


def begins_static(folder: Path) -> bool:
    """Whether a folder's modules.json begins with a StaticEmbedding module.

    Raises CheckpointError where it is damaged.
    """
    path = folder / "modules.json"
    first = next(iter(read_modules(path)), {}) if path.is_file() else {}
    return str(first.get("type")).rpartition(".")[2] == STATIC


def module_folder(path: Path, name: object) -> Path:
    """The existing subfolder `name` that modules.json, at `path`, gives for a module."""
    if not isinstance(name, str) or not PATH.accepts(name):
        raise CheckpointError(f"{path}: module path {name!r:.120} must lie inside the folder")
    if not (path.parent / name).is_dir():
        raise CheckpointError(f"{path} names the folder {name!r}, which does not exist")
    return path.parent / name


def adapter_base(folder: Path, *, local_files_only: bool = True) -> Path | None:
    """The folder of the model that the LoRA adapter in `folder` changes; None without an adapter.

    Raises CheckpointError where the adapter names no base model, or one that cannot be had.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return None
    config = read_json(path, _ADAPTER)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    advice = "write the folder of the base model there, or merge the two (peft's merge_and_unload)"
    if not name:
        raise CheckpointError(f"{path} names no base_model_name_or_path; {advice}")
    try:
        base = _resolve(name, revision=revision, local_files_only=local_files_only)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path}: base_model_name_or_path cannot be loaded ({error}); {advice}"
        ) from error
    if (transformer_folder(base) / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{path}: base_model_name_or_path {name!r:.200} is an adapter, too; {advice}, first of "
            "that one"
        )
    return base


def load_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json; of a GLiNER model, its encoder's config."""
    if is_gliner(folder):
        return _encoder_config(folder / GLINER_CONFIG)
    config = read_json(folder / "config.json", _CONFIG)
    if config.get("model_type") != GLINER2_TYPE:
        return config
    path = folder / GLINER2_ENCODER
    return as_encoder(path, read_json(path), architecture=GLINER2)


def is_gliner(folder: Path) -> bool:
    """Whether a checkpoint's settings are GLiNER's."""
    return (folder / GLINER_CONFIG).is_file() and not (folder / "config.json").is_file()


def _encoder_config(path: Path) -> dict[str, Any]:
    """The encoder's config in gliner_config.json, without the head that it was trained with."""
    config = read_json(path, {"encoder_config": TABLE}).get("encoder_config")
    if not config:
        raise CheckpointError(
            f"{path} has no encoder_config, as old versions of the gliner package wrote it; "
            f"save the model again, in that folder: {GLINER_SAVE}"
        )
    return as_encoder(path, config)


def as_encoder(
    path: Path, config: Mapping[str, Any], *, architecture: str = GLINER
) -> dict[str, Any]:
    """The config of an encoder in a GLiNER model's file, at `path`, as of a config.json."""
    config = {"model_type": "deberta-v2", **config, "architectures": [architecture]}
    check_fields(path, config, _CONFIG)
    return config


def refuse_own_code(folder: Path, config: Mapping[str, Any], families: Families) -> None:
    """Raises CheckpointError where a config.json says that code of the checkpoint is its model.

    Such code never runs. What is not refused names code that a family of its model_type computes
    the same as: another family would compute something else.
    """
    auto_map = config.get("auto_map")
    classes = auto_map if isinstance(auto_map, dict) else {}
    known = families.own_code(config)
    custom = [
        name
        for name, code in classes.items()
        if str(name).startswith(_MODEL_CLASSES)
        and not str(code).rpartition("--")[2].startswith(known)
    ]
    if custom:
        raise CheckpointError(
            f"{folder / 'config.json'}: auto_map names the checkpoint's own code for "
            f"{', '.join(custom)}, and bytetx never runs such code; where the weights are those of "
            f"a plain {config.get('model_type')!r}, remove auto_map from a copy of the file"
        )
