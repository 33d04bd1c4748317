"""Faults while a model runs, from where they arise to the exit code (F5, F12)."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mycli.cli.batch_file import run_batch
from mycli.cli.command import Call, guarded
from mycli.cli.main import main
from mycli.cli.output import Output
from mycli.runtime.errors import ExitCode
from mycli.runtime.layers.transformer import Transformer


@pytest.mark.parametrize("fault", ["F12-device-assert", "F12-gpu-lost"])
def test_a_gpu_that_fails_ends_everything_with_one_line(fault: str, tmp_path: Path) -> None:
    """No further line of a batch is tried: after such an error every call on the device fails."""
    cause = {"F12-device-assert": "device-side assert triggered", "F12-gpu-lost": "unspecified launch failure"}[fault]
    asked = []

    def answer(prompt: object) -> dict[str, object]:
        asked.append(prompt)
        raise torch.AcceleratorError(f"CUDA error: {cause}\nCompile with `TORCH_USE_CUDA_DSA`")

    source = tmp_path / "in.jsonl"
    source.write_text('{"id": 1, "prompt": "a"}\n{"id": 2, "prompt": "b"}\n')
    stderr = io.StringIO()
    out = Output(stdout=io.StringIO(), stderr=stderr)
    code = guarded(out, lambda: run_batch(Call(out, offline=True), str(source), None, answer))
    assert code == ExitCode.RESOURCES and asked == ["a"]
    assert stderr.getvalue().splitlines()[0] == f"error: the GPU failed: CUDA error: {cause}"
    assert len(stderr.getvalue().splitlines()) == 2


@pytest.mark.parametrize("fault", ["F5-nan-logits"])
def test_logits_that_are_not_numbers_end_their_request_and_no_other(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = Transformer.forward
    passes = []

    def broken(self: Transformer, *arguments: Any) -> Any:
        logits = forward(self, *arguments)
        passes.append(logits)
        if logits is not None and len(passes) == 2:
            return torch.full_like(logits, torch.nan)
        return logits

    monkeypatch.setattr(Transformer, "forward", broken)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"id": {number}, "prompt": "Who are you?"}}\n' for number in (1, 2, 3)))
    with pytest.raises(SystemExit):
        main(["run", "pico", "--batch", str(source), "-n", "4"])
    first, *others = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "not a number" in first["error"]["message"] and first["error"]["exit_code"] == ExitCode.MODEL
    assert len(others) == 2 and all(one["text"] for one in others)
    passes.clear()
    with pytest.raises(SystemExit) as stop:
        main(["run", "pico", "Who are you?"])
    assert stop.value.code == ExitCode.MODEL and "not a number" in capsys.readouterr().err
