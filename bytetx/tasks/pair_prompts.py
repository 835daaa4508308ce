"""A query and its documents as prompts of a causal model that scores pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from bytetx.checkpoint.chat_template import ChatTemplate
from bytetx.checkpoint.logit_score import LogitScoreSpec
from bytetx.checkpoint.tokenizer import Tokenizer
from bytetx.errors import InputError, TooLongError

# The prompt that the models were trained with.  Source: the model card of Qwen3-Reranker.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Texts that a template is tried with; the last tokens they have in common are the template's.
_FILLERS = ("0", "1 2 3 4")


@dataclass(frozen=True, slots=True)
class PairPrompts:
    """The input of the model for each document, or why there is none.

    num_truncated: prompts that were cut already.
    """

    prompts: Sequence[list[int] | tuple[str, str] | TooLongError]
    num_truncated: int = 0


def yes_no_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """(id of "yes", id of "no"). InputError where one of them is no token."""
    found = [tokenizer.backend.token_to_id(word) for word in ("yes", "no")]
    if found[0] is None or found[1] is None:
        raise InputError(
            'this checkpoint\'s tokenizer has no tokens "yes" and "no", by which a causal model '
            "reranks; load a cross-encoder or a Qwen3-Reranker"
        )
    return found[0], found[1]


def yes_no_prompts(
    tokenizer: Tokenizer,
    query: str,
    documents: Sequence[str],
    *,
    instruction: str | None,
    truncate: bool,
) -> PairPrompts:
    """The token ids of each document's prompt.

    truncate: cut the document of a prompt that is too long.
    """
    unlimited = tokenizer.untruncated()
    before, after = (unlimited.encode_plain(text).ids for text in (_BEFORE, _AFTER))
    head = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: "
    room = tokenizer.max_tokens - len(before) - len(after)
    prompts: list[list[int] | TooLongError] = []
    num_truncated = 0
    for index, document in enumerate(documents):
        body = unlimited.encode_plain(head + document).ids
        if len(body) > room and not truncate:
            num_tokens = len(before) + len(body) + len(after)
            prompts.append(_too_long(index, num_tokens, tokenizer.max_tokens))
        else:
            num_truncated += len(body) > room
            prompts.append([*before, *body[:room], *after])
    return PairPrompts(prompts, num_truncated)


def chat_prompts(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    spec: LogitScoreSpec,
    query: str,
    documents: Sequence[str],
    *,
    prompt: str,
    truncate: bool,
) -> PairPrompts:
    """The token ids of each document's chat, as sentence-transformers' CrossEncoder makes them.

    prompt: the system message; "" for none.
    truncate: cut a chat that is too long, but for the template's last tokens.
    Raises InputError where the template does not write the query and the document.
    """
    unlimited = tokenizer.untruncated()

    def render(query: str, document: str) -> str:
        return template.render(_messages(spec, prompt, query, document))

    if any(filler not in render(*_MARKS) for filler in _MARKS):
        raise InputError(
            "the checkpoint's chat template does not write messages of the roles query and "
            "document, by which a causal model reranks; give it one that does"
        )
    suffix: list[int] | None = None
    prompts: list[list[int] | TooLongError] = []
    num_truncated = 0
    for index, document in enumerate(documents):
        ids = unlimited.encode_plain(render(query, document)).ids
        limit = tokenizer.max_tokens
        if len(ids) > limit and not truncate:
            prompts.append(_too_long(index, len(ids), limit))
            continue
        num_truncated += len(ids) > limit
        if len(ids) >= limit and spec.restores_suffix:
            if suffix is None:
                fillers = (unlimited.encode_plain(render(text, text)).ids for text in _FILLERS)
                suffix = _common_end(*fillers)
            kept = suffix[-limit:]
            ids = [*ids[: limit - len(kept)], *kept]
        prompts.append(ids[:limit])
    return PairPrompts(prompts, num_truncated)


# Texts that no template writes by itself.
_MARKS = ("the query: 7f3a", "the document: c90e")
INSTRUCTION_MARK = "the instruction: 5b1e"


def writes_prompt(template: ChatTemplate, spec: LogitScoreSpec) -> bool:
    """Whether a template of pairs writes the system message."""
    return INSTRUCTION_MARK in template.render(_messages(spec, INSTRUCTION_MARK, *_MARKS))


def _messages(
    spec: LogitScoreSpec, prompt: str, query: str, document: str
) -> list[dict[str, object]]:
    parts = [("system", prompt)] if prompt else []
    parts += [("query", query), ("document", document)]
    if spec.message_format == "flat":
        return [{"role": role, "content": text} for role, text in parts]
    return [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in parts]


def _common_end(one: list[int], other: list[int]) -> list[int]:
    """The tokens that both end with; none where one of them is nothing else."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return one[len(one) - count :] if 0 < count < min(len(one), len(other)) else []


def _too_long(index: int, num_tokens: int, max_tokens: int) -> TooLongError:
    return TooLongError(
        f"documents[{index}] makes a prompt of {num_tokens} tokens, the model takes {max_tokens}; "
        "shorten it, or pass truncate=True"
    )
