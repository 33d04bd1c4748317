"""Finds the longest suffix of a growing text that occurred earlier, in constant amortized time per token.

A suffix automaton (Blumer et al., 1985) has one state for each set of substrings with the same end positions. Most
states have one transition, which is stored in arrays: a fifth of the memory of a dictionary per state.
"""

from array import array
from collections.abc import Iterable, Sequence

_NONE = -1


class SuffixAutomaton:
    """A text, its automaton, and the longest earlier occurrence of the text's end.

    matched: its length in tokens; following: position of the token after it. Of several occurrences the latest counts.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.matched, self.following = 0, 0
        self._state = 0  # of the matched suffix
        self._last = 0  # of the whole text
        self._link = array("i", [_NONE])
        self._length = array("i", [0])
        self._end = array("i", [_NONE])  # position of the last token of the latest known occurrence
        self._token = array("i", [_NONE])  # the first transition of each state
        self._target = array("i", [_NONE])
        self._more: dict[int, dict[int, int]] = {}  # further transitions

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._match(token)
            self._append(token)
            self._update_match()

    def continuation(self, count: int) -> list[int]:
        """Return the `count` tokens that followed the matched suffix, repeated where the text ends."""
        # A match that overlaps the end of the text is a cycle, so its continuation repeats the cycle.
        start, known = self.following, len(self.tokens)
        continuation = self.tokens[start : start + count]
        while len(continuation) < count:
            continuation.append(continuation[start + len(continuation) - known])
        return continuation

    def _next(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return _NONE if more is None else more.get(token, _NONE)

    def _set(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (_NONE, token):
            self._token[state], self._target[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target

    def _match(self, token: int) -> None:
        # Before the token is appended: afterwards the longest suffix that occurs would be the whole text.
        state = self._state
        target = self._next(state, token)
        while target == _NONE and state:
            state = self._link[state]
            self.matched = self._length[state]
            target = self._next(state, token)
        if target != _NONE:
            state, self.matched = target, self.matched + 1
        self._state = state

    def _append(self, token: int) -> None:
        position = len(self.tokens)
        self.tokens.append(token)
        state, self._last = self._last, self._new(position + 1, position)
        target = _NONE
        while state != _NONE and (target := self._next(state, token)) == _NONE:
            self._set(state, token, self._last)
            state = self._link[state]
        if state == _NONE:
            target = 0
        elif self._length[target] != self._length[state] + 1:
            target = self._split(state, token, target)
        self._link[self._last] = target

    def _new(self, length: int, end: int) -> int:
        self._length.append(length)
        self._end.append(end)
        self._link.append(_NONE)
        self._token.append(_NONE)
        self._target.append(_NONE)
        return len(self._length) - 1

    def _split(self, state: int, token: int, target: int) -> int:
        # The substrings of `target` no longer have the same end positions: the shorter ones move to a clone, which all
        # states that reach them are redirected to.
        clone = self._new(self._length[state] + 1, self._end[target])
        self._link[clone], self._link[target] = self._link[target], clone
        self._token[clone], self._target[clone] = self._token[target], self._target[target]
        if (more := self._more.get(target)) is not None:
            self._more[clone] = dict(more)
        while state != _NONE and self._next(state, token) == target:
            self._set(state, token, clone)
            state = self._link[state]
        return clone

    def _update_match(self) -> None:
        # If appending split the matched state, the suffix belongs to the shorter part.
        if self.matched and self._length[self._link[self._state]] >= self.matched:
            self._state = self._link[self._state]
        position = len(self.tokens) - 1
        if self.matched:
            # Only this state gets the new end position. Its suffixes end here, too, but updating them all would make a
            # token cost its whole suffix path; an older occurrence gives a draft, too.
            self.following = self._end[self._state] + 1
            self._end[self._state] = position


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # slices are compared faster than items
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
