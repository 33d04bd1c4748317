"""Test which activations a part of a layer holds: of a prompt they are the largest tensors of a pass."""

import weakref

import pytest
import torch

from mycli.runtime.layers.attention import PromptAttention
from mycli.runtime.layers.feed_forward import Mlp
from mycli.runtime.layers.layer_part import PassContext
from mycli.runtime.models.part_spec import LinearSpec, MlpSpec, NormSpec

GATE_UP = (LinearSpec("gate", 8, 4), LinearSpec("up", 8, 4))


@pytest.mark.parametrize("normed_residual", [False, True])
def test_the_output_of_a_norm_is_freed_after_its_product_unless_it_is_added(normed_residual: bool) -> None:
    mlp = Mlp(MlpSpec(8, NormSpec("norm", 4, 1e-6), GATE_UP, LinearSpec("down", 4, 8), normed_residual=normed_residual))
    assert mlp.norm is not None
    mlp.norm.weight = torch.ones(4)
    steps = mlp.steps(torch.randn(1, 3, 4), PassContext({}, PromptAttention()))
    _, entering = next(steps)
    freed = weakref.ref(entering)
    del entering
    steps.send(torch.randn(1, 3, 16))
    assert (freed() is None) != normed_residual
