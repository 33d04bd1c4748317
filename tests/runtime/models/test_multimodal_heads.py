"""Test which head a multimodal folder has: tied or its own, as transformers decides from both configs and the files."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.initialization import no_init_weights

from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError
from mycli.runtime.models.multimodal import TextPart
from mycli.runtime.models.multimodal_types import NEVER_TIED, TEXT_PARTS
from mycli.runtime.models.registry import parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.engines import whole
from tests.support.family_parts import SMALL
from tests.support.models import CPU
from tests.support.multimodal_configs import CONFIGS, UNTESTED
from tests.support.multimodal_families import make_folder

pytestmark = pytest.mark.usefixtures("quick_configs")

STATED = (None, True, False)
TIE = "tie_word_embeddings"


def stated(config: dict[str, Any], value: bool | None) -> dict[str, Any]:
    rest = {key: item for key, item in config.items() if key != TIE}
    return rest if value is None else {**rest, TIE: value}


def tied_by_transformers(raw: dict[str, Any], known: dict[str, bool]) -> bool:
    """Return whether transformers ties the head; `known` holds the answers for completed configs."""
    config = type(transformers.AutoConfig.for_model(raw["model_type"])).from_dict(json.loads(json.dumps(raw)))
    completed = config.to_json_string(use_diff=False)
    if completed not in known:
        auto = transformers.AutoModelForMultimodalLM
        with torch.device("meta"), no_init_weights():
            model = auto._model_mapping[type(config)]._from_config(config)
        known[completed] = any("lm_head" in name for name in model.all_tied_weights_keys)
    return known[completed]


def test_every_wrapper_is_covered() -> None:
    assert {outer for outer, *_ in CONFIGS.values()} | UNTESTED == TEXT_PARTS.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_disagree(name: str) -> None:
    wrapper, inner, text, sections = CONFIGS[name]
    known = dict[str, bool]()
    for outer, section in itertools.product(STATED, repeat=2):
        text_config = stated({"model_type": inner, **SMALL, "intermediate_size": 96, **text}, section)
        raw = stated({"model_type": wrapper, "text_config": text_config, **sections}, outer)
        expected = tied_by_transformers(raw, known)
        part = TextPart.from_config(Fields(raw, "config.json"))
        assert parse_config(part.with_tensors(["lm_head.weight"]).config).tie_embeddings == (
            expected and not part.head_by_files
        ), (outer, section)
        # Files of transformers 4, which read the section, have no head; transformers 5 would use random weights.
        legacy = section is True and (outer is None or wrapper in NEVER_TIED)
        assert parse_config(part.with_tensors(["model.norm.weight"]).config).tie_embeddings == (expected or legacy), (
            outer,
            section,
        )


def folder(path: Path, name: str, outer: bool | None, section: bool | None, *, head: bool) -> None:
    """Save a model with these values in its configs, with or without a head that differs from the embedding."""
    make_folder(path, name)
    raw = json.loads((path / "config.json").read_text())
    raw = stated({**raw, "text_config": stated(raw["text_config"], section)}, outer)
    (path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(path / "model.safetensors")
    embedding = next(tensor for key, tensor in tensors.items() if key.endswith("embed_tokens.weight"))
    generator = torch.Generator().manual_seed(7)
    tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith("lm_head.weight")}
    if head:
        tensors["lm_head.weight"] = torch.randn(embedding.shape, generator=generator) * embedding.std()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "outer", "section", "head"),
    [
        ("qwen3_vl_moe", False, True, True),
        ("qwen3_vl_moe", True, False, False),
        ("qwen3_vl", None, True, True),
        ("mistral3", None, None, True),
        ("mistral3", None, None, False),
        ("internvl", None, False, False),
        ("gemma3", None, None, True),
        ("gemma3", False, True, True),
        ("lfm2_vl", None, True, True),
        ("llava", False, True, False),
        ("llava", None, False, True),
    ],
)
def test_logits_come_from_the_head_of_transformers(
    name: str, outer: bool | None, section: bool | None, head: bool, tmp_path: Path
) -> None:
    folder(tmp_path, name, outer, section, head=head)
    load: Any = transformers.AutoModelForImageTextToText.from_pretrained
    reference = load(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    opened = open_model_folder(tmp_path)
    assert opened.config.tie_embeddings == (not head) and opened.raw.values[TIE] == (not head)
    tokens = torch.randint(4, 90, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected: Tensor = reference(tokens).logits
    actual = whole(load_model(opened, CPU).model, tokens)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_text_config_of_transformers_4_ties_where_no_head_is_stored(tmp_path: Path) -> None:
    folder(tmp_path, "qwen3_vl", None, True, head=False)
    opened = open_model_folder(tmp_path)
    assert opened.config.tie_embeddings
    opened.checked_manifest()


def test_an_untied_head_that_is_missing_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, "qwen3_vl_moe", False, True, head=False)
    with pytest.raises(ModelError, match="lm_head.weight: missing") as caught:
        open_model_folder(tmp_path).checked_manifest()
    assert TIE in caught.value.hint


def test_the_key_of_lfm2_vl(tmp_path: Path) -> None:
    raw = {"model_type": "lfm2_vl", "tie_embedding": False, TIE: True, "text_config": {"tie_embedding": True}}
    values = TextPart.from_config(Fields(raw, "config.json")).config.values
    assert values[TIE] is False and "tie_embedding" not in values


def test_a_head_under_two_names_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, "mistral3", False, None, head=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {**tensors, "language_model.lm_head.weight": tensors["lm_head.weight"] + 1}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ModelError, match=r"language_model\.lm_head\.weight and lm_head\.weight: one tensor"):
        open_model_folder(tmp_path).checked_manifest()


def test_headers_of_a_remote_model_count(tmp_path: Path) -> None:
    folder(tmp_path, "mistral3", None, None, head=True)
    tensors = Manifest.open(tmp_path).tensors
    blank = tensors["language_model.model.norm.weight"]
    (tmp_path / "model.safetensors").unlink()
    assert not open_model_folder(tmp_path, tensors).config.tie_embeddings
    assert open_model_folder(tmp_path, {"language_model.model.norm.weight": blank}).config.tie_embeddings
