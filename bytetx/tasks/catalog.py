"""The tasks that bytetx has. A task's module is imported when the task is first asked for."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from bytetx.tasks.methods import AsyncModelTasks, ModelTasks
from bytetx.tasks.task import TASKS, TaskSpec

__all__ = ["AsyncModelTasks", "ModelTasks", "declared_task", "declared_tasks"]

# By name: the module that declares the task.
_MODULES = {
    "answer": "answer",
    "classify": "classify",
    "decide": "decide",
    "embed": "embed",
    "embed_all": "embed_all",
    "embed_chunks": "embed_chunks",
    "embed_spans": "embed_chunks",
    "embed_sparse": "embed_sparse",
    "embed_tokens": "embed_tokens",
    "extract": "extract",
    "fill_mask": "fill_mask",
    "fill_schema": "fill_schema",
    "generate": "generate",
    "hidden_states": "hidden_states",
    "rerank": "rerank",
    "score": "score",
    "tag": "tag",
}


def declared_tasks() -> Mapping[str, TaskSpec]:
    """All tasks by name: those of bytetx, then those that a program has declared."""
    for name in _MODULES:
        _declare(name)
    return {name: TASKS[name] for name in _MODULES} | TASKS


def declared_task(name: str) -> TaskSpec:
    """The task of that name; KeyError where there is none."""
    if name in _MODULES:
        _declare(name)
    return TASKS[name]


def _declare(name: str) -> None:
    import_module(f"bytetx.tasks.{_MODULES[name]}")


class _Undeclared:
    """Stands for a task's method, which takes its place once the task is declared."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        _declare(self._name)
        return getattr(owner if instance is None else instance, self._name)


for _name in _MODULES.keys() - TASKS.keys():
    for _owner in (ModelTasks, AsyncModelTasks):
        setattr(_owner, _name, _Undeclared(_name))
