"""Test models with 8-bit activations: enabled by the model card, with the same bits per row in any pass."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.disk_prefix_cache import identity
from mycli.runtime.engine.loading.activations import activation_choice
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.errors import Declined
from mycli.runtime.hub.store import RECORD
from mycli.runtime.kernels.cpu.library.build import Native, native
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.quantization.activations import Activations
from mycli.runtime.utils.dtypes import PromptCopy
from tests.support.packed_folder import write_packed
from tests.support.random_packed import mixture_fields

pytestmark = pytest.mark.skipif(isinstance(native(), Declined), reason=f"no native code here: {native()}")
TOKENS = [int(token) for token in torch.randint(0, 4096, (70,), generator=torch.Generator().manual_seed(0))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = mixture_fields(layers=2, hidden=128, experts=8, size=64)
    fields |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    return write_packed(tmp_path_factory.mktemp("model") / "out", fields, {"mlp": 4, "self_attn": 8})


def load(folder: Path, kind: Activations = "auto", dtype: torch.dtype = torch.bfloat16) -> ModelRunner:
    return load_model(open_model_folder(folder), Placement(torch.device("cpu"), dtype, activations=kind))


def logits(runner: ModelRunner, cuts: list[int]) -> torch.Tensor:
    cache = runner.make_cache(CacheShape.contiguous(len(TOKENS)))
    parts, start = [], 0
    for end in cuts:
        parts.append(runner.run([Chunk(TOKENS[start:end], start, (0,), end - start)], cache))
        start = end
    return torch.cat(parts)


def test_a_row_has_its_bits_in_any_pass(folder: Path) -> None:
    """Read a prompt of 70 tokens whole, in chunks near the kernel limits, and token by token."""
    runner = load(folder, "8")
    whole = logits(runner, [70])
    assert torch.equal(whole, logits(runner, [1, 9, 33, 58, 70]))
    assert torch.equal(whole, logits(runner, list(range(1, 71))))
    assert not torch.equal(whole, logits(load(folder, "16"), [70]))


def test_without_a_card_nothing_changes(folder: Path) -> None:
    auto, sixteen = load(folder), load(folder, "16")
    assert auto.activations is not None and auto.activations.bits == 16
    assert auto.activations.reason.code == "activations-not-measured"
    assert torch.equal(logits(auto, [70]), logits(sixteen, [70]))
    assert load(folder, "8", torch.float32).activations is None


def test_auto_follows_the_card(folder: Path, tmp_path: Path) -> None:
    """Check for 8-bit activations next to the 4-bit experts and 16-bit ones next to the 8-bit attention."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).symlink_to(path)
    library = native()
    assert isinstance(library, Native)
    (copy / RECORD).write_text(json.dumps({"card": {"activations": {"16": 0.01, "8": 0.0101}}}))
    auto, eight, sixteen = (load(copy, kind) for kind in ("auto", "8", "16"))
    found = logits(auto, [70])
    assert auto.activations is not None
    if library.isa == "amx":
        assert torch.equal(found, logits(sixteen, [70]))
    else:
        assert auto.activations.bits == 8 and auto.activations.widest == 6
        assert not torch.equal(found, logits(sixteen, [70])) and not torch.equal(found, logits(eight, [70]))
    (copy / RECORD).write_text("{")  # a damaged model card does not prevent loading
    assert torch.equal(logits(load(copy), [70]), logits(sixteen, [70]))


def test_with_portable_bits_a_file_has_16_bits_unless_others_are_chosen(tmp_path: Path) -> None:
    """A measurement depends on the processor."""
    (tmp_path / "a.gguf").touch()
    folder: Any = SimpleNamespace(path=tmp_path / "a.gguf", packings={"a": None})
    auto, eight = (
        activation_choice(folder, Placement(torch.device("cpu"), torch.bfloat16, activations=kind, portable=True))
        for kind in get_args(Activations)
        if kind != "16"
    )
    assert auto is not None and (auto.bits, auto.reason.code) == (16, "activations-portable")
    assert eight is not None and eight.bits == 8


def test_prefixes_of_another_precision_are_not_restored(folder: Path) -> None:
    opened = open_model_folder(folder)
    runner = load(folder, "16")
    identities = {identity(opened, load(folder, "8"), 70), identity(opened, runner, 70)}
    kinds: tuple[PromptCopy, ...] = "16bit", "fp8"
    for kind in kinds:
        runner.model.keep_prompt_copies(kind)
        identities.add(identity(opened, runner, 70))
    assert len(identities) == 4
