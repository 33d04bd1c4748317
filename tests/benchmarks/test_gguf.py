"""The tests of the GGUF round trip: equal tensors, tokens as text, and the row order of q and k in llama.cpp."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("gguf")

from tests.benchmarks import gguf as peer  # noqa: E402
from tests.support.paths import PICO  # noqa: E402  # imported only if gguf is installed


def test_written_and_read_back_is_the_same_model(tmp_path: Path) -> None:
    peer.write(PICO, tmp_path / "pico.gguf")
    peer.read(tmp_path / "pico.gguf", PICO, tmp_path / "back")
    back, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", PICO))
    assert back.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(back[name], tensor.float()), name
    assert peer.linears(tmp_path / "pico.gguf", PICO) == (32.0, {"F32": 6 * 7})


def test_rows_turned_by_one_angle_lie_together_in_the_file(tmp_path: Path) -> None:
    """The round trip cannot detect a wrong order of q and k for llama.cpp, since an identity would pass it too."""
    import gguf

    peer.write(PICO, tmp_path / "pico.gguf")
    tensors = {
        tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(tmp_path / "pico.gguf").tensors
    }
    original = load_file(PICO / "model.safetensors")
    for theirs, ours in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
        rows = original[f"model.layers.1.self_attn.{ours}.weight"].float()
        written = tensors[f"blk.1.{theirs}.weight"]
        head, pair, size = 1, 5, 64
        assert torch.equal(written[head * size + 2 * pair], rows[head * size + pair])
        assert torch.equal(written[head * size + 2 * pair + 1], rows[head * size + size // 2 + pair])
    assert torch.equal(tensors["blk.1.attn_v.weight"], original["model.layers.1.self_attn.v_proj.weight"].float())


def test_token_ids_as_text_are_one_character_each_and_no_space() -> None:
    text = peer.as_text(range(200_000))
    assert len(set(text)) == 200_000
    assert not any(letter.isspace() for letter in text)
    assert text.encode().decode() == text
