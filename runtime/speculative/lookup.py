"""Prompt lookup: proposes the tokens that followed the same text earlier in the conversation.

A suffix automaton finds the longest match at every token. When a reply ends, its automaton stays for the next turn of
the conversation, whose prompt begins with the same tokens. That saves building it again, and finds text that the new
prompt no longer contains, such as dropped reasoning.
"""

from collections.abc import Iterable, Sequence

from mycli.runtime.engine.speculation import ComputedTokens, DraftRequest
from mycli.runtime.layers.transformer import HiddenStateHook
from mycli.runtime.speculative.proposers import NO_PROPOSAL, Proposal
from mycli.runtime.speculative.suffix_automaton import SuffixAutomaton, common_prefix

SHORTEST = 2  # tokens of a match that is used
# Match lengths at which a class of its own begins: acceptance is learned separately for each class, because a long
# match is right more often. Agents that return edited files have long matches (docs/speculation.md).
CLASSES = (4, 8, 16)
# Bounds on memory: tokens of one automaton, which is not extended beyond them, and of all automata of finished replies.
MAX_INDEXED_TOKENS = 1 << 17
KEPT_TOKENS = 1 << 17
SAME_CONVERSATION = 16  # shared first tokens from which two prompts count as one conversation
_BOUNDARY = -2  # between the texts of two turns; equal to no token, so that no match crosses it


class _Text:
    """The automaton of a sequence, maybe with earlier text before it. added: number of its tokens in the automaton."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.added = 0

    def update(self, tokens: Sequence[int]) -> None:
        if self.added < len(tokens) and len(self.automaton.tokens) < MAX_INDEXED_TOKENS:
            self.automaton.extend(tokens[self.added :])
            self.added = len(tokens)


class PromptLookup:
    """Proposes the tokens that followed the longest match; it has no weights and runs no pass."""

    relative_cost = 0.0
    nbytes = 0

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}
        self._kept: list[tuple[list[int], _Text]] = []  # of replies that ended, the oldest first

    def lag(self, sequence: int, tokens: Sequence[int]) -> int:
        return 0

    def evidence(self, sequence: int, tokens: Sequence[int]) -> int:
        matched = self._text(sequence, tokens).automaton.matched
        return NO_PROPOSAL if matched < SHORTEST else sum(matched >= length for length in CLASSES)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [Proposal(self._continuation(request)) for request in requests]

    def _continuation(self, request: DraftRequest) -> list[int]:
        text = self._text(request.sequence, request.tokens)
        if text.added < len(request.tokens) or text.automaton.matched < SHORTEST:
            return []
        continuation = text.automaton.continuation(request.count)
        return continuation[: continuation.index(_BOUNDARY)] if _BOUNDARY in continuation else continuation

    def _text(self, sequence: int, tokens: Sequence[int]) -> _Text:
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = self._take(tokens)
        text.update(tokens)
        return text

    def _take(self, tokens: Sequence[int]) -> _Text:
        # Return the automaton of the conversation's last turn, if there is one. If the new prompt departs from that
        # text, the rest of it is added after a boundary: states cannot be removed from a suffix automaton.
        shared = [common_prefix(known, tokens) for known, _ in self._kept]
        longest = max(shared, default=0)
        if longest < min(SAME_CONVERSATION, len(tokens)) or not longest:
            return _Text()
        known, text = self._kept.pop(shared.index(longest))
        if longest < len(known):
            text.automaton.extend([_BOUNDARY])
        text.added = longest
        return text

    def hidden_state_hook(self, parts: Iterable[ComputedTokens]) -> HiddenStateHook | None:
        return None

    def truncate(self, sequence: int, length: int) -> None:
        """Do nothing: drafts are not indexed."""

    def finish(self, sequence: int, tokens: Sequence[int]) -> None:
        text = self._texts.pop(sequence, None)
        if text is None or len(text.automaton.tokens) >= MAX_INDEXED_TOKENS:
            return
        text.update(tokens)
        self._kept.append((list(tokens), text))
        while sum(len(text.automaton.tokens) for _, text in self._kept) > KEPT_TOKENS:
            del self._kept[0]

    def forget(self) -> None:
        self._kept = []
