"""Decision requests to prompts: one state, typed questions, and where each answer is read.

The format, the default prompt and the marks are those of transformers' decision pipeline.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from string import ascii_uppercase
from typing import Any

import numpy as np

from bytetx.checkpoint.chat_template import ChatTemplate, PreparedChat
from bytetx.checkpoint.control_tokens import ChatEncoder, mark_control_tokens
from bytetx.checkpoint.decision_files import KINDS, DecisionConfig
from bytetx.checkpoint.side_files import is_deeper
from bytetx.checkpoint.tokenizer import Tokens, flatten_int_lists
from bytetx.encode.request import Alignment, Failure, Requests, Window
from bytetx.errors import CheckpointError, InputError, TooLongError, shown
from bytetx.requests.inputs import InputReader, no_requests
from bytetx.requests.token_ids import Errors

# Where the answer of a question is read, and where the encoding is divided: no part of the prompt.
MARK, SPLIT = "<|mark|>", "<|split|>"
_MAX_DEPTH = 128  # levels of a request; of JSON that people write, some 10
_CRITERIA = {"noul": Mapping, "choice": Mapping, "score": list}
_EXAMPLES = {
    "noul": '{"type": "noul", "instructions": "Is it spam?"}, with criteria "true" and "false" or '
    "without",
    "choice": '{"type": "choice", "instructions": "Which tone?", "criteria": {"calm": "polite", '
    '"angry": null}}',
    "score": '{"type": "score", "instructions": "How urgent?", "criteria": ["can wait", "today"]}',
}


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a state.

    type: noul, choice or score.  options: by name, in the order in which the template gets them.
    labels, descriptions: one for each option.
    num_orders: prompts that ask it, each with its options in another order.
    """

    name: str
    type: str
    instructions: Any
    options: Sequence[str]
    labels: Sequence[str]
    descriptions: Sequence[Any]
    num_orders: int = 1

    def rotated(self, count: int) -> "Question":
        """The same question whose options begin with another one; labels keep their places."""
        if not count:
            return self
        options = [*self.options[count:], *self.options[:count]]
        descriptions = [*self.descriptions[count:], *self.descriptions[:count]]
        return replace(self, options=options, descriptions=descriptions)

    def variables(self) -> dict[str, Any]:
        """The question as templates read it."""
        given = asdict(self)
        del given["num_orders"]
        return {key: list(v) if isinstance(v, tuple) else v for key, v in given.items()}


def read_questions(given: object, config: DecisionConfig) -> list[Question]:
    """The questions of a request in its order. Raises InputError that names every bad one."""
    if not isinstance(given, Mapping) or not given:
        raise InputError(
            f"questions must be a table of questions by name, at least one, got {shown(given)}"
        )
    questions: list[Question] = []
    faults: list[str] = []
    for name, question in given.items():
        try:
            questions.append(_read_question(name, question, config))
        except InputError as error:
            faults.append(f"question {shown(name)} {error}")
    if faults:
        raise InputError("; ".join(faults))
    return questions


def _read_question(name: str, given: object, config: DecisionConfig) -> Question:
    if not isinstance(given, Mapping):
        raise InputError(f"must be a table, got {shown(given)}")
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"has a type that must be one of {', '.join(KINDS)}, got {shown(kind)}")
    fault = _fault_of(kind, given)
    if fault is not None:
        raise InputError(f"{fault}; a {kind} question is {_EXAMPLES[kind]}")
    criteria = given.get("criteria") or {}
    if kind == "noul":
        described = {option: criteria.get(option) for option in config.noul_options}
    elif kind == "score":
        described = {str(level): text for level, text in enumerate(criteria)}
    else:
        described = dict(criteria)
    labels = config.labels_of(kind)
    if len(labels) < len(described):
        raise InputError(
            f"has {len(described)} options, and this model reads at most {len(labels)} of a {kind} "
            f"question (labels.{kind} in decision.json); ask about fewer"
        )
    return Question(
        name,
        kind,
        given.get("instructions"),
        list(described),
        list(labels[: len(described)]),
        list(described.values()),
    )


def _fault_of(kind: str, given: Mapping[str, Any]) -> str | None:
    """Why a question has not the form of its type, or None."""
    unknown = [key for key in given if key not in ("type", "instructions", "criteria")]
    if unknown:
        return f"has {shown(unknown[0])}, which is not known"
    instructions, criteria = given.get("instructions"), given.get("criteria")
    if not _is_content(instructions) and instructions is not None:
        return f"has instructions that must be text, a table or a list, got {shown(instructions)}"
    if kind == "noul" and criteria is None:
        return None
    if not isinstance(criteria, _CRITERIA[kind]):
        wanted = "a list of levels" if kind == "score" else "a table of descriptions by option"
        return f"needs criteria, {wanted}, got {shown(criteria)}"
    if kind == "score":
        bad = [level for level in criteria if not _is_content(level)]
        if bad:
            return f"has a level that must be text, a table or a list, got {shown(bad[0])}"
    else:
        if not all(isinstance(option, str) for option in criteria):
            return "has an option whose name is no text"
        bad = [text for text in criteria.values() if text is not None and not _is_content(text)]
        if bad:
            return f"has a description that must be text, a table or a list, got {shown(bad[0])}"
    if kind == "noul" and set(criteria) - {"true", "false"}:
        return f'has criteria beside "true" and "false": {shown(list(criteria))}'
    if kind != "noul" and not criteria:
        return "needs criteria with its options"
    return None


def _is_content(value: object) -> bool:
    return isinstance(value, str | dict | list)


def default_prompt(state: Any, question: Question) -> str:
    """The message of a chat that asks one question, for models without a template of their own."""
    lines = [_as_text(question.instructions)]
    entries = zip(question.options, question.labels, question.descriptions, strict=True)
    for option, label, description in entries:
        text = _as_text(description)
        if question.type == "choice":
            lines.append(f"{label}. {option}: {text}" if text else f"{label}. {option}")
        elif question.type == "score":
            lines.append(f"{label}. {text}")
        else:
            says_itself = list(question.labels) == ["Yes", "No"]
            text = text or ("" if says_itself else option)
            lines.append(f"{label}: {text}" if text else "")
    lines = [line for line in lines if line]
    first, last = question.labels[0], question.labels[-1]
    if question.type == "noul":
        closing = f"Answer {first} or {question.labels[1]} only."
    else:
        letters = list(ascii_uppercase[: len(question.labels)])
        kind = "letter" if list(question.labels) == letters else "label"
        thing = "option" if question.type == "choice" else "level"
        closing = f"Answer with the {kind} of the {thing} that fits best ({first} to {last}) only."
    return f"{_as_text(state)}\n\n" + "\n".join(lines) + f"\n{closing}"


def _as_text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptQuestions(Alignment):
    """The questions of a prompt: `marks` has the tokens before each answer."""

    marks: Sequence[int]
    questions: Sequence[Question]


@dataclass(slots=True)
class _Prompt:
    index: int
    number: int
    chat: PreparedChat
    questions: Sequence[Question]
    text: str = ""


class DecisionPrompts:
    """Makes the prompts of requests for one checkpoint. Threads may share one.

    config: the checkpoint's decision files.  template: its own, or None.
    chat_template: which the default prompt is put into.
    encoder: with MARK and SPLIT as its sentinels.
    """

    def __init__(
        self,
        config: DecisionConfig,
        template: ChatTemplate | None,
        chat_template: ChatTemplate | None,
        encoder: ChatEncoder,
    ):
        self.config, self.encoder = config, encoder
        self._template, self._chat_template = template, chat_template

    def read(self, given: object, *, averages: bool) -> tuple[Any, list[Question]]:
        """(state, questions) of a request, or of its JSON.

        averages: a choice question is asked with each option first.
        Raises InputError where the request has not its form.
        """
        request = self._as_table(given)
        if request.get("assets"):
            raise InputError(
                f"has assets {shown(list(request['assets']))}: images, which bytetx's models do "
                "not read; leave them out"
            )
        if is_deeper(dict(request), _MAX_DEPTH):
            raise InputError(f"nests deeper than {_MAX_DEPTH} levels, or holds itself")
        if not self.config.sanitize_control_tokens:
            request = _without_sentinels(request)
        questions = read_questions(request["questions"], self.config)
        if averages:
            questions = [
                replace(question, num_orders=len(question.options))
                if question.type == "choice"
                else question
                for question in questions
            ]
        return request["state"], questions

    def _as_table(self, given: object) -> Mapping[str, Any]:
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError) as error:
                raise InputError(f"is no JSON: {error}") from None
        if not isinstance(given, Mapping) or not {"state", "questions"} <= given.keys():
            raise InputError(
                'must be {"state": ..., "questions": {name: question, ...}}, as a dict or its '
                f"JSON, got {shown(given)}"
            )
        return given

    def groups(self, questions: Sequence[Question]) -> Iterator[list[Question]]:
        """The questions of each prompt: all of them where the template reads them together."""
        one_each = [[question] for question in questions]
        for group in [list(questions)] if self._reads_all else one_each:
            for count in range(max(question.num_orders for question in group)):
                yield [question.rotated(count % question.num_orders) for question in group]

    @cached_property
    def _reads_all(self) -> bool:
        template = self._template
        return template is not None and "questions" in template.facts().variables

    @cached_property
    def _source(self) -> ChatTemplate:
        """The template that is rendered. InputError where the checkpoint has none at all."""
        template = self._template or self._chat_template
        if template is None:
            raise InputError(
                "this checkpoint has no chat template, which its prompts are put into; add "
                "chat_template.jinja, or decision_template.jinja"
            )
        return template.default

    @cached_property
    def _control_tokens(self) -> Any:
        return self.encoder.control_tokens(self._source.facts().literals)

    def render(self, state: Any, questions: Sequence[Question]) -> str:
        """The text of one prompt, with MARK and SPLIT where the template writes them."""
        (text,) = self.render_all(iter([self.prepared(state, questions)]))
        if isinstance(text, InputError):
            raise text
        return text

    def render_all(self, prompts: Iterator[PreparedChat]) -> list[str | InputError]:
        """The texts of prompts, or the error of each that the template refuses."""
        first = next(prompts, None)
        return [] if first is None else self._source.render_all(chain([first], prompts))

    def prepared(self, state: Any, questions: Sequence[Question]) -> PreparedChat:
        """A prompt for `render_all`."""
        if self._template is None:
            content = default_prompt(state, questions[0])
            if self.config.sanitize_control_tokens:
                content = mark_control_tokens(content, self._control_tokens)
            return self._usual.with_messages([{"role": "user", "content": content}])
        asked = [question.variables() for question in questions]
        variables: Any = {"state": state, "question": asked[0], "questions": asked}
        if self.config.sanitize_control_tokens:
            variables = mark_control_tokens(variables, self._control_tokens)
        messages = [{"role": "user", "content": ""}]
        return self._source.prepared(messages, {"enable_thinking": False, **variables})

    @cached_property
    def _usual(self) -> PreparedChat:
        """A chat of one text, whose options are those of every default prompt."""
        messages = [{"role": "user", "content": ""}]
        return self._source.prepared(messages, {"enable_thinking": False})


def _without_sentinels(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The request whose texts and keys write neither MARK nor SPLIT."""
    kept = {key: value for key, value in request.items() if key != "assets"}
    try:
        text = json.dumps(kept, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"has no form in JSON: {error}") from None
    found: Mapping[str, Any] = json.loads(text.replace(MARK, "").replace(SPLIT, ""))
    return found


@dataclass(slots=True)
class DecisionReader(InputReader):
    """Turns decision requests into rows, one for each prompt.

    maker: what makes the prompts.  averages: as of DecisionPrompts.read.
    check: raises InputError for a question that the model cannot score.
    name: of the requests, for errors.  parts: what makes their prompts long, for the same.
    """

    maker: DecisionPrompts = field(kw_only=True, repr=False)
    averages: bool = False
    check: Callable[[Question], object] = repr
    name: str = "requests"
    parts: str = "its state"

    def estimate_tokens(self, item: Any) -> int:
        if isinstance(item, str):  # each question names its type
            return self._tokens_of(max(item.count('"type"'), 1) * len(item))
        questions = item.get("questions") if isinstance(item, Mapping) else None
        count = len(questions) if isinstance(questions, Mapping) else 1
        own = _num_characters(questions)
        return self._tokens_of(max(count, 1) * (_num_characters(item) - own) + own)

    def estimate_work(self, item: Any, before: Any) -> int:
        """Questions have their state in common."""
        return self._tokens_of(_num_characters(item))

    def _tokens_of(self, num_characters: int) -> int:
        return int(num_characters * self._tokens_per_character) + 1

    def read(self, inputs: Sequence[object], start: int) -> Window:
        errors: Errors = {}
        prompts = self._rendered(inputs, start, errors)
        requests = self._rows(prompts, errors)
        if start == 0:
            self._learn_density([prompt.text for prompt in prompts], requests.total_tokens)
        if not errors:
            return Window(start, len(inputs), requests)
        if not self.keeps_errors:
            raise errors.pop(min(errors))
        requests = requests.take(np.flatnonzero(~np.isin(requests.indices, list(errors))))
        failures = [Failure(index, errors[index]) for index in sorted(errors)]
        return Window(start, len(inputs), requests, failures)

    def _named(self, index: int, error: Exception) -> InputError:
        """The error of a request, named by its place among the others."""
        kind = type(error) if isinstance(error, InputError) else InputError
        text = "nests too deep" if isinstance(error, RecursionError) else str(error)
        return kind(f"{self.name}[{index}] {text}").with_traceback(None)

    def _rendered(self, inputs: Sequence[object], start: int, errors: Errors) -> list[_Prompt]:
        """The prompts of requests, with their texts; those of a bad request are left out."""
        prompts: list[_Prompt] = []

        def chats() -> Iterator[PreparedChat]:
            for index, item in enumerate(inputs, start):
                try:
                    found = self._prompts_of(index, item)
                except CheckpointError:
                    raise  # the template's own fault is that of every request
                except (TypeError, ValueError, RecursionError) as error:
                    errors[index] = self._named(index, error)
                    continue
                prompts.extend(found)
                yield from (prompt.chat for prompt in found)

        texts = self.maker.render_all(chats())
        for prompt, text in zip(prompts, texts, strict=True):
            if isinstance(text, InputError):
                errors.setdefault(prompt.index, self._named(prompt.index, text))
            else:
                prompt.text = text
        return [prompt for prompt in prompts if prompt.index not in errors]

    def _prompts_of(self, index: int, item: object) -> list[_Prompt]:
        state, questions = self.maker.read(item, averages=self.averages)
        for question in questions:
            try:
                self.check(question)
            except InputError as error:
                raise InputError(f"question {shown(question.name)} {error}") from None
        return [
            _Prompt(index, number, self.maker.prepared(state, group), group)
            for number, group in enumerate(self.maker.groups(questions))
        ]

    def _rows(self, prompts: Sequence[_Prompt], errors: Errors) -> Requests:
        """A row for each prompt; those of requests in `errors` are to be dropped."""
        if not prompts:
            return no_requests()
        rows, marks = self._divided(self._encoded(prompts, errors))
        for prompt, seqlen, places in zip(prompts, rows.seqlens.tolist(), marks, strict=True):
            if len(places) < len(prompt.questions) or not seqlen:
                error = InputError(
                    f"{self.name}[{prompt.index}] makes a prompt of {seqlen} tokens with "
                    f"{len(places)} marks for {len(prompt.questions)} questions; the checkpoint's "
                    "decision_template.jinja has to write one for each"
                )
                errors.setdefault(prompt.index, error)
        requests = Requests(
            np.array([prompt.index for prompt in prompts], dtype=np.int64),
            rows.seqlens,
            rows.token_ids,
            rows.is_truncated,
            alignments=[
                PromptQuestions(None, None, None, [], marks=places, questions=prompt.questions)
                for prompt, places in zip(prompts, marks, strict=True)
            ],
            chunks=np.array([prompt.number for prompt in prompts], dtype=np.int32),
        )
        self._check_sizes(requests, errors)
        self.check_range(requests, errors)
        return requests

    def _encoded(self, prompts: Sequence[_Prompt], errors: Errors) -> list[list[int]]:
        """The ids of each prompt; of all at once, unless one of them is bad."""
        encoder = self.maker.encoder
        try:
            return encoder.encode([prompt.text for prompt in prompts])
        except InputError:
            pass
        found: list[list[int]] = []
        for prompt in prompts:
            try:
                found += encoder.encode([prompt.text])
            except InputError as error:
                errors[prompt.index] = self._named(prompt.index, error)
                found.append([])
        return found

    def _divided(self, encoded: Sequence[list[int]]) -> tuple[Tokens, list[list[int]]]:
        """(the prompts' own ids, marks): how many of them are before each MARK of a prompt, or
        before its end where there is none."""
        mark, split = self.maker.encoder.sentinel_ids
        bounds = np.cumsum([0, *map(len, encoded)])
        ids = flatten_int_lists(encoded, total=int(bounds[-1]))
        assert ids is not None  # the tokenizer checked them when it was loaded
        is_mark = ids == mark
        is_own = ~(is_mark | (ids == split))
        if is_own.all():
            lengths = np.diff(bounds).astype(np.int32)
            tokens = Tokens(ids, lengths, np.zeros(len(encoded), dtype=bool))
            return tokens, [[length] for length in lengths.tolist()]
        num_before = np.append(0, np.cumsum(is_own))  # own ids before each place
        seqlens = np.diff(num_before[bounds]).astype(np.int32)
        places = np.flatnonzero(is_mark)
        cuts = np.searchsorted(places, bounds).tolist()
        marks: list[list[int]] = []
        for row, (start, seqlen) in enumerate(zip(bounds.tolist(), seqlens.tolist(), strict=False)):
            before = num_before[places[cuts[row] : cuts[row + 1]]] - num_before[start]
            # Nothing stands before a mark at the start: transformers reads the last token then.
            marks.append([place or seqlen for place in before.tolist()] or [seqlen])
        return Tokens(ids[is_own], seqlens, np.zeros(len(encoded), dtype=bool)), marks

    def _check_sizes(self, requests: Requests, errors: Errors) -> None:
        """Finds prompts that are longer than the model, and requests with too many of them."""
        limit = self.spec.max_positions if self.tokenizer is None else self.tokenizer.max_tokens
        sizes = np.bincount(requests.indices - requests.indices[0], requests.seqlens)
        for row in np.flatnonzero(requests.seqlens > limit).tolist():
            index = int(requests.indices[row])
            errors[index] = TooLongError(
                f"{self.name}[{index}] makes a prompt of {requests.seqlens[row]} tokens, the model "
                f"takes {limit}; shorten {self.parts}"
            )
        most = self.max_chunk_tokens
        if most is None:
            return
        for place in np.flatnonzero(sizes > most).tolist():
            index = int(requests.indices[0]) + place
            errors[index] = TooLongError(
                f"{self.name}[{index}] makes prompts of {int(sizes[place])} tokens together, the "
                f"most is {most}; ask fewer questions at a time"
            )


def _num_characters(value: object) -> int:
    """About the characters of a request; its own texts are counted, whatever holds them."""
    waiting, count, most = [value], 0, 1 << 20
    while waiting and most:
        one = waiting.pop()
        most -= 1
        if isinstance(one, str):
            count += len(one)
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
        else:
            count += 4
    return count
