"""What `--draft mtp` gains where the head that ships with a model predicts: a model of 0.2 B made so that it does.

    python -m tests.benchmarks.prediction [--noise 0 4 6 8] [--tokens 64] [--rounds 3]

The model's next token is a function of the last one, and its head knows the function, but for noise that makes it miss
some (`tests.support.prediction`); what layers compute adds nothing, and takes as long as it would. It is quantized to
int4 in groups of 128, its head stays in 16 bits. Each round decodes with and without the head in turn; the length of
drafts is the one that adapts, as in `run`.
"""

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

import torch

from mycli.quant.pipeline import quantize
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.diagnostics.speculation_benchmark import SpeculationSubject
from mycli.runtime.engine.loader import load_model
from mycli.runtime.engine.model_runner import CacheShape
from mycli.runtime.hub.resolve import Source
from mycli.runtime.speculative.draft_length import AdaptiveDraftLength
from mycli.runtime.speculative.prediction import PredictionProposer
from mycli.runtime.speculative.prediction_head import PredictionHead
from tests.support.models import CPU
from tests.support.paths import PICO
from tests.support.prediction import make_that_predicts

SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 1024,
}
CONTEXT, PROMPT = 512, (5, 6, 7)


def subject(folder: Path, noise: float) -> SpeculationSubject:
    """The model, quantized and loaded, with its head."""
    make_that_predicts(folder / "source", "qwen3_5-delta", noise, **SHAPE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, folder / "source" / name)
    recipe = Recipe("rtn", 4, 128)
    quantize(plan_quantization(Source("made", folder / "source"), recipe, report="none"), folder / "copy", CPU)
    opened = ModelFolder.open(folder / "copy")
    runner = load_model(opened, Placement(torch.device("cpu"), torch.bfloat16))
    assert opened.predictor is not None
    head = PredictionHead(opened.predictor, runner)
    shape = CacheShape.lanes(CONTEXT)
    return SpeculationSubject(runner, lambda: PredictionProposer(head, shape), 4096, frozenset(), CONTEXT)


def main() -> None:
    """A line for each noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=float, nargs="*", default=[0, 4, 6, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    for noise in given.noise:
        with tempfile.TemporaryDirectory() as name:
            made = subject(Path(name), noise)
        plain, drafting = made.engine(), made.engine(lambda proposer: AdaptiveDraftLength(proposer.relative_cost))
        rates, ratios = [], []
        for turn in range(given.rounds):
            prompt = (*PROMPT, turn)
            expected, without = made.reply(plain, prompt, given.tokens)
            found, drafted = made.reply(drafting, prompt, given.tokens)
            assert found == expected
            assert drafted.record is not None
            rates.append((without.tokens_per_second, drafted.tokens_per_second, drafted.record.acceptance_rate))
            ratios.append(rates[-1][1] / rates[-1][0])
        without_head, with_head, accepted = (statistics.median(column) for column in zip(*rates, strict=True))
        print(
            f"noise {noise:g}: {accepted:.0%} of compared drafts stand, {without_head:.1f} to {with_head:.1f} tokens/s,"
            f" {statistics.median(ratios):.2f} x",
            flush=True,
        )


if __name__ == "__main__":
    main()
