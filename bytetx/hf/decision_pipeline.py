"""transformers' decision pipeline, which packs the prompts of a list where its model is wrapped."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from transformers.decision.modeling_utils import DecisionMixin
from transformers.decision.template_utils import Question
from transformers.pipelines.decision import DecisionPipeline

from bytetx.errors import InputError
from bytetx.hf.forward import PackedForward

# Of one pass, unless one prompt alone has more.
_PASS_TOKENS = 8192

Prompt = tuple[dict[str, Any], list[Any]]  # its inputs and its questions, as the pipeline has them


class PackedDecisionPipeline(DecisionPipeline):
    """The stock pipeline with its answers and errors; a model that is not wrapped runs as there."""

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """A list is answered from packed passes over the prompts of all its requests."""
        if not isinstance(inputs, list) or args or kwargs or not self._is_wrapped:
            return super().__call__(inputs, *args, **kwargs)
        made = [self.preprocess(request) for request in inputs]
        prompts = list(chain.from_iterable(one["prompts"] for one in made))
        with self.device_placement(), torch.inference_mode():
            scores = iter(self._scores(prompts))
        answers = []
        for one in made:
            own = [next(scores) for _ in one["prompts"]]
            answers.append(self.postprocess({"prompts": one["prompts"], "scores": own}))
        return answers

    def _forward(self, model_inputs: Any) -> Any:  # type: ignore[override]  # as the stock one
        if not self._is_wrapped:
            return super()._forward(model_inputs)
        prompts = model_inputs["prompts"]
        return {"prompts": prompts, "scores": self._scores(prompts)}

    @property
    def _is_wrapped(self) -> bool:
        modules = self.model.modules()
        return any(isinstance(one.__dict__.get("forward"), PackedForward) for one in modules)

    def _scores(self, prompts: Sequence[Prompt]) -> list[list[torch.Tensor]]:
        """For each prompt the scores of the options of each question, over their temperature."""
        found: list[list[torch.Tensor]] = []
        for group in _passes(prompts):
            try:
                scores = self._packed_scores(group)
            except InputError:  # the model runs its original forward, or the error is a prompt's
                for inputs, questions in group:
                    one = {"prompts": [(inputs, questions)]}
                    found += super()._forward(one)["scores"]
                continue
            for (_, questions), own in zip(group, scores, strict=True):
                warped = zip(questions, own, strict=True)
                found.append([self._warped(question, score) for question, score in warped])
        return found

    def _warped(self, question: Any, scores: torch.Tensor) -> torch.Tensor:
        config: Any = self.decision_config  # the constructor reads the one that a repo names
        processors = config.logits_processors[question.type]
        warped: torch.Tensor = processors(None, scores.float())  # temperatures read no ids
        return warped

    def _packed_scores(self, prompts: Sequence[Prompt]) -> list[list[torch.Tensor]]:
        rows = [inputs["input_ids"][0] for inputs, _ in prompts]
        lengths = torch.tensor([0, *map(len, rows)])
        cu_seqlens = lengths.cumsum(0)
        starts = cu_seqlens[:-1].tolist()
        marks = [
            _absolute(inputs["marks"][: len(questions)], start, len(row))
            for (inputs, questions), start, row in zip(prompts, starts, rows, strict=True)
        ]
        if any(
            len(one) < len(questions) for one, (_, questions) in zip(marks, prompts, strict=True)
        ):
            raise InputError("a prompt has fewer marks than questions")
        device = self.model.device
        packed = {
            "input_ids": torch.cat(rows)[None].to(device),
            "cu_seqlens": cu_seqlens.to(device, torch.int32),
        }
        questions = [question for _, own in prompts for question in own]
        scores = self._of_questions(packed, torch.cat(marks).to(device), questions)
        counts = [len(own) for _, own in prompts]
        ends = torch.tensor(counts).cumsum(0).tolist()
        return [scores[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def _of_questions(
        self, packed: dict[str, torch.Tensor], marks: torch.Tensor, questions: Sequence[Any]
    ) -> list[torch.Tensor]:
        """The scores of the options of each question, as the model gives them."""
        if isinstance(self.model, DecisionMixin):
            counts = [len(question.options) for question in questions]
            types = [Question.questions_types.index(question.type) for question in questions]
            flat = self.model(
                **packed,
                marks=marks[None],
                num_options=torch.tensor([counts], device=marks.device),
                question_type_ids=torch.tensor([types], device=marks.device),
            )
            return list(flat.split(counts))
        output = self.model(**packed, use_cache=False, logits_to_keep=marks - 1)
        ids = [self.label_token_ids(tuple(question.labels)) for question in questions]
        return [output.logits[0, row, own] for row, own in enumerate(ids)]


def _passes(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """Consecutive prompts whose tokens fit one pass."""
    groups: list[list[Prompt]] = []
    room = 0
    for prompt in prompts:
        size = prompt[0]["input_ids"].shape[-1]
        if size > room or not groups:
            groups.append([])
            room = _PASS_TOKENS
        groups[-1].append(prompt)
        room -= size
    return groups


def _absolute(marks: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """The marks of a prompt among the packed tokens; one at its start reads its last token."""
    return start + torch.where(marks > 0, marks, length)


__all__ = ["PackedDecisionPipeline"]
