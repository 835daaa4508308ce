"""sentence-transformers' Router: lists of modules, of which the task of a call chooses one."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytetx.checkpoint.files import is_router, module_folder, read_modules
from bytetx.checkpoint.side_files import (
    TABLE,
    TEXT,
    Field,
    check_fields,
    list_of,
    read_json,
    table_of,
)
from bytetx.errors import CheckpointError, OptionError, shown

_FILE = "router_config.json"
_ROUTER: dict[str, Field] = {
    "types": table_of(TEXT),
    "structure": table_of(list_of(TEXT)),
    "parameters": TABLE,
}
_PARAMETERS: dict[str, Field] = {"default_route": TEXT, "route_mappings": table_of(TEXT)}
_MAX_MODULES = 1024
# The kind of input that bytetx reads.
_MODALITY = "text"


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """path: of the file that describes it.  routes: (class, subfolder) of the modules of each.
    default: of a call without a task.

    mappings: (task, modality) to the name of a route, as Router's route_mappings; None is any.
    """

    path: Path
    routes: Mapping[str, tuple[tuple[str, str], ...]]
    default: str | None
    mappings: Mapping[tuple[str | None, str | None], str]

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that a call may name."""
        named = [task for task, modality in self.mappings if task and modality in (None, _MODALITY)]
        return tuple(dict.fromkeys([*self.routes, *named]))

    def resolve(self, task: object) -> str:
        """The route of a task. Raises OptionError where there is none."""
        if task is not None and not isinstance(task, str):
            raise OptionError(f"task must be one route of all texts of a call, got {shown(task)}")
        places = ((task, _MODALITY), (task, None), (None, _MODALITY), (None, None))
        found = next((self.mappings[place] for place in places if place in self.mappings), None)
        for name in (task, _MODALITY):
            if found is None and name in self.routes:
                found = name
        if found is None and task is None:
            found = self.default
        if found is None:
            known = ", ".join(map(repr, self.tasks))
            raise OptionError(
                f"task must be one of {known} (this checkpoint's routes), got {shown(task)}"
            )
        return found


def read_router(folder: Path) -> RouterSpec | None:
    """The Router that is the first module of a checkpoint; None where another one is.

    Raises CheckpointError where its file is damaged.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    entries = read_modules(path)
    if not entries or not is_router(str(entries[0].get("type"))):
        return None
    settings = folder / "config_sentence_transformers.json"
    kind = read_json(settings, {"model_type": TEXT}).get("model_type") if settings.is_file() else ""
    if kind == "MultiVectorEncoder":
        raise CheckpointError(f"{path}: a Router of a multi-vector model is not supported")
    where = module_folder(path, entries[0].get("path")) / _FILE
    if not where.is_file():
        raise CheckpointError(
            f"{path} names a Router, whose {_FILE} is not in {where.parent}; save the model with "
            "sentence-transformers 5 or later"
        )
    config = read_json(where, _ROUTER)
    parameters = config.get("parameters") or {}
    check_fields(f"{where}: parameters", parameters, _PARAMETERS)
    types, structure = config.get("types") or {}, config.get("structure") or {}
    routes: dict[str, tuple[tuple[str, str], ...]] = {}
    for route, names in structure.items():
        if unknown := [name for name in names if name not in types]:
            raise CheckpointError(
                f"{where}: route {route!r:.120} names {unknown[0]!r:.120}, which has no type"
            )
        routes[route] = tuple((types[name], name) for name in names)
    if sum(map(len, routes.values())) > _MAX_MODULES:
        raise CheckpointError(
            f"{where} names more than {_MAX_MODULES} modules in its routes; it is damaged"
        )
    mappings = _mappings(where, parameters.get("route_mappings") or {})
    default = parameters.get("default_route")
    named = [*mappings.values(), *([] if default is None else [default])]
    if not routes or not all(routes.values()) or any(name not in routes for name in named):
        raise CheckpointError(
            f"{where} must have routes, each with modules, and name no others; it has "
            f"{', '.join(routes) or 'none'}"
        )
    return RouterSpec(where, routes, default, mappings)


def _mappings(where: Path, given: Mapping[str, str]) -> dict[tuple[str | None, str | None], str]:
    """The keys are tuples in Python's notation; those of other modalities are left out."""
    mappings: dict[tuple[str | None, str | None], str] = {}
    for key, route in given.items():
        place: Any
        try:
            place = ast.literal_eval(key)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise CheckpointError(f"{where}: route_mappings has the key {key!r:.120}") from error
        match place:
            case ((str() | None) as task, (str() | None) as modality):
                mappings[task, modality] = route
            case ((str() | None), tuple()):
                continue
            case _:
                raise CheckpointError(f"{where}: route_mappings has the key {key!r:.120}")
    return mappings
