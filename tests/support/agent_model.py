"""Writes a random model for agents: long context, a template with tools, and replies that end after a few tokens.

Two dimensions of the hidden states depend only on the last token, so their columns of the output head act as a bias:
after a line break a word is the most likely token, after anything else the end token, and then the tokens that end
strings and objects where a grammar allows them.
"""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support.models import random_model

CONTEXT = 131_072
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
}
_TEMPLATE = Path(__file__).parent / "templates" / "agent.jinja"


def agent_model(folder: Path, end: float = 5.0) -> Path:
    """Write the model to a new folder; `end`: logit bias of tokens that end something, in nats."""
    random_model(folder, 0.05, **_SHAPE)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = _TEMPLATE.read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(folder, 4096)
    tensors = load_file(folder / "model.safetensors")
    (start,) = tokenizer.encode("\n", add_special=False)
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, :2] = 4.0
    embedding[start, 1] = -4.0
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:2] = 0.0  # keeps these two dimensions constant
    head = tensors["lm_head.weight"]
    head[:, :2] = 0.0
    unit = end / 8  # the normalized constants are about 6
    eos = tokenizer.encode("<|im_end|>", add_special=False, allow_special=True)
    for index in range(len(tokenizer.vocabulary)):
        piece = tokenizer.piece(index, first=False) or b""
        if index in eos:
            head[index, :2] = unit
        elif piece.startswith(b'"'):  # a string ends before a closing brace
            head[index, 0] = unit
        elif piece.startswith((b"}", b"]")):
            head[index, 0] = unit / 2
    (word,) = tokenizer.encode("The", add_special=False)
    head[word, 1] = -2 * unit
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
