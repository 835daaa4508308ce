"""config.json read by a family's key names, with the family's defaults; every value is checked."""

from collections.abc import Mapping
from typing import Any

from bytetx.errors import CheckpointError

# Hugging Face's activation names, and the function that each one means.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}

# Products of two sizes fit 64 bits; beyond it a config is damaged, not large.
_MAX_SIZE = (1 << 31) - 1


class Values:
    """One config.json; names are bytetx's own, as the family's [config] section lists them."""

    def __init__(self, config: Mapping[str, Any], table: Mapping[str, Any]):
        aliases = table.get("aliases", {})
        # A file may have both, the older name with a default's value: the newer one is taken.
        own = {aliases.get(key, key): value for key, value in config.items() if key in aliases}
        self.config = {**config, **own}
        self.names, self.defaults = table["config"], table["defaults"]
        self.architecture = table["architecture"]

    def size(self, name: str, default: int | None = None) -> int:
        """A size by bytetx's name for it; `default` where the family has no such size."""
        if name not in self.names and default is not None:
            return default
        key = self.names[name]
        return key if isinstance(key, int) else self.common_size(key)

    def size_or_none(self, name: str) -> int | None:
        """A size that the family may lack and that config.json may leave out or set to null."""
        key = self.names.get(name)
        if key is None or (isinstance(key, str) and self.read(key) is None):
            return None
        return self.size(name)

    def layer_windows(self) -> list[int] | None:
        """The window of each layer, 0 for none, where config.json lists them."""
        key = self.names.get("layer_windows")
        found = self.read(key) if isinstance(key, str) else None
        if found is None:
            return None
        count = self.size("num_layers")
        given = found if isinstance(found, list) else []
        windows = [size for size in given if type(size) is int and size >= 0]
        if len(given) != count or len(windows) != count:
            raise CheckpointError(
                f"config.json: {key} must list {count} windows, integers from 0, got "
                f"{str(found)[:200]}"
            )
        if len(set(windows) - {0}) > 1:
            raise CheckpointError(
                f"config.json: {key} lists windows of several sizes, which is not supported: "
                f"{str(found)[:200]}"
            )
        return windows

    def integer(self, key: str) -> int:
        """Any integer by its key in config.json."""
        value = self.read(key)
        if type(value) is not int or abs(value) > _MAX_SIZE:
            raise CheckpointError(f"config.json: {key} must be an integer, got {value!r:.120}")
        return value

    def common_size(self, key: str) -> int:
        """A size by its key in config.json."""
        value = self.read(key)
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            raise CheckpointError(
                f"config.json: {key} must be an integer from 1 to {_MAX_SIZE}, got {value!r:.120}"
            )
        return value

    def switch(self, name: str, default: bool) -> bool:
        """A truth value by bytetx's name for it; `default` where the family has no such choice."""
        if name not in self.names:
            return default
        return self.flag(self.names[name])

    def flag(self, key: str) -> bool:
        """A truth value by its key in config.json; where that is null, its default."""
        value = self.config.get(key)
        if value is None:
            value = self.defaults.get(key)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {key} must be true or false, got {value!r}")
        return value

    def number(self, name: str) -> float:
        """A positive number by bytetx's name for it; the family may have it fixed."""
        key = self.names[name]
        value = self.read(key) if isinstance(key, str) else key
        return positive_number(key, value)

    def positive(self, key: str) -> float:
        """A positive number by its key in config.json."""
        return positive_number(key, self.read(key))

    def head_sizes(self) -> tuple[int, int, int]:
        """(hidden_size, num_heads, head_dim)"""
        hidden_size, num_heads = self.size("hidden_size"), self.size("num_heads")
        head_dim = self.size_or_none("head_dim")
        if head_dim is not None:
            return hidden_size, num_heads, head_dim
        if hidden_size % num_heads:
            raise CheckpointError(
                f"config.json: {self.names['hidden_size']} {hidden_size} is no multiple of "
                f"{self.names['num_heads']} {num_heads}"
            )
        return hidden_size, num_heads, hidden_size // num_heads

    def num_token_types(self) -> int:
        """0 where the family, or the checkpoint, has no token types."""
        if "num_token_types" not in self.names or self.read(self.names["num_token_types"]) == 0:
            return 0
        return self.size("num_token_types")

    def num_kv_heads(self, num_heads: int) -> int:
        """Heads of keys and values, each of which serves as many query heads."""
        num_kv_heads = self.size_or_none("num_kv_heads") or num_heads
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"config.json: {self.names['num_heads']} {num_heads} is no multiple of "
                f"{self.names['num_kv_heads']} {num_kv_heads}"
            )
        return num_kv_heads

    def intermediate_size(self, hidden_size: int) -> int:
        multiple: int | None = self.architecture.get("intermediate_multiple")
        size = self.size_or_none("intermediate_size")
        if size is None and multiple is not None:
            return multiple * hidden_size
        return self.size("intermediate_size")

    def embedding_size(self, hidden_size: int) -> int:
        if "embedding_size" in self.names and self.names["embedding_size"] in self.defaults:
            return self.size("embedding_size")
        return self.size_or_none("embedding_size") or hidden_size

    def max_positions(self, offset: int) -> int:
        """Usable positions: the table's rows less those before a sequence's first token; a number
        of the family's where nothing in the model limits them."""
        limit = self.names["max_position_embeddings"]
        if isinstance(limit, int):
            return limit
        rows = self.size("max_position_embeddings")
        if rows <= offset:
            raise CheckpointError(
                f"config.json: {self.names['max_position_embeddings']} {rows} leaves no usable "
                f"position, the family's first one is {offset}"
            )
        return rows - offset

    def bias_rows(self, buckets: int) -> int:
        rows = self.size("relative_bias_rows", default=0)
        if rows < buckets:
            raise CheckpointError(
                f"config.json: {self.names['relative_bias_rows']} is {rows}, but this family's "
                f"distances fall into {buckets} buckets whatever it says; at least {buckets} "
                "are needed"
            )
        return rows

    def is_gated(self) -> bool:
        """False where config.json says that the feed-forward of this family has no gate."""
        key = self.names.get("gated_activation")
        return key is None or str(self.read(key)).startswith("gated-")

    @property
    def activation_key(self) -> str:
        """The key of config.json that names the activation of the feed-forward layers."""
        key: str = self.names.get("gated_activation") or self.names["activation"]
        return key

    def activation_name(self, key: str) -> Any:
        """transformers' name of the activation that this key of config.json gives."""
        name = self.read(key)
        if key == self.names.get("gated_activation") and isinstance(name, str):
            # transformers reads T5's "gated-gelu" so.
            return "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
        return name

    def activation(self, key: str | None = None) -> str:
        """key: of config.json; None: of the feed-forward layers."""
        key = key or self.activation_key
        name = self.activation_name(key)
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise CheckpointError(
                f"config.json: {key} {name!r} is not supported; known: {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]

    def norm_eps(self) -> float:
        key = self.names["norm_eps"]
        value = self.read(key) if isinstance(key, str) else key
        if not isinstance(value, float) or not 0 < value <= 1:
            raise CheckpointError(
                f"config.json: {key} must be above 0 and at most 1, got {value!r}"
            )
        return float(value)

    def pad_token_id(self) -> int:
        """The pad token, where positions or padded inputs ask for it; decoders never do."""
        value = self.read("pad_token_id")
        if value is None or (value == -1 and self.architecture.get("causal")):
            value = self.defaults["pad_token_id"]
        if type(value) is not int or value < 0:
            raise CheckpointError(
                f"config.json: pad_token_id must be an integer from 0, got {value!r}"
            )
        return value

    def read(self, key: str) -> Any:
        if key in self.config:
            return self.config[key]
        return self.defaults.get(key)


def positive_number(key: object, value: object) -> float:
    """A finite number above 0 (true and false are none); CheckpointError names the key."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
        raise CheckpointError(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)
