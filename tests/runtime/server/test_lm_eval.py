"""Test the requests of lm-eval's `local-completions`: loglikelihoods equal those of `eval` to 1e-4."""

import math

import pytest
import torch

from mycli.quant.evaluate import TokenWindows, evaluate
from mycli.quant.layer_streaming import StreamedModel
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from tests.support.paths import PICO
from tests.support.served import Served


def test_loglikelihoods_are_those_of_eval(served: Served) -> None:
    folder = open_model_folder(PICO)
    text = (PICO.parent / "held-out.txt").read_text(encoding="utf-8")[:1500]
    ids = folder.tokenizer().encode(text, add_special=True)[: 3 * 64]
    windows = torch.tensor(ids).view(3, 64)
    expected = evaluate(
        StreamedModel(folder, Placement(torch.device("cpu"), torch.float32)), TokenWindows(windows, True, "")
    )
    body = {
        "model": "pico",
        "prompt": windows.tolist(),
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "temperature": 0,
        "seed": 1234,
    }
    choices = served.ask("POST", "/v1/completions", body).json["choices"]
    assert [one["index"] for one in choices] == [0, 1, 2]
    total = 0.0
    for one, row in zip(choices, windows.tolist(), strict=True):
        told = one["logprobs"]["token_logprobs"][:-1]
        assert told[0] is None and len(told) == len(row)
        total += math.fsum(told[1:])
        tops = one["logprobs"]["top_logprobs"][1:-1]
        assert all(max(top.values()) >= value for top, value in zip(tops, told[1:], strict=True))
    assert math.exp(-total / (3 * 63)) == pytest.approx(expected.perplexity.value, rel=1e-4)
