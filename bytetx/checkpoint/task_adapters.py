"""LoRA adapters of a checkpoint's tasks (Jina embeddings v3), of which each call chooses one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytetx.checkpoint.files import ADAPTER_CONFIG
from bytetx.checkpoint.lora import MAX_ALPHA, MAX_RANK, read_lora
from bytetx.checkpoint.side_files import (
    TEXT,
    Field,
    check_fields,
    integer,
    list_of,
    number,
    table_of,
)
from bytetx.checkpoint.spec import ModelSpec
from bytetx.checkpoint.weight_changes import LowRank
from bytetx.checkpoint.weights import Weights
from bytetx.errors import CheckpointError

_CONFIG: dict[str, Field] = {
    "lora_adaptations": list_of(TEXT),
    "lora_rank": integer(1, MAX_RANK),
    "lora_alpha": number(0, MAX_ALPHA),
    "task_instructions": table_of(TEXT),
}
# The factors of all tasks beside a weight, as torch's parametrize names them.
_FACTOR_A, _FACTOR_B = (f".parametrizations.weight.0.lora_{letter}" for letter in "AB")

Added = Mapping[str, tuple[LowRank, ...]]


@dataclass(frozen=True, slots=True)
class TaskAdapters:
    """Additions of each task to the weights, by their names, and the prompt of each task."""

    added: Mapping[str, Added]
    prompts: Mapping[str, str]


def read_task_adapters(
    folder: Path, config: Mapping[str, Any], weights: Weights, spec: ModelSpec
) -> TaskAdapters | None:
    """The adapters of a checkpoint's tasks, of which only headers are read; None without any.

    They are in the weights' own file, stacked over the tasks that config.json lists, or in a
    subfolder for each task, in peft's layout, which the family names.
    Raises CheckpointError for adapters that are damaged or do not fit the weights.
    """
    stems = [name.removesuffix(_FACTOR_A) for name in weights if name.endswith(_FACTOR_A)]
    if not stems:
        return _in_subfolders(folder, weights, spec)
    where = folder / "config.json"
    check_fields(str(where), config, _CONFIG)
    config = {key: config[key] for key in _CONFIG if config.get(key) is not None}
    tasks, rank = config.get("lora_adaptations"), config.get("lora_rank", 4)
    if not tasks or len(set(tasks)) != len(tasks):
        raise CheckpointError(
            f"{where}: lora_adaptations must name the tasks whose adapters the weights hold, each "
            f"once, got {tasks!r:.200}"
        )
    scaling = config.get("lora_alpha", 1) / rank
    added: dict[str, dict[str, tuple[LowRank, ...]]] = {task: {} for task in tasks}
    for stem in stems:
        shape = _weight_shape(folder, weights, stem)
        # A has the rows of an embedding [rows, features], B those of a linear layer.
        is_embedding = f"{stem}.weight" in spec.embeddings.values()
        left, right = (_FACTOR_A, _FACTOR_B) if is_embedding else (_FACTOR_B, _FACTOR_A)
        factors = []
        for ending, wanted in ((left, (shape[0], rank)), (right, (rank, shape[1]))):
            name = f"{stem}{ending}"
            if name not in weights or weights.shape(name) != (len(tasks), *wanted):
                found = weights.shape(name) if name in weights else "no such tensor"
                raise CheckpointError(
                    f"{folder}: adapters of {len(tasks)} tasks of rank {rank} imply {name!r} of "
                    f"shape {(len(tasks), *wanted)}, got {found}; save the checkpoint again"
                )
            factors.append(weights.saved(name))
        for index, task in enumerate(tasks):
            both = [factor.at(index) for factor in factors]
            added[task][f"{stem}.weight"] = (LowRank(both[0], both[1], scaling),)
    return TaskAdapters(added, config.get("task_instructions", {}))


def _weight_shape(folder: Path, weights: Weights, stem: str) -> tuple[int, ...]:
    name = f"{stem}.weight"
    shape = weights.shape(name) if name in weights else ()
    if len(shape) != 2:
        raise CheckpointError(
            f"{folder} has adapters of {name!r:.200}, which is no matrix of its weights; save the "
            "checkpoint again"
        )
    return shape


def _in_subfolders(folder: Path, weights: Weights, spec: ModelSpec) -> TaskAdapters | None:
    """Adapters in peft's layout, each in the subfolder that the family names for its task."""
    names: Mapping[str, str] = spec.family_table.get("task_adapters", {})
    added: dict[str, Added] = {}
    for task, name in names.items():
        if not (folder / name / ADAPTER_CONFIG).is_file():
            continue
        lora = read_lora(folder / name, weights, spec)
        plain = {
            tensor: low_ranks
            for tensor, changes in lora.added.items()
            if (low_ranks := tuple(c for c in changes if isinstance(c, LowRank)))
            and len(low_ranks) == len(changes)
            and not any(low_rank.needs_all for low_rank in low_ranks)
        }
        if others := {*lora.replaced, *lora.added} - plain.keys():
            raise CheckpointError(
                f"{folder / name} replaces, scales or adds a bias to {min(others)!r:.200}; the "
                "adapter of a task may add to weights only"
            )
        added[task] = plain
    return TaskAdapters(added, {}) if added else None
