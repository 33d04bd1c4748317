"""Test encoders against transformers in fp32: hidden states of texts alone and together, and the names in files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.errors import ModelError
from mycli.runtime.layers.bidirectional import encode_texts
from mycli.runtime.layers.rope import frequencies
from mycli.runtime.models.part_spec import RopeScaling
from tests.support.embedding_models import cross_encoder, encoder
from tests.support.models import CPU

TEXTS = [list(range(5, 90)), list(range(6, 306)), [7], [9, 8, 7, 6, 5, 9, 9], list(range(200, 233))]
CASES = {
    "bert": {},
    "bert-tanh-gelu-4-types-hidden-48": {"hidden_act": "gelu_new", "type_vocab_size": 4, "hidden_size": 48},
    "roberta": {},
    "roberta-padding-0": {"pad_token_id": 0, "type_vocab_size": 1},
    "xlm-roberta": {},
    "nomic_bert": {},
    "mpnet": {},
    "gte": {},
    "gte-no-types-tanh-gelu": {"type_vocab_size": 0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 48},
    "eurobert": {},
    "eurobert-2-key-heads-biases": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "jina_embeddings_v3": {},
    "jina_embeddings_v3-2-types-theta": {
        "type_vocab_size": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "modernbert-window-16": {"local_attention": 16, "num_hidden_layers": 4},
    "modernbert-silu-biases": {
        **{"local_attention": 9, "hidden_activation": "silu", "norm_bias": True, "mlp_bias": True},
        **{"attention_bias": True, "global_attn_every_n_layers": 2},
    },
}


def states(folder: Path, texts: list[list[int]]) -> list[Tensor]:
    model = load_model(open_model_folder(folder), CPU).model
    return encode_texts(model, texts, ModelRunner(model).rope(512))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_states_are_those_of_transformers_alone_and_together(case: str, tmp_path: Path) -> None:
    model_type = "xlm-roberta" if case == "xlm-roberta" else case.split("-")[0]
    folder = encoder(tmp_path / "model", model_type, **CASES[case])
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32)
    together = states(folder, TEXTS)
    for text, found in zip(TEXTS, together, strict=True):
        expected = reference(torch.tensor([text])).last_hidden_state[0]
        assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()
        assert torch.equal(states(folder, [text])[0], found)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "xlm-roberta", "mpnet", "gte", "jina_embeddings_v3"])
def test_files_of_a_class_with_a_head_are_read(model_type: str, tmp_path: Path) -> None:
    """Tensors have the prefix of the class there, and heads are ignored; that of a classifier counts."""
    folder = encoder(tmp_path / "model", model_type)
    expected = states(folder, TEXTS)
    AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    names = open_model_folder(folder).manifest.tensors
    assert all(name.startswith("model.") for name in names)
    assert all(map(torch.equal, states(folder, TEXTS), expected))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSequenceClassification"]}))
    with pytest.raises(ModelError, match="'BertForSequenceClassification' has 2 labels: only rerankers"):
        open_model_folder(folder)


def test_eurobert_of_a_class_with_a_head(tmp_path: Path) -> None:
    """The head of the masked language model is ignored, a classifier is refused."""
    folder = encoder(tmp_path / "model", "eurobert")
    expected = states(folder, TEXTS)
    AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    assert all(map(torch.equal, states(folder, TEXTS), expected))
    classifier = cross_encoder(tmp_path / "classifier", "eurobert")
    with pytest.raises(ModelError, match="classifier"):
        load_model(open_model_folder(classifier), CPU)


def test_nomic_embed_as_published(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "model", "nomic_bert")
    expected = states(folder, TEXTS)
    names = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    names |= {"intermediate_size": "n_inner", "layer_norm_eps": "layer_norm_epsilon"}
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    assert rope["rope_theta"] == 1000
    unpublished = {"head_dim", "hidden_act", "mlp_bias", "attention_bias"}
    published = {names.get(key, key): value for key, value in config.items() if key not in unpublished}
    published |= {"activation_function": "swiglu", "rotary_emb_base": 1000, "max_trained_positions": 514}
    fixed: dict[str, Any] = {"rotary_emb_fraction": 1.0, "causal": False, "parallel_block": False, "prenorm": False}
    fixed |= {"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False}
    fixed |= {"rotary_emb_interleaved": False, "use_rms_norm": False}
    (folder / "config.json").write_text(json.dumps({**published, **fixed}))
    assert all(map(torch.equal, states(folder, TEXTS), expected))
    for key, value in fixed.items():
        other = not value if isinstance(value, bool) else 0.5
        (folder / "config.json").write_text(json.dumps({**published, key: other}))
        with pytest.raises(ModelError, match=key):
            open_model_folder(folder)


def test_modernbert_as_published(tmp_path: Path) -> None:
    """With a theta for each kind of layer, and with the head of training."""
    folder = encoder(tmp_path / "model", "modernbert", local_attention=16, num_hidden_layers=4)
    expected = states(folder, TEXTS)
    AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("rope_parameters")["sliding_attention"]["rope_theta"] == 10000
    del config["layer_types"]
    published = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    published |= {"layer_norm_eps": 1e-12, "position_embedding_type": "absolute"}  # which nothing reads
    (folder / "config.json").write_text(json.dumps({**config, **published}))
    assert all(map(torch.equal, states(folder, TEXTS), expected))
    (folder / "config.json").write_text(json.dumps({**config, **published, "local_rope_theta": 160000.0}))
    assert not torch.equal(states(folder, TEXTS)[0], expected[0])


def test_parameters_and_the_longest_text(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "model", "xlm-roberta")
    config = open_model_folder(folder).config
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32)
    assert config.parameters() == sum(
        tensor.numel() for name, tensor in reference.named_parameters() if not name.startswith("pooler.")
    )
    assert config.max_context == 512
    model = load_model(open_model_folder(folder), CPU).model
    assert model.nbytes == 4 * config.parameters()


def test_gte_as_published(tmp_path: Path) -> None:
    """With the names of its own code, NTK scaling, and a head for tokens, which is not read."""
    theta, factor, head_dim = 20000.0, 8.0, 16
    scaling = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / head_dim)}
    folder = encoder(tmp_path / "model", "gte", rope_parameters=scaling)
    expected = states(folder, TEXTS)
    tensors = {f"new.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    assert "new.encoder.layer.0.mlp.up_gate_proj.weight" in tensors
    save_file(tensors | {"classifier.weight": torch.ones(1, 64)}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    published = {"model_type": "new", "position_embedding_type": "rope", "layer_norm_type": "layer_norm"}
    published |= {"rope_theta": theta, "rope_scaling": {"type": "ntk", "factor": factor}, "pack_qkv": True}
    (folder / "config.json").write_text(json.dumps({**config, **published}))
    for text, found, wanted in zip(TEXTS, states(folder, TEXTS), expected, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5), len(text)
    # The frequencies of https://kexue.fm/archives/9706, equation 6.
    rope = open_model_folder(folder).config.layer_rope(0)
    assert rope is not None
    assert (rope.theta, rope.scaling) == (theta, RopeScaling("ntk", factor))  # as `show` says
    read = frequencies(rope, 0, 0, torch.device("cpu")).tolist()
    ntk = [(theta * factor) ** (-2 * pair / head_dim) / factor ** (2 / head_dim) for pair in range(head_dim // 2)]
    assert read == pytest.approx(ntk)
    for key in ("logn_attention_scale", "position_embedding_type"):
        (folder / "config.json").write_text(json.dumps({**config, **published, key: "absolute"}))
        with pytest.raises(ModelError, match=key):
            open_model_folder(folder)


def test_jina_embeddings_of_their_own_code_are_refused_with_what_to_use(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "model", "xlm-roberta")
    config = json.loads((folder / "config.json").read_text())
    published = {"position_embedding_type": "rotary", "rotary_emb_base": 20000.0, "lora_adaptations": ["separation"]}
    (folder / "config.json").write_text(json.dumps({**config, **published}))
    with pytest.raises(ModelError, match="'rotary' .* Jina Embeddings 3") as refused:
        open_model_folder(folder)
    assert refused.value.hint is not None and "-hf" in refused.value.hint
