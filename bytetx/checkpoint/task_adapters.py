"""LoRA adapters of a checkpoint's tasks (Jina embeddings v3 and v5), of which each text has one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
from bytetx.errors import CheckpointError, OptionError, shown

_CONFIG: dict[str, Field] = {
    "lora_adaptations": list_of(TEXT),
    "lora_rank": integer(1, MAX_RANK),
    "lora_alpha": number(0, MAX_ALPHA),
    "task_instructions": table_of(TEXT),
}
_TASKS: dict[str, Field] = {"task_names": list_of(TEXT), "default_task": TEXT}
# The factors of all tasks beside a weight, as torch's parametrize names them.
_FACTOR_A, _FACTOR_B = (f".parametrizations.weight.0.lora_{letter}" for letter in "AB")

Added = Mapping[str, tuple[LowRank, ...]]


@dataclass(frozen=True, slots=True)
class TaskAdapters:
    """The adapters of a checkpoint's tasks.

    added: what each adapter adds to weights, by their names.  adapters: that of each task.
    prompts: texts by task.  prompt_names: of the checkpoint's prompts, by task.
    default: the task of calls that name none.  needs_task: whether one of the two must be there.
    """

    added: Mapping[str, Added]
    adapters: Mapping[str, str]
    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt_names: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    needs_task: bool = False

    def resolve(self, task: object) -> str | None:
        """The task that a text has; None: the model without an adapter.

        Raises OptionError for a name that is none, and where a text must have a task.
        """
        if task is None and (self.default is not None or not self.needs_task):
            return self.default
        if not isinstance(task, str) or task not in self.adapters:
            known = ", ".join(map(repr, self.adapters))
            others = "" if self.needs_task else " (or None for the model without an adapter)"
            raise OptionError(f"task must be one of {known}{others}, got {shown(task)}")
        return task


def read_task_adapters(
    folder: Path,
    config: Mapping[str, Any],
    weights: Weights,
    spec: ModelSpec,
    *,
    default: str | None = None,
) -> TaskAdapters | None:
    """The adapters of a checkpoint's tasks, of which only headers are read; None without any.

    They are in the weights' own file, stacked over the tasks that config.json lists, or in a
    subfolder for each task, in peft's layout, which the family names.
    default: the task that sentence-transformers' files name; else config.json may.
    Raises CheckpointError for adapters that are damaged or do not fit the weights.
    """
    check_fields(str(folder / "config.json"), config, _TASKS)
    default = default or config.get("default_task")
    found = _stacked(folder, config, weights, spec, default=default)
    if found is None:
        found = _in_subfolders(folder, config, weights, spec, default=default)
    if found is not None and default is not None and default not in found.adapters:
        raise CheckpointError(
            f"{folder}: default_task must be one of {', '.join(map(repr, found.adapters))}, got "
            f"{default!r:.200}"
        )
    return found


def _stacked(
    folder: Path,
    config: Mapping[str, Any],
    weights: Weights,
    spec: ModelSpec,
    *,
    default: str | None,
) -> TaskAdapters | None:
    """Adapters beside the weights, as Jina embeddings v3's first checkpoint has them."""
    stems = [name.removesuffix(_FACTOR_A) for name in weights if name.endswith(_FACTOR_A)]
    if not stems:
        return None
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
    prompts = config.get("task_instructions", {})
    return TaskAdapters(added, dict(zip(tasks, tasks, strict=True)), prompts, default=default)


def _weight_shape(folder: Path, weights: Weights, stem: str) -> tuple[int, ...]:
    name = f"{stem}.weight"
    shape = weights.shape(name) if name in weights else ()
    if len(shape) != 2:
        raise CheckpointError(
            f"{folder} has adapters of {name!r:.200}, which is no matrix of its weights; save the "
            "checkpoint again"
        )
    return shape


def _in_subfolders(
    folder: Path,
    config: Mapping[str, Any],
    weights: Weights,
    spec: ModelSpec,
    *,
    default: str | None,
) -> TaskAdapters | None:
    """Adapters in peft's layout, each in the subfolder that the family names for its task.

    Tasks that config.json lists must have theirs; several may share one.
    """
    table = spec.family_table
    names: Mapping[str, str] = table.get("task_adapters", {})
    listed = config.get("task_names")
    added: dict[str, Added] = {}
    adapters: dict[str, str] = {}
    for task, name in names.items():
        if (folder / name / ADAPTER_CONFIG).is_file():
            if name not in added:
                added[name] = _plain_additions(folder / name, weights, spec)
            adapters[task] = name
    if lacking := [task for task in listed or () if task not in adapters]:
        known = ", ".join(map(repr, names)) or "none"
        raise CheckpointError(
            f"{folder / 'config.json'}: task_names has {lacking[0]!r:.200}, and there is no "
            f"{names.get(lacking[0], 'adapter')!r:.200} with {ADAPTER_CONFIG}; {spec.family} has "
            f"adapters of {known}: download the checkpoint again"
        )
    if not added:
        return None
    return TaskAdapters(
        added,
        adapters,
        prompt_names=table.get("task_prompts", {}),
        default=default,
        needs_task=listed is not None,
    )


def _plain_additions(folder: Path, weights: Weights, spec: ModelSpec) -> Added:
    lora = read_lora(folder, weights, spec)
    plain = {
        tensor: low_ranks
        for tensor, changes in lora.added.items()
        if (low_ranks := tuple(c for c in changes if isinstance(c, LowRank)))
        and len(low_ranks) == len(changes)
        and not any(low_rank.needs_all for low_rank in low_ranks)
    }
    if others := {*lora.replaced, *lora.added} - plain.keys():
        raise CheckpointError(
            f"{folder} replaces, scales or adds a bias to {min(others)!r:.200}; the adapter of a "
            "task may add to weights only"
        )
    return plain
