"""Test which pass runs which work: an external backend, and the reasons why others decline."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycli.cli.reasons import REASONS, pass_rows, passes_json
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.pass_choices import PassChoice, pass_choices
from mycli.runtime.engine.passes import COMPILERS, Compiler, compile_passes
from mycli.runtime.engine.passes.base import OnDecline, PassInput, TokenSteps
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import Declined
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.models.config import KvDtype
from tests.support.embedding_models import encoder
from tests.support.engines import together
from tests.support.families import CASES, make
from tests.support.models import CPU
from tests.support.native_parts import HEAD, WIDE, load_bf16, need_native_code
from tests.support.paths import PICO


class CountingBackend:
    """Implements a backend that accepts passes of one token and counts them."""

    name, samples = "counting", False

    def __init__(self, model: Transformer) -> None:
        self.passes, self._plain = 0, PlainPass(model)

    def takes(self, work: PassInput) -> Declined | None:
        if work.sampling is not None:
            return Declined("host-sampling")
        return None if work.rows == 1 else Declined("many-rows", {"rows": work.rows, "most": 1})

    def logits(self, work: PassInput) -> Tensor:
        self.passes += 1
        return self._plain.logits(work)

    def tokens(self, work: PassInput) -> Iterator[TokenSteps]:
        raise NotImplementedError


def test_a_reply_runs_through_a_backend_that_is_registered_from_outside() -> None:
    model = load_model(open_model_folder(PICO), Placement(torch.device("cpu"), torch.float32)).model
    made: list[CountingBackend] = []

    def compile_counting(model: Transformer, kv: KvDtype, report: OnDecline) -> CountingBackend:
        made.append(CountingBackend(model))
        return made[0]

    passes = compile_passes(model, compilers={"counting": Compiler("cpu", lambda: compile_counting), **COMPILERS})
    runner, request = ModelRunner(model, passes=passes), Request((5, 6, 7), limit=6)
    replies = [
        together(Engine(each, CacheShape.contiguous(32), model.config.vocab_size), [request])
        for each in (runner, ModelRunner(model))
    ]
    assert replies[0] == replies[1] and made[0].passes == 5  # the prompt pass yields the first token


def test_a_model_of_embeddings_has_no_choices(tmp_path: Path) -> None:
    """It has no cache and decodes nothing: why no fast pass decodes would mislead."""
    assert pass_choices(load_model(open_model_folder(encoder(tmp_path / "bert")), CPU)) == []


def test_a_model_that_native_code_takes_says_which_pass_runs_what() -> None:
    need_native_code()
    choices = {choice.work: choice for choice in pass_choices(load_bf16(PICO, "auto"))}
    assert {work: (choice.chosen, choice.makes_tokens) for work, choice in choices.items()} == {
        "prompt": ("plain", False),
        "decode": ("cpu", True),
        "sample": ("cpu", False),
        "batch": ("cpu", True),
        "verify": ("cpu", False),
    }
    assert choices["sample"].declined["cpu"] == Declined("host-random-numbers")
    rows = {row.work: row for row in pass_rows(choices.values())}  # type: ignore[arg-type]  # only iterated
    assert rows["sampled decoding"].why == f"one token a call: {REASONS['host-random-numbers']}"
    assert not any(row.slow for row in rows.values())


@pytest.mark.parametrize(
    ("case", "changes", "code"),
    [("gemma2-mqa-low-caps-untied", HEAD, "logit-softcap"), ("lfm2-tied", {}, "recurrent-state")],
)
def test_a_model_whose_token_loop_is_declined_says_why(
    case: str, changes: dict[str, int], code: str, tmp_path: Path
) -> None:
    need_native_code()
    model_type, more = CASES[case]
    make(tmp_path, model_type, {**WIDE, **more, **changes})
    decode = {choice.work: choice for choice in pass_choices(load_bf16(tmp_path))}["decode"]
    assert not decode.makes_tokens and decode.declined["cpu"].code == code
    (entry,) = [entry for entry in passes_json([decode])]
    assert entry["declined"]["cpu"]["code"] == code and entry["declined"]["cpu"]["reason"]


def test_a_model_in_fp32_is_slow_and_says_so() -> None:
    runner = load_model(open_model_folder(PICO), Placement(torch.device("cpu"), torch.float32))
    rows = pass_rows(pass_choices(runner))
    slow = [row for row in rows if row.slow]
    assert len(slow) == 4 and all("float32 activations are not supported" in row.text for row in slow)


@pytest.mark.parametrize(
    ("work", "chosen", "declined", "slow"),
    [
        ("decode", "plain", True, True),
        ("prompt", "plain", True, False),
        ("decode", "cpu", True, False),
        ("decode", "plain", False, False),
    ],
)
def test_only_plain_passes_that_decode_and_have_a_reason_are_slow(
    work: str, chosen: str, declined: bool, slow: bool
) -> None:
    reasons = {"captured": Declined("host-random-numbers")} if declined else {}
    (row,) = pass_rows([PassChoice(work, chosen, False, reasons)])
    assert row.slow is slow
