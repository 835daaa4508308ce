"""LoRA adapters in peft's layout: which tensors of the base model they change, and by how much."""

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bytetx.checkpoint.files import ADAPTER_CONFIG
from bytetx.checkpoint.saved_tensor import SavedTensor
from bytetx.checkpoint.side_files import (
    FLAG,
    TEXT,
    Field,
    either,
    integer,
    list_of,
    number,
    read_json,
    table_of,
)
from bytetx.checkpoint.spec import ModelSpec
from bytetx.checkpoint.weight_changes import BiasChange, Change, LowRank
from bytetx.checkpoint.weights import Weights, canonical_name, read_header
from bytetx.errors import CheckpointError

_FILE = "adapter_model.safetensors"
# Where peft's wrapper holds the model that it changes.
_WRAPPER = "base_model.model."

# In use are ranks up to 512, and an alpha of at most a few times the rank. Beyond it the weights
# are noise, or no numbers at all.
MAX_RANK, MAX_ALPHA = 1 << 16, 1 << 20

_CONFIG: dict[str, Field] = {
    "peft_type": TEXT,
    "bias": TEXT,
    "r": integer(1, MAX_RANK),
    "lora_alpha": number(0, MAX_ALPHA),
    "use_rslora": FLAG,
    "use_dora": FLAG,
    "lora_bias": FLAG,
    "fan_in_fan_out": FLAG,
    "init_lora_weights": either(FLAG, TEXT),
    "target_modules": either(TEXT, list_of(TEXT)),
    "modules_to_save": list_of(TEXT),
    "rank_pattern": table_of(integer(1, MAX_RANK)),
    "alpha_pattern": table_of(number(0, MAX_ALPHA)),
}
# Keys that do not change what the adapter computes, or whose effect the names of its tensors show.
_HARMLESS = frozenset(
    (
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "exclude_modules", "lora_dropout", "layers_to_transform"),
        *("layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config"),
        *("lora_ga_config", "qalora_group_size", "ensure_weight_tying"),
    )
)
# Values of init_lora_weights that leave the base model's weights as they are.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
# Beginnings of those that take the factors' first values from the weights.
_SUBTRACTED_STARTS = ("pissa", "olora", "corda", "lora_ga")
_BIASES = (None, "none", "all", "lora_only")

# Endings of a module's tensors, and what they are.
_ENDINGS = {
    ".lora_A.weight": "lora_A",
    ".lora_B.weight": "lora_B",
    ".lora_B.bias": "lora_B.bias",
    ".lora_embedding_A": "lora_embedding_A",
    ".lora_embedding_B": "lora_embedding_B",
    ".lora_magnitude_vector": "lora_magnitude_vector",
}
# With bias="all" peft saves biases of modules_to_save under these names, too: those that they stand
# in for, and their own once more.
_WRAPPED = re.compile(r"\.(original_module|modules_to_save)\.")
_MERGE = "merge the two (peft's merge_and_unload, then save_pretrained), and load the result"


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter, by the names that the base model's tensors have in a checkpoint.

    added: what is added to weights and biases, to a stack of several by each of its parts.
    replaced: tensors that take the place of the base model's, before something is added to them.
    """

    added: Mapping[str, tuple[Change, ...]]
    replaced: Mapping[str, SavedTensor]

    def without(self, names: Container[str]) -> "Lora":
        """The changes of all other tensors than those of these names."""
        return Lora(
            {name: changes for name, changes in self.added.items() if name not in names},
            {name: tensor for name, tensor in self.replaced.items() if name not in names},
        )


def merge_lora(folder: Path, weights: Weights, spec: ModelSpec) -> None:
    """Makes `weights`, of the base model, those of the model with the adapter in a folder.

    Raises CheckpointError for an adapter that is damaged or cannot be merged into the weights.
    """
    lora = read_lora(folder, weights, spec)
    if missing := [name for name in lora.added if name not in weights]:
        raise CheckpointError(
            f"{folder / _FILE} adds to {min(missing)!r}, a bias that the base model lacks, so that "
            "nothing can merge the two: load the base model with the adapter beside it "
            '(bytetx.load(base, adapters={"name": folder}), and adapter="name" in calls)'
        )
    weights.change(lora.added, lora.replaced)


def read_lora(folder: Path, weights: Weights, spec: ModelSpec) -> Lora:
    """The adapter in a folder, by the names of `weights`, of the base model; reads headers only.

    It may add to biases of linear layers that have none.
    Raises CheckpointError for an adapter that is damaged or does not fit the weights.
    """
    low_ranks, biases, replaced = _read_lora(folder, spec)
    path, places = folder / _FILE, _places(spec)
    placed: dict[str, tuple[Change, ...]] = {}
    kept: dict[str, SavedTensor] = {}
    sizes: list[tuple[str, tuple[int, ...], range | None]] = []
    added: list[tuple[str, Change]] = []
    for name, tensor in replaced.items():
        place, rows = places.get(name, (name, None))
        if rows is not None and name.endswith(".bias"):
            added.append((name, BiasChange(tensor, replaces=True)))
            continue
        place = place if rows is None else name  # a part of a stacked weight is not replaced
        kept[place] = tensor
        sizes.append((place, tensor.shape, None))
    for name, change in (*added, *low_ranks.items(), *biases.items()):
        place, rows = places.get(name, (name, None))
        first_row = 0 if rows is None else rows.start
        placed[place] = (*placed.get(place, ()), replace(change, first_row=first_row))
        if place in weights or name not in biases:
            sizes.append((place, change.shape, rows))
    _check_sizes(path, sizes, weights, spec)
    return Lora(placed, kept)


def _check_sizes(
    path: Path,
    changes: Sequence[tuple[str, tuple[int, ...], range | None]],
    weights: Weights,
    spec: ModelSpec,
) -> None:
    """Raises CheckpointError where (tensor, shape, rows of a stack) does not fit the weights."""
    names = {name for name, _, _ in changes}
    if missing := sorted(name for name in names if name not in weights):
        raise CheckpointError(
            f"{path} changes {len(missing)} tensors that the base model lacks: "
            f"{', '.join(missing[:6])}; bytetx changes tensors of the same names only: {_MERGE}"
        )
    decoders = {head.decoder for head in spec.heads.values() if head.decoder is not None}
    if spec.tie_word_embeddings and (tied := sorted(decoders & names)):
        raise CheckpointError(
            f"{path} changes {tied[0]!r}, which is the embedding as well (tie_word_embeddings): "
            f"{_MERGE}"
        )
    for name, shape, rows in changes:
        wanted = weights.shape(name)
        if rows is not None:
            wanted = (len(rows), *wanted[1:])
        if wanted != shape:
            raise CheckpointError(
                f"{path} changes {name!r} by a tensor of shape {shape}, and the base model's has "
                f"shape {wanted}; the adapter is of another model, or its vocabulary "
                f"or labels were extended: {_MERGE}"
            )


def _places(spec: ModelSpec) -> dict[str, tuple[str, range | None]]:
    """Where the files have a weight or bias of transformers' class, by its name there: the tensor,
    and its rows in one that stacks several.  Only of families whose files name them otherwise."""
    modules = spec.family_table.get("modules")
    if modules is None or spec.layer_spec.qkv not in ("separate", "stacked"):
        return {}
    places: dict[str, tuple[str, range | None]] = {
        f"{module}.{part}": (f"{spec.embeddings[key]}.{part}", None)
        for key, module in modules.get("embeddings", {}).items()
        if key in spec.embeddings
        for part in ("weight", "bias")
    }
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows = {
        "q": range(q_rows),
        "k": range(q_rows, q_rows + kv_rows),
        "v": range(q_rows + kv_rows, q_rows + 2 * kv_rows),
    }
    for i in range(spec.num_layers):
        names = spec.layer_names(i)
        for key, module in modules["layer"].items():
            stacked = key in rows and "qkv" in names
            if stacked or key in names:
                stem, own = names["qkv" if stacked else key], rows[key] if stacked else None
                for part in ("weight", "bias"):
                    places[f"{module.replace('{i}', str(i))}.{part}"] = (f"{stem}.{part}", own)
    return places


def _read_lora(
    folder: Path, spec: ModelSpec
) -> tuple[dict[str, LowRank], dict[str, BiasChange], dict[str, SavedTensor]]:
    """(sums of weights, sums of biases, replaced tensors) of the adapter in a folder, by the names
    that it gives.

    Raises CheckpointError for an adapter that is damaged or cannot be merged into the weights.
    """
    config = _read_config(folder / ADAPTER_CONFIG)
    path = folder / _FILE
    if not path.is_file():
        raise CheckpointError(_no_tensors(folder))
    modules: dict[str, dict[str, SavedTensor]] = {}
    replaced: dict[str, SavedTensor] = {}
    bases: dict[str, SavedTensor] = {}  # beside factors
    for tensor in read_header(path):
        if not tensor.name.startswith(_WRAPPER):
            raise _unknown_tensor(path, tensor)
        name = tensor.name.removeprefix(_WRAPPER)
        ending = next((ending for ending in _ENDINGS if name.endswith(ending)), None)
        if ending is not None:
            modules.setdefault(name.removesuffix(ending), {})[_ENDINGS[ending]] = tensor
            continue
        if "lora_" in name or not name.endswith((".weight", ".bias")):
            raise _unknown_tensor(path, tensor)
        if _WRAPPED.search(name):
            continue
        plain = name.replace(".base_layer.", ".")
        found = replaced if plain == name else bases
        found[canonical_name(plain, spec.prefixes)] = tensor
    if not modules and not replaced and not bases:
        raise CheckpointError(f"{path} holds no tensors; save the adapter again")
    low_ranks, biases = {}, {}
    for module, tensors in modules.items():
        name = canonical_name(f"{module}.weight", spec.prefixes)
        if name in low_ranks or name in replaced:
            raise CheckpointError(f"{path} changes {name!r} twice; save the adapter again")
        is_conv1d = _is_conv1d(name, spec)
        low_ranks[name] = low_rank = _low_rank(path, module, tensors, config, is_conv1d=is_conv1d)
        if (bias := tensors.get("lora_B.bias")) is not None:
            bias_name = canonical_name(f"{module}.bias", spec.prefixes)
            biases[bias_name] = BiasChange(bias, low_rank.scaling)
    return low_ranks, biases, bases | replaced


def _read_config(path: Path) -> dict[str, Any]:
    """The keys that are not null."""
    config = {key: value for key, value in read_json(path, _CONFIG).items() if value is not None}
    kind = config.get("peft_type")
    if kind != "LORA":
        raise _not_merged(path, f"peft_type {kind!r}; bytetx merges LORA only")
    if config.get("bias") not in _BIASES:
        raise _not_merged(path, f"bias {config['bias']!r:.120}, which bytetx does not know")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_SUBTRACTED_STARTS):
        raise CheckpointError(
            f"{path} has init_lora_weights {start!r:.120}, which changes the base model, too: save "
            "it as a plain adapter (peft's save_pretrained(..., "
            f"path_initial_model_for_weight_conversion=...)), or {_MERGE}"
        )
    if start not in _PLAIN_STARTS:
        raise _not_merged(path, f"init_lora_weights {start!r}, which changes the base model, too")
    for key, value in config.items():
        if key not in _HARMLESS and key not in _CONFIG and value not in (False, {}, []):
            raise _not_merged(path, f"{key} {value!r:.120}, an option that bytetx does not know")
    return config


def _not_merged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} has {what}, so that the adapter cannot be merged here; {_MERGE}"
    )


def _no_tensors(folder: Path) -> str:
    if (folder / "adapter_model.bin").is_file():
        return (
            f"{folder} has its adapter in adapter_model.bin, a pickle file, which can run code "
            "when it is opened and is refused; if you trust it, load it with peft and save it "
            "again with save_pretrained, which writes safetensors"
        )
    return f"{folder} has no {_FILE}; give the folder that peft's save_pretrained wrote"


def _unknown_tensor(path: Path, tensor: SavedTensor) -> CheckpointError:
    return CheckpointError(
        f"{path}: tensor {tensor.name!r:.200} is none of a plain LoRA adapter ({_WRAPPER}... with "
        f".lora_A.weight and .lora_B.weight, or a whole weight), and cannot be merged "
        f"here; {_MERGE}"
    )


def _is_conv1d(name: str, spec: ModelSpec) -> bool:
    """Whether the weight is saved as [inputs, outputs], as all those of GPT-2's layers."""
    if spec.layer_spec.weight_layout != "conv1d":
        return False
    return any(name.startswith(stem.partition("{i}")[0]) for stem in spec.layer.values())


def _low_rank(
    path: Path,
    module: str,
    tensors: Mapping[str, SavedTensor],
    config: Mapping[str, Any],
    *,
    is_conv1d: bool,
) -> LowRank:
    """tensors: those of the module, as _ENDINGS names them."""
    targets = config.get("target_modules")
    if isinstance(targets, list) and not any(
        module == target or module.endswith(f".{target}") for target in targets
    ):
        raise CheckpointError(
            f"{path} changes the module {module!r:.200}, which is not in target_modules of "
            f"{ADAPTER_CONFIG}; the files are of two adapters, save one again"
        )
    is_embedding = any(key.startswith("lora_embedding") for key in tensors)
    names = ["lora_embedding_A", "lora_embedding_B"] if is_embedding else ["lora_A", "lora_B"]
    wanted = {*names}
    if config.get("use_dora"):
        wanted.add("lora_magnitude_vector")
    if config.get("lora_bias") and not is_embedding:
        wanted.add("lora_B.bias")
    if lacks := wanted - tensors.keys():
        raise CheckpointError(
            f"{path} lacks {min(lacks)} of {module!r:.200}; save the adapter again"
        )
    if more := tensors.keys() - wanted:
        raise CheckpointError(
            f"{path} has {min(more)} of {module!r:.200}, which {ADAPTER_CONFIG} does not speak of "
            "(use_dora, lora_bias); the files are of two adapters, save one again"
        )
    a, b = (tensors[name] for name in names)
    where = path.parent / ADAPTER_CONFIG
    rank = _of_pattern(where, "rank_pattern", config, module) or config.get("r") or 8
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise CheckpointError(
            f"{path}: the factors of {module!r:.200} have shapes {a.shape} and {b.shape}, "
            f"{ADAPTER_CONFIG} says rank {rank}: they must be [{rank}, inputs] and [outputs, "
            f"{rank}]; save the adapter again, or, if it is of a convolution, {_MERGE}"
        )
    for name in wanted.difference(names):
        if tensors[name].shape != b.shape[:1]:
            raise CheckpointError(
                f"{path}: {name} of {module!r:.200} has shape {tensors[name].shape}, and its "
                f"{names[1]} says {b.shape[:1]}; save the adapter again"
            )
    alpha = _of_pattern(where, "alpha_pattern", config, module)
    if alpha is None:
        alpha = config.get("lora_alpha", 8)
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    is_transposed = is_embedding or is_conv1d
    left, right = (a, b) if is_transposed else (b, a)
    magnitude = tensors.get("lora_magnitude_vector")
    return LowRank(left, right, scaling, is_transposed, magnitude=magnitude)


def _of_pattern(where: Path, key: str, config: Mapping[str, Any], module: str) -> float | None:
    """The value of the first pattern that a module's name, or its end behind a dot, matches."""
    patterns: Mapping[str, float] = config.get(key) or {}
    _check_patterns(where, key, patterns)
    found = (pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module))
    pattern = next(found, None)
    return None if pattern is None else patterns[pattern]


def _check_patterns(where: Path, key: str, patterns: Iterable[str]) -> None:
    """Raises CheckpointError for a regular expression that is none, or may take very long."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(
                f"{where}: {key} has the pattern {pattern!r:.120}, which is no regular "
                f"expression: {error}"
            ) from error
        if len(re.findall(r"[*+{]", pattern)) > 2 or re.search(r"\)[*+{]", pattern):
            raise CheckpointError(
                f"{where}: {key} has the pattern {pattern!r:.120}; bytetx takes patterns with at "
                "most two repetitions (*, + or {}), none of them of a group: write the modules' "
                f"names, or {_MERGE}"
            )
