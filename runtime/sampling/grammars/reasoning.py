"""Grammars for chat replies without an output format whose reasoning is limited by a budget or a deadline."""

from collections.abc import Sequence

from mycli.runtime.sampling.grammars.grammar import Grammar, GrammarCompiler
from mycli.runtime.sampling.grammars.lark import Prelude
from mycli.runtime.tokenizer.parsing.reasoning_parser import find_reasoning_format, prompt_end
from mycli.runtime.tokenizer.tokenizer import Tokenizer


def reasoning_prelude(template: str, end: str) -> Prelude | None:
    """Return what may precede the answer of a chat model with this template, to a prompt with this `prompt_end`."""
    form = find_reasoning_format(template)
    if form.opened_by(end):
        return Prelude(form.open, form.ending, opened=True)
    if form.reasons(template) and not form.closed_by(end):
        return Prelude(form.open, form.ending)
    return None


class ReasoningGrammars:
    """The grammars of one model's chat replies; `budget`: tokens of reasoning, None for what the deadline leaves."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int], budget: int | None) -> None:
        self._tokenizer, self._stop_ids, self._budget = tokenizer, stop_ids, budget
        self._compiler: GrammarCompiler | None = None
        self._grammars: dict[bool, Grammar] = {}  # by whether the prompt opens the reasoning

    def grammar(self, prompt: Sequence[int]) -> Grammar | None:
        """Return the grammar of the reply to a chat prompt; None if it has no reasoning."""
        template = self._tokenizer.template
        end = prompt_end(self._tokenizer, prompt)
        prelude = None if template is None else reasoning_prelude(template.source(tools=True), end)
        if prelude is None:
            return None
        if prelude.opened not in self._grammars:
            self._compiler = self._compiler or GrammarCompiler(self._tokenizer, self._stop_ids)
            limited = Prelude(prelude.open, prelude.close, prelude.opened, self._budget)
            self._grammars[prelude.opened] = self._compiler.any_text(limited)
        return self._grammars[prelude.opened]
