"""The random numbers of one request: uniform, from a seed, the same however many are asked for at a time.

Does not know what they decide.
"""

import torch

_AT_ONCE = 256  # beside a large model's pass the call costs more than the numbers


class RandomNumbers:
    """Numbers of [0, 1), a little below 1 at most: a sum times one does not round up to the sum."""

    def __init__(self, seed: int | None) -> None:
        """`seed`: None for one that nobody knows."""
        self.generator = torch.Generator()
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)
        self._numbers, self._used = list[float](), 0

    def take(self, count: int) -> list[float]:
        """The next ones."""
        self._make(count)
        self._used += count
        return self._numbers[self._used - count : self._used]

    def peek(self, index: int) -> float:
        """The number that will be taken after the next `index` ones."""
        self._make(index + 1)
        return self._numbers[self._used + index]

    def _make(self, count: int) -> None:
        while self._used + count > len(self._numbers):
            numbers = torch.rand(_AT_ONCE, generator=self.generator, dtype=torch.float64)
            self._numbers = self._numbers[self._used :] + (numbers * (1 - 2**-50)).tolist()
            self._used = 0
