"""Test what MLX cannot hold of a mixture: experts of a layer share bits and groups there."""

from pathlib import Path

import pytest

from mycli.runtime.errors import ModelError
from tests.support.exports import export_to
from tests.support.packed_folder import write_packed
from tests.support.packed_mixture import FIELDS


@pytest.mark.parametrize("different", [(), ("down_proj",), ("experts.3.down_proj",)], ids=["same", "all", "one"])
def test_experts_of_a_layer_are_quantized_alike(different: tuple[str, ...], tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "mixture", FIELDS, {**dict.fromkeys(different, 8), "": 4})
    if different == ("experts.3.down_proj",):
        with pytest.raises(ModelError, match=r"experts\.0\.down_proj.* are quantized differently"):
            export_to(folder, "mlx", tmp_path / "mlx", requantize=True)
    else:
        assert export_to(folder, "mlx", tmp_path / "mlx", requantize=True).nbytes > 0
