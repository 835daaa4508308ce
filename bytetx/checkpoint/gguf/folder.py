"""The folder of a checkpoint that a GGUF file stands for, made once and kept.

All that reads a checkpoint reads a folder: config.json, tokenizer.json, chat templates, defaults of
generation, the modules of sentence-transformers. Here these files are written from the metadata of
a GGUF file, next to links to the file itself, whose weights are read from where they are.
"""

import atexit
import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bytetx.checkpoint.gguf.architectures import read_config
from bytetx.checkpoint.gguf.file import GgufFile, read_gguf, split_files
from bytetx.checkpoint.gguf.tokenizer import read_tokenizer
from bytetx.checkpoint.side_files import TEXT, integer, number
from bytetx.checkpoint.tokenizer_files import NAMED_TEMPLATES
from bytetx.errors import CheckpointError

logger = logging.getLogger("bytetx")

_LAYOUT = 1  # the version of the files that are written
_MAX_TEMPLATES = 64

# llama.cpp's kinds of pooling, as sentence-transformers calls them.
_POOLING = {1: "pooling_mode_mean_tokens", 2: "pooling_mode_cls_token", 3: "pooling_mode_lasttoken"}
_RANK = 4
_POOLED_BY = "sentence_transformers.models"


def gguf_folder(path: Path, *, name: str) -> Path:
    """The folder of the checkpoint in a GGUF file, which may be one of several of a model.

    name: of the folder, and so of the model.  It lies in ~/.cache/bytetx/gguf, and where that
    cannot be written among temporary files, which end with the process.
    Raises CheckpointError where the file is damaged or holds what bytetx does not run.
    """
    paths = [part.resolve() for part in split_files(path)]
    facts: list[Any] = [_LAYOUT]
    for part in paths:
        try:
            stat = part.stat()
        except OSError as error:
            raise CheckpointError(f"{part} cannot be read: {error}") from error
        facts.append((str(part), stat.st_size, stat.st_mtime_ns))
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:20]
    for parent in (_kept, _temporary):
        try:
            return _made(parent() / key, name, paths)
        except OSError as error:
            logger.info("%s: its folder cannot be written: %s", path, error)
    raise CheckpointError(
        f"{path}: neither ~/.cache/bytetx nor the folder of temporary files can be written, and "
        "the tokenizer and config of a GGUF file are kept there; make one of them writable"
    )


def _kept() -> Path:
    return Path.home() / ".cache" / "bytetx" / "gguf"


def _temporary() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="bytetx-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _made(parent: Path, name: str, paths: list[Path]) -> Path:
    """The folder, written under another name first: other processes never see half of it."""
    folder = parent / name
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as unfinished:
        made = Path(unfinished) / name
        made.mkdir()
        _write(read_gguf(paths), made)
        for path in paths:
            (made / path.name).symlink_to(path)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was not faster
                raise
    return folder


def _write(file: GgufFile, folder: Path) -> None:
    _write_json(folder / "config.json", read_config(file))
    positions = file.need(f"{file.fields['general.architecture']}.context_length", integer(1))
    tokenizer = read_tokenizer(file, max_positions=positions)
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
        _write_json(folder / "tokenizer_config.json", tokenizer.config)
        generation = {**_sampling(file), "eos_token_id": list(tokenizer.eos_token_ids)}
        _write_json(folder / "generation_config.json", generation)
    _write_templates(file, folder)
    _write_modules(file, folder)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def _sampling(file: GgufFile) -> dict[str, Any]:
    """The sampling that the model's makers recommend, if the file says any."""
    fields = {
        "temperature": ("temp", number(0)),
        "top_k": ("top_k", integer(0)),
        "top_p": ("top_p", number(0, 1)),
        "min_p": ("min_p", number(0, 1)),
        "repetition_penalty": ("penalty_repeat", number(1e-30)),
    }
    given = {
        name: file.get(f"general.sampling.{key}", field) for name, (key, field) in fields.items()
    }
    found = {
        name: float(f"{value:.7g}") if isinstance(value, float) else value
        for name, value in given.items()
        if value is not None
    }
    return {"do_sample": True, **found} if found.get("temperature") else found


def _write_templates(file: GgufFile, folder: Path) -> None:
    key = "tokenizer.chat_template"
    default = file.get(key, TEXT)
    if default:
        (folder / "chat_template.jinja").write_text(default, encoding="utf-8")
    named = {
        name.removeprefix(f"{key}."): file.get(name, TEXT)
        for name in file.fields
        if name.startswith(f"{key}.")
    }
    for name, template in named.items():
        if len(named) > _MAX_TEMPLATES or not name.replace("_", "").replace("-", "").isalnum():
            raise CheckpointError(f"{file.path}: metadata {key}.{name:.60} is no template's name")
        (folder / NAMED_TEMPLATES).mkdir(exist_ok=True)
        (folder / NAMED_TEMPLATES / f"{name}.jinja").write_text(template, encoding="utf-8")


def _write_modules(file: GgufFile, folder: Path) -> None:
    """The pooling of an embedding model, and unit length, as llama.cpp's embeddings have."""
    name = file.fields["general.architecture"]
    kind = file.get(f"{name}.pooling_type", integer(0))
    width = file.need(f"{name}.embedding_length", integer(1))
    if kind == _RANK and "cls.output.weight" not in file.tensors:
        raise CheckpointError(
            f"{file.path} is a reranker without the head that scores (cls.output), or with one "
            "that bytetx does not read; give the checkpoint in safetensors that it was made from"
        )
    if kind not in _POOLING:
        return
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"{_POOLED_BY}.{name}"}
        for i, (path, name) in enumerate(modules)
    ]
    _write_json(folder / "modules.json", entries)
    for path, _ in modules[1:]:
        (folder / path).mkdir()
    pooling = {"word_embedding_dimension": width, _POOLING[kind]: True}
    others = {name: False for name in _POOLING.values() if name not in pooling}
    _write_json(folder / "1_Pooling" / "config.json", pooling | others)
