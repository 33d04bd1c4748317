"""The attention of prompts that is compiled and checked before a model runs on a GPU."""

import pytest
import torch

from mycli.runtime.engine.passes.plain import prompt_kinds
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import PromptKind
from mycli.runtime.kernels.triton.paged_attention import decline_prompts
from tests.support.published import published

CUDA = torch.device("cuda", 0)


def test_each_kind_of_attention_is_compiled_once() -> None:
    plain = PromptKind(CUDA, torch.bfloat16, torch.int8, 4, 128, False, False, False, False)
    assert prompt_kinds(published("Llama-3.1-8B"), CUDA, torch.bfloat16, "int8") == {plain}
    kinds = prompt_kinds(published("gemma-2-9b"), CUDA, torch.bfloat16, "auto")
    assert {(kind.window, kind.softcap, kind.head_dim, kind.stored) for kind in kinds} == {
        (window, True, 256, torch.bfloat16) for window in (False, True)
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine where the check fails")
def test_a_check_that_fails_is_a_reason() -> None:
    kind = PromptKind(CUDA, torch.bfloat16, torch.bfloat16, 1, 64, False, False, False, False)
    assert isinstance(decline_prompts(kind), Declined)
