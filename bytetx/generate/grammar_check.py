"""The process that reads one grammar of a caller and says what is wrong with it, within limits.

To read one may take time that grows exponentially with its length (a schema of many patterns that
all hold), and nothing within a process interrupts it.
"""

import json
import resource
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from bytetx.errors import InputError

# A schema of a hundred properties takes 12 ms, an enumeration of 50 000 texts 0.7 s.
SECONDS = 5.0
_START_SECONDS = 30.0  # an interpreter starts in 0.1 s, and later on a machine that is busy
_MAX_BYTES = 1 << 30  # addresses of the process; macOS does not enforce it
_RUN = (
    "import json, sys; sys.path += json.loads(sys.argv[1]); "
    "from bytetx.generate.grammar_check import main; main()"
)
MAX_LEXER_STATES = 50_000  # 1 to 2 kB each
# Else, where one text alone can follow, only the tokens of which a tokenizer makes it are allowed.
_NO_FORCING = '%llguidance {"no_forcing": true}'


class NotReadError(InputError):
    """The machine, not the grammar, is why it was not read: the next time it may be."""


class GrammarSource(NamedTuple):
    """A grammar as its caller wrote it.  kind: json, regex, choice or grammar.

    whitespace: a regex of the space between the tokens of JSON.
    begin: rules, as llguidance's Lark writes them, of what stands before it; None: nothing does.
    """

    kind: str
    text: str
    whitespace: str
    begin: str | None


def check_grammar(source: GrammarSource, *, seconds: float = SECONDS) -> str:
    """The grammar as llguidance reads it. InputError says what is wrong with it, or too much.

    NotReadError where the process could not be started, or had no time on a busy machine.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise InputError(
            "a grammar is read in a separate process, and this Python is part of another program "
            "(sys.executable) that cannot start one"
        )
    command = [sys.executable, "-I", "-S", "-c", _RUN, json.dumps(_search_path())]
    given = json.dumps({"source": source, "seconds": seconds})
    try:
        ended = subprocess.run(
            command,
            input=given.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_START_SECONDS + 2 * seconds,
            process_group=0,  # Ctrl-C on the terminal reaches the caller only
        )
    except subprocess.TimeoutExpired:
        raise NotReadError(str(_too_much(seconds))) from None
    except OSError as error:
        raise NotReadError(
            f"a grammar is read in a separate process, and {sys.executable} cannot be started: "
            f"{error}"
        ) from error
    if ended.returncode:
        raise _too_much(seconds)
    answer: dict[str, str] = json.loads(ended.stdout)
    if "error" in answer:
        raise InputError(answer["error"])
    return answer["grammar"]


def main() -> None:
    """Reads a source from stdin, and writes {"grammar": ...} or {"error": ...}."""
    given = json.load(sys.stdin)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
        used = resource.getrusage(resource.RUSAGE_SELF)
        most = ceil(used.ru_utime + used.ru_stime + given["seconds"])
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    try:
        grammar = _grammar(GrammarSource(*given["source"]))
        error = LLMatcher.validate_grammar(grammar, limits=limits)
    except Exception as raised:  # the converter of GBNF raises whatever Python does
        grammar, error = "", str(raised) or type(raised).__name__
    is_wrong = error and not error.startswith("WARNING")
    json.dump({"error": error} if is_wrong else {"grammar": grammar}, sys.stdout)


def _grammar(source: GrammarSource) -> str:
    """The grammar in llguidance's own format. ValueError where it is none."""
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    body: dict[str, Any]
    if source.kind == "json":
        schema = json.loads(source.text)
        if isinstance(schema, dict) or schema is True:
            options = {"whitespace_pattern": source.whitespace}
            schema = ({} if schema is True else schema) | {"x-guidance": options}
        body = {"json_schema": schema}
    elif source.kind == "regex":
        body = {"lark_grammar": f"start: /{regex_to_lark(source.text, use_ascii='d')}/"}
    elif source.kind == "choice":
        # Lark takes no other control character as it is.
        texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(source.text))
        choices = (text.replace("\x7f", r"\u007f") for text in texts)
        body = {"lark_grammar": f"start: {' | '.join(choices)}"}
    else:
        body = {"lark_grammar": any_to_lark(source.text)}
    rule = "start: @body" if source.begin is None else f"start: begin @body\n{source.begin}"
    first = {"lark_grammar": f"{_NO_FORCING}\n{rule}"}
    return json.dumps({"grammars": [first, {"name": "body"} | body]})


def _too_much(seconds: float) -> InputError:
    return InputError(
        f"it takes more than {seconds:g} s or {_MAX_BYTES >> 30} GiB to read; simplify it"
    )


def _search_path() -> list[str]:
    """The folders of the packages that the process imports, after the standard library."""
    found = [find_spec(name) for name in ("bytetx", "llguidance")]
    return [str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin]
