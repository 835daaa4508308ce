"""The progress file of a job: committed rows, and the inputs and options that they are for."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from bytetx.checkpoint.decision_heads import DECISION_FILES
from bytetx.checkpoint.families import check_families
from bytetx.checkpoint.files import GLINER_CONFIG, is_gliner
from bytetx.checkpoint.gguf.file import GGUF_SUFFIX
from bytetx.checkpoint.sentence_files import TRANSFORMER_FILES
from bytetx.checkpoint.tag_calibration import TAG_CALIBRATION
from bytetx.checkpoint.tokenizer_files import TOKENIZER_FILES
from bytetx.cli.files.records import RankRequest, Record, RecordError
from bytetx.errors import InputError


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of a job so far, in all its runs.

    num_malformed: records of csv inputs whose lines are lost; each is an error, too.
    num_pad_tokens: tokens that a padded run in batches of 32, in arrival order, computes on top.
    """

    num_texts: int = 0
    num_blank: int = 0
    num_errors: int = 0
    num_truncated: int = 0
    num_tokens: int = 0
    num_pad_tokens: int = 0
    seconds: float = 0.0
    num_malformed: int = 0


@dataclass(frozen=True, slots=True)
class JobProgress:
    """One committed state of a job; later rows are written again when the job resumes.

    job: what must be equal to resume: task, options and model.
    digest: of the records of the committed rows.
    data_bytes, list_bytes: sizes of the unfinished output and of the list of rows next to it.
    replaces: whether --overwrite was given, so that an existing output may be replaced.
    complete_bytes: size of the complete output, set when only its renames are left to do.
    """

    job: Mapping[str, Any]
    counts: Counts = field(default_factory=Counts)
    digest: str = ""
    data_bytes: int = 0
    list_bytes: int = 0
    replaces: bool = False
    complete_bytes: int | None = None


def save_progress(progress: JobProgress, path: Path) -> None:
    """Replaces the file atomically: a reader finds the old state or the new one."""
    temporary = temporary_of(path)
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(asdict(progress), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def temporary_of(path: Path) -> Path:
    """The temporary file of `save_progress`."""
    return path.with_name(path.name + ".tmp")


def load_progress(path: Path) -> JobProgress:
    """Raises InputError where the file is not one that `save_progress` wrote."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        counts = Counts(**state.pop("counts"))
        return JobProgress(**state, counts=counts)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{path} is no readable progress file ({error}); start again with --overwrite"
        ) from error


def check_same_job(progress: JobProgress, job: Mapping[str, Any], path: Path) -> None:
    """Raises InputError that names what differs from the unfinished job."""
    was, now = progress.job, json.loads(json.dumps(job))
    if SIDE_FILES not in was:  # a job of before they were noted
        now.pop(SIDE_FILES, None)
    differing = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    if differing:
        key = differing[0]
        raise InputError(
            f"{path} is of another job: {key} was {was.get(key)!r} and is {now.get(key)!r} now; "
            "give the same options, or start again with --overwrite"
        )


def digest_record(digest: str, record: Record) -> str:
    """The digest of a sequence of records, from the digest of all but the last, and the last.

    File names and line numbers are not part of it, so that inputs may be renamed, moved and split.
    """
    parts = [digest, type(record.value).__name__, repr(_content(record.value))]
    if record.kept:
        parts.append(repr(record.kept))
    text = "\n".join(parts)
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _content(value: object) -> object:
    if isinstance(value, RecordError):
        return ("error", value.problem)
    if isinstance(value, RankRequest):
        return (value.query, tuple(map(_content, value.documents)))
    return value


def skip_done(records: Iterator[Record], progress: JobProgress, path: Path) -> None:
    """Skips the records whose rows are committed; InputError where they are not the same records.

    Comparing contents, not names or times of files, also works for pipes and for inputs that were
    moved or have grown since, and finds edits in the part that is done.
    """
    num_done = progress.counts.num_texts
    digest, num_read = "", 0
    for record in islice(records, num_done):
        digest, num_read = digest_record(digest, record), num_read + 1
    if digest != progress.digest or num_read != num_done:
        raise InputError(
            f"{path} is of a job with other inputs: their first {num_done:,} texts differ from "
            "these; give the same files in the same order, or start again with --overwrite"
        )


def side_files_identity(folder: Path) -> str:
    """A digest of what decides results beside the weights: tokenizers, pooling, prompts, templates.

    By their names: inputs and outputs of jobs may lie in the checkpoint's folder, too.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in inside.parts)
        is_read = path.name in _SIDE_NAMES or path.suffix == ".jinja"
        if not is_read or is_hidden or not path.is_file():
            continue
        try:
            content = path.read_bytes()
        except OSError:  # loading says so, if it needs the file
            content = b""
        digest.update(f"{inside} {len(content)}".encode())
        digest.update(content)
    return digest.hexdigest()


SIDE_FILES = "model_side_files"  # a job's key for side_files_identity() of its checkpoint
_SIDE_NAMES = {
    *TOKENIZER_FILES,
    "adapter_config.json",
    "config.json",
    "config_sentence_transformers.json",
    *DECISION_FILES,
    "generation_config.json",
    GLINER_CONFIG,
    "modules.json",
    "router_config.json",
    TAG_CALIBRATION,
    *TRANSFORMER_FILES,
}


def model_identity(folder: Path) -> str:
    """A digest that tells checkpoints apart: the config, and samples of each weights file.

    Both ends of a file are read, 1 MiB each: fine-tuned weights differ there, and a large
    checkpoint costs milliseconds.
    """
    config = GLINER_CONFIG if is_gliner(folder) else "config.json"
    digest = hashlib.blake2b((folder / config).read_bytes(), digest_size=16)
    for path in sorted(path for path in folder.rglob("*") if _is_weights(path)):
        size_bytes = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size_bytes}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size_bytes - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _is_weights(path: Path) -> bool:
    return path.suffix in _WEIGHT_SUFFIXES or path.name in _PLAIN_WEIGHTS


def families_identity(folder: str) -> str:
    """A digest of the caller's own families. Raises OptionError as bytetx.load does."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(check_families(folder).glob("*.toml")):
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{path.name} {len(content)}".encode())
        digest.update(content)
    return digest.hexdigest()


_SAMPLE_BYTES = 1 << 20
_WEIGHT_SUFFIXES = (".safetensors", GGUF_SUFFIX)
_PLAIN_WEIGHTS = ("pytorch_model.bin", "sparse_linear.pt", "colbert_linear.pt")
