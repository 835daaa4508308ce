"""The families of checkpoints that can be loaded: those of models/ and of a caller's own folder."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bytetx.checkpoint.family import (
    checked_family,
    is_names,
    models_folder,
    named_file,
    parse_family,
)
from bytetx.errors import CheckpointError, OptionError, shown

logger = logging.getLogger("bytetx")


@dataclass(frozen=True, slots=True)
class Family:
    """One TOML file.

    path: as errors name it.
    marker: keys of the config.json that it serves; of several files with one model_type, all but
    one have some.
    table: what the file holds, checked; None where `error` says what is wrong with it.
    A file of which no model_types could be read serves, and breaks, none.
    """

    name: str
    path: str
    model_types: tuple[str, ...] = ()
    marker: tuple[str, ...] = ()
    table: Mapping[str, Any] | None = None
    error: str = ""

    def serves(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") in self.model_types and all(map(config.get, self.marker))


@dataclass(frozen=True, slots=True)
class Families:
    """Every family of checkpoints that can be loaded.

    folder: of the caller's own families; None without.  groups: the families of that folder, then
    those of models/; the first group that serves a config.json decides.
    """

    folder: Path | None
    groups: tuple[tuple[Family, ...], ...]

    def family_of(self, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """(name, table) of the family of a config.json; of several, the one most of whose keys it
        has.  Raises CheckpointError where there is none, or its file is broken."""
        for group in self.groups:
            if found := [family for family in group if family.serves(config)]:
                chosen = max(found, key=lambda family: len(family.marker))
                error = chosen.error or _twice(config["model_type"], group, chosen)
                if chosen.table is None or error:
                    raise CheckpointError(error)
                return chosen.name, chosen.table
        model_type = config.get("model_type")
        given = "lacks model_type" if model_type is None else f"has model_type {model_type!r:.200}"
        unread = [one.error for group in self.groups for one in group if not one.model_types]
        if model_type is not None and unread:
            raise CheckpointError(
                f"config.json {given}, which no family serves; {'; '.join(unread)}"
            )
        raise CheckpointError(f"config.json {given}; bytetx knows: {', '.join(self.model_types)}")

    @property
    def model_types(self) -> list[str]:
        """Every model_type that can be loaded, sorted."""
        sound = (one for group in self.groups for one in group if one.table is not None)
        return sorted({name for family in sound for name in family.model_types})

    def own_code(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Beginnings of the names of classes whose code the families of a config.json stand for."""
        model_type = config.get("model_type")
        names: list[str] = []
        for group in self.groups:
            for family in group:
                if family.table is not None and model_type in family.model_types:
                    keyed = family.table.get("keyed_code", {})
                    names += family.table.get("own_code", ())
                    names += [name for name, key in keyed.items() if key in config]
        return tuple(names)

    def markers(self, model_type: object) -> set[str]:
        """Keys of config.json by which the families of one model_type are told apart."""
        served = (one for group in self.groups for one in group if model_type in one.model_types)
        return {key for family in served for key in family.marker}


def read_families(folder: str | Path | None = None) -> Families:
    """The families of models/, and before them those of a folder of the caller's own.

    A file that is broken breaks the loading of its own model_types alone; a warning names it.
    Raises OptionError where the folder holds no TOML file.
    """
    if folder is None:
        return Families(None, (_built_in(),))
    own = check_families(folder)
    group = _read_group(own)
    known = {name for family in _built_in() for name in family.model_types}
    for family in group:
        if both := sorted(known & set(family.model_types)):
            logger.info("%s is used for model_type %s", family.path, ", ".join(both))
    return Families(own, (group, _built_in()))


def check_families(folder: str | Path) -> Path:
    """The absolute path of a folder of families. Raises OptionError where it holds no TOML file."""
    if not isinstance(folder, str | Path) or folder == "":
        raise OptionError(f"families must be a folder of TOML files, got {shown(folder)}")
    own = Path(folder).absolute()
    if not own.is_dir() or not any(own.glob("*.toml")):
        raise OptionError(
            f"families must be a folder of TOML files as models/ has them, and {shown(str(folder))}"
            f" {'holds none' if own.is_dir() else 'is no folder'}"
        )
    return own


@cache
def _built_in() -> tuple[Family, ...]:
    return _read_group(models_folder())


def _read_group(folder: Path) -> tuple[Family, ...]:
    """Every TOML file of a folder; what is broken is logged."""
    group = tuple(_read_family(path) for path in sorted(folder.glob("*.toml")))
    errors = [family.error for family in group]
    errors += [_twice(name, group, family) for family in group for name in family.model_types]
    for error in filter(None, dict.fromkeys(errors)):
        logger.warning("%s", error)
    return group


def _twice(model_type: str, group: Iterable[Family], family: Family) -> str:
    """The error where other families of the group serve just what this one does; else empty."""
    paths = [
        one.path
        for one in group
        if model_type in one.model_types and set(one.marker) == set(family.marker)
    ]
    if len(paths) == 1:
        return ""
    return f"model_type {model_type} is in {', '.join(paths)}; only one of them may have it"


def _names(value: Any) -> tuple[str, ...]:
    """The names of a list of them, none of anything else."""
    return tuple(value) if is_names(value) else ()


def _read_family(path: Path) -> Family:
    content: dict[str, Any] = {}
    try:
        content = parse_family(path)
        table = checked_family(path, content)
    except CheckpointError as error:
        claimed, served = _names(content.get("model_types")), _names(content.get("marker", []))
        return Family(path.stem, named_file(path), claimed, served, error=str(error))
    types, marker = table["model_types"], table.get("marker", ())
    return Family(path.stem, named_file(path), tuple(types), tuple(marker), table)
