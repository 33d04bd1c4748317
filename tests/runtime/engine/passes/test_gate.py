"""Test the comparison of each layer with the plain one: right layers pass, and a layer with a fault has its name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.passes import gate
from mycli.runtime.engine.passes.captured import CapturedStep
from mycli.runtime.engine.passes.compile_cuda import compile_step
from mycli.runtime.engine.passes.gate import compare_logits, layer_difference, tolerance
from mycli.runtime.engine.passes.graphs import LayeredStep, StepInput
from mycli.runtime.errors import Declined
from mycli.runtime.layers.rope import Rope
from mycli.runtime.models.config import KvDtype
from tests.support.engines import whole
from tests.support.families import CASES as FAMILY_CASES
from tests.support.families import make
from tests.support.models import CPU, random_model
from tests.support.native_parts import WIDE, load_bf16, need_native_code
from tests.support.paths import PICO
from tests.support.triton_interpreter import Interpret, interpret

__all__ = ["interpret"]


def test_logits_may_differ_by_what_rounding_makes_of_them_and_no_layer_may_be_missing(tmp_path: Path) -> None:
    """A deep model in bf16 differs from fp32 by more than the least bound; the bound follows, in proportion."""
    sizes = {"num_hidden_layers": 24, "vocab_size": 512, "max_position_embeddings": 512}
    folder = open_model_folder(random_model(tmp_path / "deep", 0.11, **sizes))
    deep, exact = (load_model(folder, Placement(CPU.device, dtype)).model for dtype in (torch.bfloat16, torch.float32))
    tokens = torch.randint(0, 512, (1, 300), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        plain, expected = whole(deep, tokens)[0, -4:], whole(exact, tokens)[0, -4:]
        rounding, bound = gate._relative_error(plain, expected), tolerance(deep)
        assert gate.TOLERANCE < rounding < bound < min(2.6 * rounding, gate.ROUTED_TOLERANCE)
        list(deep.layers())[12].register_forward_hook(lambda block, inputs, x: inputs[0])
        assert compare_logits(whole(deep, tokens)[0, -4:], plain, bound) is not None
    assert tolerance(load_model(open_model_folder(PICO), Placement(CPU.device, torch.bfloat16)).model) < 0.05


def verdict(number: int, mixed: bool, kv: KvDtype, factor: float) -> Declined | None:
    """Return what the gate says of a fused pass with a fault in the second layer; runs in the interpreter.

    factor: of the first group of scales of the last product.
    """
    from mycli.runtime.engine.passes.fused import FusedStep
    from tests.support.decode_models import CASES, MIXED, models

    case = (MIXED if mixed else CASES)[number]
    fused, plain = models(replace(case, changes={**case.changes, "layers": 2, "max_context": 64}))
    step = FusedStep.compile(fused)
    assert isinstance(step, FusedStep)
    last = list(list(plain.layers())[1].products.values())[-1].weight()  # a view
    last[:, :32] *= factor
    return layer_difference(plain, step, kv, (2,))


def test_a_fault_has_the_number_of_its_layer(interpret: Interpret) -> None:
    declined = interpret(verdict, 0, False, "auto", 1.5)
    assert isinstance(declined, Declined) and declined.code == "layer-differs" and declined.data["layer"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "mixed", "kv"),
    [(0, False, "auto"), (8, False, "int4"), (1, True, "int8"), (3, True, "auto")],
    ids=["dense", "int4", "moe", "all-experts"],
)
def test_right_layers_pass(number: int, mixed: bool, kv: KvDtype, interpret: Interpret) -> None:
    assert interpret(verdict, number, mixed, kv, 1.0) is None


class Spoiled:
    """A step of which one layer adds `added` times as much to the stream, or stores values `stored` times as large.

    only: the number of new tokens of a sequence with which it does; None: any.
    """

    def __init__(
        self, step: LayeredStep, layer: int, added: float = 1.0, stored: float = 1.0, only: int | None = None
    ) -> None:
        self.step, self.layer, self.added, self.stored, self.only = step, layer, added, stored, only
        self.takes = step.takes

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
        return self.step(inputs, rope, cache, last)

    def run_layer(
        self,
        layer: int,
        stream: Tensor,
        inputs: StepInput,
        rope: Rope,
        cache: KVCache,
        router_scores: Tensor | None = None,
    ) -> Tensor:
        after = self.step.run_layer(layer, stream, inputs, rope, cache, router_scores)
        if layer != self.layer or self.only not in (None, inputs.tokens.shape[1]):
            return after
        cache.all(layer)[1].data.mul_(self.stored)
        if not cache.all(layer)[1].data.shape[1]:  # no heads: the layer has states
            cache.states.layer(layer)[-1].mul_(self.stored)
        return stream + (after - stream) * self.added


@pytest.mark.parametrize(
    "case", ["gemma2-window7-tied", "gpt_oss-window7-gqa4:2", "qwen3_5-delta", "kimi_linear-8top3", "deepseek_v2-yarn"]
)
def test_layers_of_the_captured_pass(case: str, tmp_path: Path) -> None:
    """A mixture of experts runs the experts of the plain pass, however its own scores are rounded."""
    need_native_code()
    model_type, changes = FAMILY_CASES[case]
    make(tmp_path, model_type, {**WIDE, **changes})
    model, warnings = load_bf16(tmp_path).model, list[Declined]()
    step = CapturedStep(model)
    assert layer_difference(model, step) is None
    added, stored = Spoiled(step, 1, added=1.2), Spoiled(step, 1, stored=1.2)
    declined = compile_step(model, added, "auto", lambda work: work, warnings.append, layers=added)
    assert declined == warnings[0] and warnings[0].code == "layer-differs"
    assert warnings[0].data["layer"] == 1 and str(warnings[0].data["percent"]).startswith(("18", "19"))
    declined = layer_difference(model, stored)
    assert declined is not None and declined.code == "layer-cache-differs" and declined.data["layer"] == 1


@pytest.mark.parametrize("new", [1, 4])
def test_a_layer_that_is_wrong_for_one_number_of_tokens(new: int, tmp_path: Path) -> None:
    need_native_code()
    make(tmp_path, "llama", WIDE)
    model = load_bf16(tmp_path).model
    declined = layer_difference(model, Spoiled(CapturedStep(model), 1, added=1.2, only=new))
    assert declined is not None and declined.code == "layer-differs" and declined.data["layer"] == 1


def test_what_a_layer_adds_is_compared_beyond_the_rounding_of_the_stream() -> None:
    """A stream with channels a thousand times larger hides nothing in the others."""
    x, added = torch.zeros(2, 64), torch.ones(2, 64)
    x[:, 0] = 1000.0
    expected = (x + added).bfloat16()
    rounded = expected.clone()
    rounded[:, 0] += 4.0  # one step of bf16 at 1000
    wrong = expected.clone()
    wrong[:, 1:] *= 1.05
    assert gate._change_error(rounded, expected, x.bfloat16()) < gate.LAYER_TOLERANCE[torch.float16]
    assert gate._change_error(wrong, expected, x.bfloat16()) > gate.LAYER_TOLERANCE[torch.float16]
    assert not gate._change_error(wrong * torch.nan, expected, x.bfloat16()) < gate.LAYER_TOLERANCE[torch.float16]
