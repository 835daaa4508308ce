"""The options of the commands are those of the declared tasks, with the same defaults."""

import pytest
import typer.main

from bytetx.cli.commands import all_commands
from bytetx.cli.files.options import JobOptions
from bytetx.sampling_params import SamplingParams
from bytetx.tasks.catalog import declared_task

COMMANDS = ("embed", "embed_sparse", "embed_tokens", "classify", "tag", "answer", "fill_mask")
COMMANDS += ("score", "decide", "rerank", "generate")
# The query and its file are inputs, and so are sampling parameters; some options are load's, and
# the forms of answers make structured_outputs.
FORMS = {"json_schema", "regex", "choice"}
INPUTS = {
    "rerank": {"query", "query_file"},
    "decide": {"calibrate", "reliability"},
    "generate": {
        "generation_config",
        "kv_cache_dtype",
        *FORMS,
        *SamplingParams.__dataclass_fields__,
    },
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_options_of_its_task(name: str) -> None:
    group = typer.main.get_command(all_commands())
    command = group.commands[name.replace("_", "-")]  # type: ignore[attr-defined]
    common = set(JobOptions.__dataclass_fields__) | INPUTS.get(name, set())
    own = {one.name: one.default for one in command.params if one.name not in common | {"help"}}
    declared = {option: entry.default for option, entry in declared_task(name).fields.items()}
    assert own.keys() <= declared.keys()
    assert own == {option: declared[option] for option in own}
