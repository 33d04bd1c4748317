"""Measures speculation with a forced acceptance rate (1.1 B target, 0.1 B draft) and compares with the prediction.

    PYTHONPATH=.links python -m tests.benchmarks.speculation [--target FOLDER --draft FOLDER] [--length 4 8]

Two random models never agree, so each drafted token is accepted with the requested probability; everything else is the
loop that `run` and `chat` use, sampling at temperature 1. Every round alternates between plain steps, the two kinds of
pass alone, and the loop. The prediction is (1 + a + ... + a^K) plain steps for one verification pass and K drafting
passes (Leviathan et al., arXiv 2211.17192); the overhead of the loop is the time of a step beyond the models' passes,
in plain steps.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mycli.quant.recipe import Recipe
from mycli.runtime.cache.batch import Chunk
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.replies.completion import generate
from mycli.runtime.engine.sequence import Request
from mycli.runtime.hub.resolve import Source
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.draft_length import FixedDraftLength, expected_tokens
from mycli.runtime.speculative.proposers import DraftModel
from mycli.runtime.speculative.speculator import ProposerSpeculator, warm_up
from tests.support.quantizing import make

TARGET = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
DRAFT = {"hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 8, "num_attention_heads": 12}
COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
CPU = Placement(torch.device("cpu"), torch.bfloat16)
PROMPT = tuple(range(3, 67))
SHAPE = CacheShape.contiguous(1024)


def random_model(folder: Path, shape: Mapping[str, Any]) -> Path:
    """Write an int4 g128 Llama of `shape` under `folder`."""
    source, target = folder / "source", folder / "int4"
    source.mkdir(parents=True)
    heads = {"num_key_value_heads": shape["num_attention_heads"] // 4, "tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps({**COMMON, **heads, **shape}))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(size, generator=generator) * 0.02 + name.endswith("norm.weight")).bfloat16()
        for name, size in open_model_folder(source).config.tensors()
    }
    save_file(tensors, source / "model.safetensors")
    recipe = Recipe(method="rtn", scales="absmax", head="int4")
    make(Source(str(source), source, None, None), target, recipe)
    return target


class Forced(Sampler):
    """Accepts each proposal with the same probability, independent of the models' logits."""

    def __init__(self, acceptance: float, vocab_size: int, seed: int) -> None:
        super().__init__(SamplingParams(temperature=1.0), vocab_size, CPU.device)
        self.numbers.generator.manual_seed(seed)  # a seed in the settings would guarantee the tokens of plain steps
        self._acceptance = acceptance

    def accept(self, chances: Tensor) -> int:
        return super().accept(torch.full_like(chances, self._acceptance))


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Clock:
    """Adds up the seconds of a model's passes."""

    def __init__(self, model: Transformer) -> None:
        self.seconds = 0.0
        self._forward = model.forward
        model.forward = self._timed  # type: ignore[method-assign]  # a hook would cost several times as much

    def _timed(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        out = self._forward(*arguments)
        self.seconds += time.perf_counter() - began
        return out


class Timed(FixedDraftLength):
    """Uses a fixed draft length and records the seconds of each full-length step and of the model passes in it."""

    def __init__(self, count: int, clocks: Sequence[Clock]) -> None:
        super().__init__(count)
        self._clocks = clocks
        self.steps: list[tuple[float, float]] = []

    def observe_draft(self, drafted: int, accepted: int, lag: int, seconds: float, evidence: int = 0) -> None:
        if drafted == self._count:
            self.steps.append((seconds, sum(clock.seconds for clock in self._clocks)))
        for clock in self._clocks:
            clock.seconds = 0.0


class Trial:
    """Runs one pair of models with one draft length."""

    def __init__(self, target: ModelRunner, draft: ModelRunner, clocks: Sequence[Clock], length: int) -> None:
        self.length, self.vocab = length, target.config.vocab_size
        self.plain = Engine(target, SHAPE, self.vocab)
        self.draft = DraftModel(draft, SHAPE, target.nbytes)
        self.policy = Timed(length, clocks)
        self.fast = Engine(target, SHAPE, self.vocab, speculator=ProposerSpeculator(self.draft, lambda: self.policy))
        warm_up(self.fast)

    def plain_step(self, seed: int) -> float:
        """Return the seconds of a token without speculation."""
        self.plain.forget()
        _, timing = generate(self.plain, Request(PROMPT, SamplingParams(temperature=1.0, seed=seed), limit=24))
        return statistics.median(timing.token_seconds[2:])

    def passes(self) -> tuple[float, float]:
        """Return the seconds of a verification pass over the draft and one more token, and of a drafting pass."""
        judging, drafting = [], []
        drafts, judged = ([Chunk([5] * count, len(PROMPT), (0,), count)] for count in (1, self.length + 1))
        for engine, cache in ((self.draft, self.draft.cache), (self.fast, self.fast.cache)):
            engine.forget()
            engine.runner.run([Chunk(PROMPT, 0, (0,), 1)], cache)
        for _ in range(8):
            drafting += [seconds(lambda: self.draft.runner.run(drafts, self.draft.cache)) for _ in range(self.length)]
            judging.append(seconds(lambda: self.fast.runner.run(judged, self.fast.cache)))
        return statistics.median(judging), statistics.median(drafting)

    def loop(self, acceptance: float, seed: int) -> tuple[float, float, float]:
        """Return (seconds, seconds beyond the models' passes, tokens) of a step of the real loop."""
        self.fast.forget()
        self.policy.steps.clear()
        number = self.fast.submit(Request(PROMPT, SamplingParams(temperature=1.0), limit=200))
        self.fast._states[number].sampler = Forced(acceptance, self.vocab, seed)
        passes = made = 0
        while self.fast.has_work:
            for output in self.fast.step():
                passes += output.drafted > 0
                made += (output.accepted + 1) * (output.drafted > 0)
        beyond = statistics.median(step - passes for step, passes in self.policy.steps)
        return statistics.median(step for step, _ in self.policy.steps), beyond, made / max(passes, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.7, 0.8, 0.9])
    parser.add_argument("--length", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folders = [
            given or random_model(Path(name) / part, shape)
            for given, part, shape in ((options.target, "target", TARGET), (options.draft, "draft", DRAFT))
        ]
        target, draft = (load_model(open_model_folder(folder), CPU) for folder in folders)
    clocks = [Clock(target.model), Clock(draft.model)]
    print(f"torch {torch.__version__}, python {platform.python_version()}, {torch.get_num_threads()} threads")
    for model, kind in ((target, "target"), (draft, "draft")):
        print(f"{kind}: {model.config.parameters() / 1e9:.2f} B parameters, {model.nbytes / 2**20:.0f} MiB")
    print("\n| K | acceptance | plain ms | judge ms | draft ms | step ms | tokens/step | speed-up | predicted | loop |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for length in options.length:
        trial = Trial(target, draft, clocks, length)
        for acceptance in options.acceptance:
            rounds = [
                (trial.plain_step(seed), *trial.passes(), *trial.loop(acceptance, seed))
                for seed in range(options.rounds)
            ]
            plain, judge, small, step, beyond, tokens = (statistics.median(each) for each in zip(*rounds, strict=True))
            shares = f"{length} | {acceptance:.0%}"
            times = " | ".join(f"{1e3 * each:.1f}" for each in (plain, judge, small, step))
            expected = expected_tokens(acceptance, length) * plain / (judge + length * small)
            found = f"{tokens:.2f} | {tokens * plain / step:.2f}x | {expected:.2f}x | {beyond / plain:.1%}"
            print(f"| {shares} | {times} | {found} |", flush=True)


if __name__ == "__main__":
    main()
