"""The uniform random numbers with which tokens are drawn."""

import os

import torch

# Random numbers generated per call: next to the pass of a large model the call costs more than the numbers.
_NUMBERS_PER_CALL = 256


class RandomNumbers:
    """The uniform random numbers of one request, independent of how many are taken at a time."""

    def __init__(self, seed: int | None, taken: int = 0) -> None:
        """taken: how many numbers to skip, because an earlier part of the reply took them."""
        self.generator = torch.Generator()
        # Generator.seed() opens a file, which fails for a server with as many connections as open files are allowed.
        self.generator.manual_seed(int.from_bytes(os.urandom(7)) if seed is None else seed)
        self._numbers, self._used = list[float](), 0
        self.taken = taken  # numbers so far
        # Generated in whole calls, as `take` generates them, and dropped.
        for _ in range(taken // _NUMBERS_PER_CALL):
            self._generate(1)
            self._used = len(self._numbers)
        if rest := taken % _NUMBERS_PER_CALL:
            self._generate(rest)
            self._used += rest

    def take(self, count: int) -> list[float]:
        """Return the next `count` numbers in [0, 1 - 2^-50]: a sum times one does not round up to the sum."""
        numbers = self.peek(count)
        self._used += count
        self.taken += count
        return numbers

    def peek(self, count: int, skip: int = 0) -> list[float]:
        """Return the `count` numbers after the next `skip`, without taking them."""
        if self._used + skip + count > len(self._numbers):
            self._generate(skip + count)
        return self._numbers[self._used + skip : self._used + skip + count]

    def _generate(self, count: int) -> None:
        while self._used + count > len(self._numbers):
            numbers = torch.rand(_NUMBERS_PER_CALL, generator=self.generator, dtype=torch.float64)
            self._numbers = self._numbers[self._used :] + (numbers * (1 - 2**-50)).tolist()
            self._used = 0
