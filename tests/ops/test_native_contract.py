"""Python and the native core name the same fields: callers, structs and enums against csrc/."""

import ast
import inspect
import re
import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from paths import ROOT

from bytetx.ops import host, native, native_params
from bytetx.ops.decode_step import StepLayer
from bytetx.ops.linear import ACTIVATIONS
from bytetx.ops.native_params import StepBlockLayout
from bytetx.ops.pooling import POOLING_MODES

CSRC = ROOT / "csrc"
CPU = torch.device("cpu")


def load_contract() -> ModuleType:
    spec = spec_from_file_location("contract", CSRC / "contract.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


contract = load_contract()
STRUCTS = {s.name.rpartition("::")[2]: tuple(s.fields) for s in contract.read_structs()}
TUPLES = {
    **{
        name: tuple_type
        for name, tuple_type in vars(native_params).items()
        if hasattr(tuple_type, "_fields")
    },
    "DecodeStepLayer": StepLayer,
}


def operations(csrc: Path = CSRC) -> dict[str, tuple[str, ...]]:
    """The fields of each operation's Params."""
    text = "".join(path.read_text() for path in contract.headers(csrc))
    fields = {s.name.rpartition("::")[2]: tuple(s.fields) for s in contract.read_structs(csrc)}
    declared = re.findall(r"^void (\w+)\(const (\w+)& p, const Launch& launch\);", text, re.M)
    return {op: fields[params] for op, params in declared}


def signatures() -> dict[str, tuple[str, ...]]:
    """The names that the functions of the core take, as it says itself."""
    core = native._modules["cpu"]
    found = {}
    for op in operations():
        if hasattr(core, op):
            found[op] = tuple(inspect.signature(getattr(core, op)).parameters)
    return found


def calls() -> list[tuple[str, frozenset[str]]]:
    """(place, names) of every call in the package that gives `launch`."""
    found = []
    for path in sorted((ROOT / "bytetx").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                names = [k.arg for k in node.keywords]
                if "launch" in names:
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    assert not node.args and None not in names, f"{place} hides its names"
                    found.append((place, frozenset(map(str, names))))
    return found


def mismatches(csrc: Path) -> list[str]:
    """Operations whose fields in the headers are not those of the compiled core, in order."""
    expected = operations(csrc)
    return [op for op, names in signatures().items() if names != (*expected[op], "launch")]


def test_the_core_takes_the_fields_of_the_headers() -> None:
    assert len(signatures()) > 8
    assert mismatches(CSRC) == []


def test_functions_of_sizes_name_their_parameters_in_order() -> None:
    """Whoever binds such a function writes its names, which the headers say as well."""
    sources = [CSRC / "bindings.cpp", CSRC / "bindings_cuda.h"]
    text = "".join(p.read_text() for p in (*contract.headers(), *sources))
    text = re.sub(r"//[^\n]*", "", text)
    bound = re.findall(r"bind<&(\w+)>\(\s*m,\s*\"\w+\",\s*\{([^}]*)\}", text)
    assert len(bound) > 8
    for function, names in bound:
        declared = re.search(rf"^int(?:32|64)_t {function}\(([^)]*)\)", text, re.M)
        assert declared is not None, function
        parameters = [each.split()[-1] for each in declared[1].split(",")]
        assert re.findall(r"\w+", names) == parameters, function


def test_every_call_names_the_fields_of_an_operation() -> None:
    known = {frozenset((*fields, "launch")): op for op, fields in operations().items()}
    unknown = [place for place, names in calls() if names not in known]
    assert unknown == []
    called = {known[names] for _, names in calls()}
    left = {op for names, op in known.items() if op not in called}
    assert left == set(), "operations that nothing calls"


@pytest.mark.parametrize("name", TUPLES)
def test_tuples_have_the_fields_of_their_structs(name: str) -> None:
    assert TUPLES[name]._fields == STRUCTS[name]


def test_enums_have_the_numbers_of_the_headers() -> None:
    enums = contract.read_enums()
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    assert {name: native.DTYPE_CODES[dtype] for name, dtype in dtypes.items()} == enums["DType"]
    assert enums["Isa"] == {"automatic": 0, **native.ISA_BITS}
    assert dict(zip(ACTIVATIONS, range(len(ACTIVATIONS)), strict=True)) == enums["Activation"]
    assert dict(zip(POOLING_MODES, range(len(POOLING_MODES)), strict=True)) == enums["PoolMode"]


def test_two_swapped_fields_in_a_header_are_found(tmp_path: Path) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    header = csrc / "ops.h"
    pair = "    int32_t num_heads;\n    int32_t num_kv_heads;\n    int32_t head_dim;\n"
    swapped = "    int32_t num_kv_heads;\n    int32_t num_heads;\n    int32_t head_dim;\n"
    text = header.read_text()
    assert pair in text
    header.write_text(text.replace(pair, swapped, 1))
    assert mismatches(csrc) == ["varlen_attention"]


def rotary_arguments() -> dict[str, object]:
    return {
        "x": torch.ones(2, 2, 4),
        "cos": torch.zeros(3, 2),
        "sin": torch.ones(3, 2),
        "position_ids": torch.tensor([0, 2], dtype=torch.int32),
        "total_tokens": 2,
        "num_positions": 3,
        "num_heads": 2,
        "head_dim": 4,
        "num_pairs": 2,
        "is_interleaved": False,
        "x_stride": 8,
        "dtype": 0,
        "launch": native.launch_args(CPU),
    }


def test_the_order_of_names_does_not_matter() -> None:
    rotary = native.require_kernel("rotary", CPU)
    forwards, backwards = rotary_arguments(), rotary_arguments()
    rotary(**forwards)
    rotary(**dict(reversed(backwards.items())))
    x, y = forwards["x"], backwards["x"]
    assert isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    assert not torch.equal(x, torch.ones(2, 2, 4)) and torch.equal(x, y)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_heads": None}, "needs the argument num_heads"),
        ({"heads": 2}, "has no argument 'heads'"),
        ({"launch": (-1, 0, 1, 0)}, "NamedTuple of the fields device stream num_threads isa"),
        ({"total_tokens": torch.ones(2)}, "integer"),
        ({"x": "text"}, "data_ptr"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], said: str) -> None:
    arguments = rotary_arguments() | change
    given = {name: value for name, value in arguments.items() if value is not None}
    with pytest.raises((TypeError, AttributeError), match=said):
        native.require_kernel("rotary", CPU)(**given)


def test_arguments_without_names_are_refused() -> None:
    with pytest.raises(TypeError, match="by name, got 13"):
        native.require_kernel("rotary", CPU)(*rotary_arguments().values())


def test_a_tuple_with_two_swapped_fields_is_refused() -> None:
    class Swapped(NamedTuple):
        device: int
        stream: int
        isa: int
        num_threads: int

    right = native.launch_args(CPU)
    swapped = Swapped(right.device, right.stream, right.isa, right.num_threads)
    rotary = native.require_kernel("rotary", CPU)
    for launch, is_right in ((swapped, False), (right, True), (swapped, False)):
        arguments = rotary_arguments() | {"launch": launch}
        if is_right:
            rotary(**arguments)
        else:
            with pytest.raises(TypeError, match="got Swapped"):
                rotary(**arguments)


def test_failures_of_an_operation_keep_their_types() -> None:
    rotary = native.require_kernel("rotary", CPU)
    outside = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="position"):
        rotary(**rotary_arguments() | {"position_ids": outside})
    with pytest.raises(ValueError, match="dtype code"):
        rotary(**rotary_arguments() | {"dtype": 7})
    with pytest.raises(ValueError, match="does not fit"):
        rotary(**rotary_arguments() | {"num_heads": 1 << 40})


def test_a_layout_in_another_order_is_refused() -> None:
    class Swapped(NamedTuple):
        cu_seqlens: int
        input_ids: int

    write = host.write_step_block()
    assert write is not None
    block = np.zeros(8, dtype=np.int32)
    ids = np.zeros(1, dtype=np.int32)
    with pytest.raises(TypeError, match=" ".join(StepBlockLayout._fields)):
        write(Swapped(0, 1), block, ids, ids, None, None)
