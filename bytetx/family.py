"""Family tables: models/*.toml, read once and checked against a closed list of keys."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from bytetx.errors import CheckpointError

# What a feed-forward or a head may apply; bytetx.ops.linear runs each of them.
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")

# section -> (keys it must have, keys it may have).
_SECTIONS = {
    "config": (
        {
            "hidden_size",
            "num_layers",
            "num_heads",
            "intermediate_size",
            "max_position_embeddings",
            "activation",
            "norm_eps",
        },
        {"embedding_size", "num_token_types", "relative_bias_rows"},
    ),
    "architecture": (
        {"norm_placement", "norm", "positions", "position_offset"},
        {"relative_bias_buckets", "relative_bias_max_distance"},
    ),
    "embeddings": ({"word", "position", "norm"}, {"token_type", "relative_bias", "project"}),
    "layer": (
        {"q", "k", "v", "attn_out", "attn_norm", "ffn_in", "ffn_out", "ffn_norm"},
        set(),
    ),
    "heads": (
        set(),
        {"pooler", "sequence_classification", "token_classification", "masked_lm"},
    ),
}
_HEADS = {
    "pooler": ({"dense", "activation"}, set()),
    "sequence_classification": ({"out"}, {"dense", "activation"}),
    "token_classification": ({"out"}, {"dense", "activation"}),
    "masked_lm": ({"dense", "activation", "norm", "norm_eps", "decoder", "bias"}, set()),
}
_CLOSED_VALUES = {"norm_placement": ("post",), "norm": ("layer_norm",), "positions": ("learned",)}

# A size that config.json gives needs the tensor or the facts that go with it, and the other way.
_PAIRS = (
    (("config", "num_token_types"), ("embeddings", "token_type")),
    (("config", "embedding_size"), ("embeddings", "project")),
    (("config", "relative_bias_rows"), ("embeddings", "relative_bias")),
    (("config", "relative_bias_rows"), ("architecture", "relative_bias_buckets")),
    (("config", "relative_bias_rows"), ("architecture", "relative_bias_max_distance")),
)


@cache
def families() -> dict[str, dict[str, Any]]:
    """Every models/*.toml by its file's stem, checked.

    Raises CheckpointError naming the file and the key that is unknown, missing or not allowed.
    """
    tables: dict[str, dict[str, Any]] = {}
    for path in sorted(_models_folder().glob("*.toml")):
        table = read_family(path)
        for family, other in tables.items():
            if taken := set(other["model_types"]) & set(table["model_types"]):
                raise CheckpointError(
                    f"models/{path.name}: model_type {', '.join(sorted(taken))} is already in "
                    f"models/{family}.toml"
                )
        tables[path.stem] = table
    return tables


def known_model_types() -> list[str]:
    """Every model_type that can be loaded, sorted."""
    return sorted(name for table in families().values() for name in table["model_types"])


def read_family(path: Path) -> dict[str, Any]:
    """One family's table; a misspelt key is an error, for it would change a model in silence."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"models/{path.name} cannot be read as TOML: {error}") from error
    where = f"models/{path.name}:"
    _check_keys(
        where, table, {"model_types", "prefix", "defaults", *_SECTIONS} - {"heads"}, {"heads"}
    )
    for section, (required, optional) in _SECTIONS.items():
        if section in table:
            _check_keys(f"{where} [{section}]", table[section], required, optional)
    for head, content in table.get("heads", {}).items():
        _check_keys(f"{where} [heads.{head}]", content, *_HEADS[head])
    _check_values(where, table)
    return table


def _models_folder() -> Path:
    package = Path(__file__).parent
    installed = package / "models"
    return installed if installed.is_dir() else package.parent / "models"


def _check_keys(where: str, content: Any, required: set[str], optional: set[str]) -> None:
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} must be a table of keys, got {content!r}")
    if unknown := content.keys() - required - optional:
        raise CheckpointError(
            f"{where} unknown key {', '.join(sorted(unknown))}; "
            f"known: {', '.join(sorted(required | optional))}"
        )
    if missing := required - content.keys():
        raise CheckpointError(f"{where} missing key {', '.join(sorted(missing))}")


def _check_values(where: str, table: dict[str, Any]) -> None:
    architecture, defaults = table["architecture"], table["defaults"]
    for key, allowed in _CLOSED_VALUES.items():
        if architecture[key] not in allowed:
            raise CheckpointError(
                f"{where} [architecture] {key} is {architecture[key]!r}, must be one of "
                f"{', '.join(allowed)}"
            )
    offset = architecture["position_offset"]
    if offset != "after_pad_token" and (not isinstance(offset, int) or offset < 0):
        raise CheckpointError(
            f"{where} [architecture] position_offset is {offset!r}, must be an integer from 0 "
            "or 'after_pad_token'"
        )
    named = {key for key in table["config"].values() if isinstance(key, str)}
    if missing := (named | {"vocab_size", "pad_token_id"}) - defaults.keys():
        raise CheckpointError(f"{where} [defaults] missing key {', '.join(sorted(missing))}")
    for key, stem in table["layer"].items():
        if "{i}" not in stem:
            raise CheckpointError(f"{where} [layer] {key} is {stem!r}, must contain {{i}}")
    for head, content in table.get("heads", {}).items():
        if content.get("activation", "config") not in ("config", *ACTIVATIONS):
            raise CheckpointError(
                f"{where} [heads.{head}] activation is {content['activation']!r}, must be "
                f"'config' or one of {', '.join(ACTIVATIONS)}"
            )
    for (section, key), (other_section, other) in _PAIRS:
        if (key in table[section]) != (other in table[other_section]):
            raise CheckpointError(
                f"{where} [{section}] {key} and [{other_section}] {other} go together; "
                "one of them is missing"
            )
