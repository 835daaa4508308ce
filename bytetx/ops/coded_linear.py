"""Weights of 8 or 4 bits in groups of 32 features, on a CPU or on a GPU."""

from typing import TypeAlias

from bytetx.ops.grouped_blocks import GroupedBlocks, prepare_grouped_blocks
from bytetx.ops.grouped_linear import GroupedWeight, prepare_grouped_linear
from bytetx.ops.linear import LinearWeight

CodedWeight: TypeAlias = GroupedWeight | GroupedBlocks


def prepare_coded_linear(plain: LinearWeight, *, bits: int) -> CodedWeight:
    """A plain weight rounded to 8 or 4 bits, laid out for the device that it is on.

    f32 or bf16 on a CPU, f16 or bf16 on a GPU.  Raises ValueError for another weight.
    """
    prepare = prepare_grouped_blocks if plain.weight.is_cuda else prepare_grouped_linear
    return prepare(plain, bits=bits)
