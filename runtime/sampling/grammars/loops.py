"""Detects that a reply repeats one cycle of tokens."""

_GRAM = 8  # tokens of an n-gram by which the earlier copy is found
COPIES = 4  # of the cycle
LEAST_TOKENS = 64  # repeated tokens: tables and lists of a sound reply have short cycles, too


class LoopDetector:
    """Finds an exact cycle of any length at the end of the tokens added so far, in constant time per token."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[int, int] = {}  # hash of a gram -> the number of tokens up to its end
        self._period = 0
        self._repeated = 0  # tokens at the end that equal those a period before

    def add(self, token: int) -> bool:
        """Add a token; return whether the end is `COPIES` copies of one cycle, with `LEAST_TOKENS` repeated tokens."""
        tokens = self._tokens
        tokens.append(token)
        count = len(tokens)
        gram = hash(tuple(tokens[-_GRAM:]))
        # A period is followed as long as it holds. Only when it breaks is the last n-gram looked up for another one,
        # and compared, because hashes of different n-grams may be equal.
        if self._period and token == tokens[-1 - self._period]:
            self._repeated += 1
        else:
            place = self._places.get(gram, 0)
            same = place >= _GRAM and tokens[place - _GRAM : place] == tokens[-_GRAM:]
            self._period, self._repeated = (count - place, _GRAM) if same else (0, 0)
        self._places[gram] = count
        return self._repeated >= max(LEAST_TOKENS, (COPIES - 1) * self._period)
