"""Test that a model with massive activations at one token loses hardly more than one without."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycli.quant.evaluate import TokenWindows, cut, evaluate, held_out_text
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.recipe import Recipe
from mycli.quant.solving.blockwise import BlockSolver, OriginalBlocks, solve_copies_of_block
from mycli.quant.solving.linear_solver import LinearSolver
from mycli.runtime.checkpoint.open_folder import open_model_folder
from tests.support.models import CPU
from tests.support.paths import PICO
from tests.support.sink_tokens import MASSIVE, TOKEN, write


@pytest.fixture(scope="module")
def sinks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sinks") / "model")


@pytest.fixture(scope="module")
def text() -> TokenWindows:
    return cut(held_out_text(), open_model_folder(PICO).tokenizer(), 128, 1024)


@pytest.mark.slow
def test_the_function_is_the_same_and_activations_are_massive(sinks: Path, text: TokenWindows) -> None:
    pico, massive = (StreamedModel(open_model_folder(folder), CPU) for folder in (PICO, sinks))
    divergence = evaluate(massive, text, pico).divergence
    assert divergence is not None and divergence.kl_max < 1e-5
    block, inputs = massive.block(0), list[Tensor]()
    block.products["down"].register_forward_pre_hook(lambda _, given: inputs.append(given[0].flatten(0, -2).abs()))
    massive.advance(block, massive.embed(text.windows), massive.context(128))
    x = torch.cat(inputs)
    at_token = (text.windows == massive.folder.tokenizer().encode(TOKEN, add_special=False)[-1]).flatten()
    assert at_token.sum() > 10
    assert ((x[at_token] > 1000).sum(1) >= MASSIVE - 1).all() and x[~at_token].max() < 500 and x.median() < 1


def test_they_cost_hardly_anything(sinks: Path, text: TokenWindows) -> None:
    lost = []
    for folder in (PICO, sinks):
        model = StreamedModel(open_model_folder(folder), CPU, dense=True)
        packings = Recipe(bits=2, head="keep").packings(model.config)
        original, solver = OriginalBlocks(model, text.windows), LinearSolver("gptq", torch.bfloat16)
        (solved,) = solve_copies_of_block([BlockSolver(original, packings, solver)], 0)
        lost.append(sum(layer.output_error or 0.0 for layer in solved.layers))
    assert lost[1] < 1.3 * lost[0]
