"""Implements a model whose logits are a function of all previous tokens, in fp64, to detect wrong cache contents.

Also enumerates every outcome of a random computation with its probability.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Batch
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import HiddenStateHook, Transformer
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import RopeScaling
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler

CONFIG = ModelConfig(
    model_type="llama",
    hidden_size=2,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=2,
    intermediate_size=2,
    vocab_size=8,
    max_context=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=RopeScaling(),
    tie_embeddings=True,
    dtype="float32",
)
CPU = torch.device("cpu")
Function = Callable[[tuple[int, ...]], Tensor]  # the tokens -> logits [vocab]


class PrefixModel(Transformer):
    """Reads the tokens back from the cache, so that the cache contents determine the logits."""

    def __init__(
        self, function: Function, vocab_size: int, max_context: int = 64, config: ModelConfig = CONFIG
    ) -> None:
        super().__init__(replace(config, vocab_size=vocab_size, max_context=max_context))
        self.embedding = torch.zeros(vocab_size, 2)
        self.function = function
        self.known: dict[tuple[int, ...], Tensor] = {}
        self.passes: list[int] = []  # tokens of each pass

    def logits(self, text: tuple[int, ...]) -> Tensor:
        """Return the logits after `text`, computed once."""
        if text not in self.known:
            self.known[text] = self.function(text)
        return self.known[text]

    def forward(self, batch: Batch, rope: Rope, cache: KVCache, hook: HiddenStateHook | None = None) -> Tensor:
        """Return logits [rows, vocab] in the dtype of the function."""
        stored = batch.tokens.float()[:, None, None].expand(-1, 1, 2)
        cache.write(0, batch, stored, stored)
        self.passes.append(batch.rows)
        rows = []
        for chunk in batch.chunks:
            text = cache.read(0, chunk.blocks, chunk.length)[0].data[0, 0, :, 0].long().tolist()
            ends = range(chunk.length - chunk.logits + 1, chunk.length + 1)
            rows += [self.logits(tuple(text[:end])) for end in ends]
        return torch.stack(rows) if rows else torch.empty(0, self.config.vocab_size)


def random_function(seed: int, vocab_size: int, scale: float = 1.5) -> Function:
    """Return a function with normally distributed fp64 logits that differ for every text."""

    def function(text: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *text)) & (1 << 62) - 1)
        return scale * torch.randn(vocab_size, generator=generator, dtype=torch.float64)

    return function


Choose = Callable[[Sequence[float]], int]


class ChoosingSampler(Sampler):
    """Calls `choose` instead of sampling."""

    def __init__(self, sampling: SamplingParams, vocab_size: int, choose: Choose) -> None:
        super().__init__(sampling, vocab_size, CPU)
        self.choose = choose

    def draw(self, weights: Tensor) -> Tensor:
        """Draw a token for one row."""
        total = float(weights.sum())
        if not total > 0:
            return torch.tensor([[weights.shape[1]]])
        found: list[float] = (weights[0] / total).tolist()
        return torch.tensor([[self.choose(found)]])

    def accept(self, chances: Tensor) -> int:
        """Accept the first n with the product of their chances and the rejection of the next."""
        all_before, ways = 1.0, []
        for chance in chances.clamp(max=1).tolist():
            ways.append(all_before * (1 - chance))
            all_before *= chance
        return self.choose([*ways, all_before])


class _Script:
    """Follows the choices in `ways`, then takes the first possible one, and records the alternatives."""

    def __init__(self, ways: list[int]) -> None:
        self.given, self.taken = ways, list[int]()
        self.others: list[list[int]] = []
        self.probability = 1.0

    def choose(self, chances: Sequence[float]) -> int:
        if len(self.taken) < len(self.given):
            way = self.given[len(self.taken)]
        else:
            way, *others = [index for index, chance in enumerate(chances) if chance > 0]
            self.others += [[*self.taken, other] for other in others]
        self.taken.append(way)
        self.probability *= chances[way]
        return way


def all_outcomes(run: Callable[[Choose], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """Return the probability of every result of `run`, which runs once for each sequence of choices."""
    outcomes: defaultdict[tuple[int, ...], float] = defaultdict(float)
    scripts = [_Script([])]
    while scripts:
        script = scripts.pop()
        outcomes[run(script.choose)] += script.probability
        scripts += [_Script(ways) for ways in script.others]
    return outcomes
