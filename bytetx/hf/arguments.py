"""A forward call's arguments: bound to names, checked, and compared with what bytetx supports."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bytetx.errors import InputError

# transformers names the prefix sums and the longest length for queries and for keys.
PACKED_NAMES = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# transformers 5.24 calls the earlier keys and values a cache.
PAST_NAMES = ("past_key_values", "cache")
_READ = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "inputs_embeds",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    # No effect on hidden states; seq_idx says again what cu_seq_lens_q says.
    "use_cache",
    "num_items_in_batch",
    "seq_idx",
    *PACKED_NAMES,
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of one call, and the outputs that it requests.

    input_ids, position_ids, token_type_ids: int [num_rows, num_columns]; attention_mask: the same
    shape, or another that bytetx leaves; inputs_embeds: [num_rows, num_columns, embedding_size].
    cu_seqlens: int [batch_size + 1] where the one row holds packed sequences.
    past: a causal model's earlier keys and values.  use_cache: whether to return its own.
    """

    input_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    token_type_ids: torch.Tensor | None
    position_ids: torch.Tensor | None
    inputs_embeds: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    output_hidden_states: bool
    return_dict: bool
    past: Any = None
    use_cache: bool = False

    @property
    def main(self) -> torch.Tensor:
        """input_ids or inputs_embeds, whichever was given."""
        main = self.inputs_embeds if self.input_ids is None else self.input_ids
        assert main is not None  # has_tokens was asked
        return main


def bind(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name; names: those of the original forward's positional parameters.

    Raises TypeError for too many or doubled arguments.
    """
    if len(args) > len(names):
        raise TypeError(f"forward takes at most {len(names)} positional arguments, got {len(args)}")
    given = dict(zip(names, args, strict=False))
    doubled = given.keys() & kwargs.keys()
    if doubled:
        raise TypeError(f"forward got several values for {', '.join(sorted(doubled))}")
    return {**given, **kwargs}


def take_cu_seqlens(given: dict[str, Any]) -> torch.Tensor | None:
    """Removes the names of a packed call from `given`; the sequences' prefix sums, or None.

    Raises InputError where they contradict each other, or a padded mask is given beside them.
    """
    found = {name: given.pop(name, None) for name in PACKED_NAMES}
    sums: list[torch.Tensor] = [found[n] for n in PACKED_NAMES[:3] if found[n] is not None]
    if not sums:
        return None
    if not all(isinstance(s, torch.Tensor) for s in sums):
        raise InputError("cu_seqlens must be an integer tensor [batch_size + 1]")
    if any(s is not sums[0] and not torch.equal(s, sums[0]) for s in sums[1:]):
        raise InputError("cu_seq_lens_q and cu_seq_lens_k must be equal: an encoder attends itself")
    if given.get("attention_mask") is not None:
        raise InputError("attention_mask must be None beside cu_seqlens: packed rows have no pads")
    given.pop("seq_idx", None)
    return sums[0]


def with_row(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a packed call with [total_tokens] tensors as one row, [1, total_tokens]."""
    dims = {"input_ids": 1, "position_ids": 1, "token_type_ids": 1, "inputs_embeds": 2}
    rows = {
        name: tensor.unsqueeze(0)
        for name, dim in dims.items()
        if isinstance(tensor := given.get(name), torch.Tensor) and tensor.dim() == dim
    }
    return {**given, **rows}


def read_inputs(
    given: Mapping[str, Any], *, config: object, cu_seqlens: torch.Tensor | None
) -> Inputs:
    """The call's Inputs, with the config's defaults where an argument is not given."""

    return Inputs(
        input_ids=given.get("input_ids"),
        attention_mask=given.get("attention_mask"),
        token_type_ids=given.get("token_type_ids"),
        position_ids=given.get("position_ids"),
        inputs_embeds=given.get("inputs_embeds"),
        cu_seqlens=cu_seqlens,
        output_hidden_states=_choice(given, config, "output_hidden_states", False),
        return_dict=wants_dict(given, config),
        past=next((given[name] for name in PAST_NAMES if given.get(name) is not None), None),
        use_cache=_choice(given, config, "use_cache", False),
    )


def wants_dict(given: Mapping[str, Any], config: object) -> bool:
    """Whether the call's output is a ModelOutput, and no tuple."""
    return _choice(given, config, "return_dict", True)


def _choice(given: Mapping[str, Any], config: object, name: str, default: bool) -> bool:
    value = given.get(name)
    return bool(getattr(config, name, default) if value is None else value)


def reason_against(
    given: Mapping[str, Any], inputs: Inputs, config: object, *, also_read: Collection[str] = ()
) -> str | None:
    """Why this call's arguments need the original forward, or None.

    also_read: names that this model's forward reads beside those that every one does.
    """
    attentions = given.get("output_attentions")
    if getattr(config, "output_attentions", False) if attentions is None else attentions:
        return "output_attentions: bytetx never holds attention weights"
    scores = given.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if scores is None else scores:
        return "output_router_logits: bytetx does not keep the scores of experts"
    if not isinstance(given.get("output_hidden_states"), bool | None):
        return "output_hidden_states selects layers; pass True for all of them"
    for name, value in given.items():
        if (
            name not in _READ
            and name not in also_read
            and name != "output_attentions"
            and value is not None
            and value is not False
        ):
            return f"the argument {name} is not one that bytetx runs"
    mask = inputs.attention_mask
    if mask is not None and not isinstance(mask, torch.Tensor):
        return "attention_mask holds a mask for each kind of layer"
    positions = inputs.position_ids
    if isinstance(positions, torch.Tensor) and positions.dim() > 2:
        return "position_ids has positions on several axes"
    if mask is not None and mask.shape != inputs.main.shape[:2]:
        return f"attention_mask has {mask.dim()} dimensions or another shape than the input"
    return None


def has_tokens(inputs: Inputs) -> bool:
    """Whether there is exactly one of input_ids and inputs_embeds, of a shape with tokens.

    In other cases the original forward raises its error.
    """
    if (inputs.input_ids is None) == (inputs.inputs_embeds is None):
        return False
    dims = 2 if inputs.inputs_embeds is None else 3
    main = inputs.main
    return isinstance(main, torch.Tensor) and main.dim() == dims and main.numel() > 0
