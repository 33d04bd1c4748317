"""Builds random models with random MTP heads, and a slow reference of their proposals."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.families import CASES, enliven, make


@dataclass(frozen=True)
class Reference:
    """Runs the model and its head from transformers' modules, with no state kept between calls."""

    model: transformers.PreTrainedModel
    head: nn.ModuleDict

    @torch.no_grad()
    def draft(self, text: list[int], count: int) -> list[tuple[int, float]]:
        """Return greedy tokens after `text`, each with its margin over the second.

        Position i combines h_i, which the model's head reads, with the embedding of token i + 1; both pass through one
        layer and a norm. Where h is unknown, the output of the previous position is used instead (arXiv 2412.19437,
        2.2).
        """
        states = self.model.model(torch.tensor([text[:-1]])).last_hidden_state
        tokens, found = text[1:], []
        for _ in range(count):
            embedded = self.head["pre_fc_norm_embedding"](self.model.model.embed_tokens(torch.tensor([tokens])))
            x = self.head["fc"](torch.cat((embedded, self.head["pre_fc_norm_hidden"](states)), dim=-1))
            places = torch.arange(x.shape[1])[None]
            turned = self.model.model.rotary_emb(x, places)
            mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
            x = self.head["layer"](x, position_embeddings=turned, attention_mask=mask)
            made = self.head["norm"](x[:, -1:])
            best = self.model.lm_head(made)[0, 0].topk(2)
            found.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
            states, tokens = torch.cat((states, made), dim=1), [*tokens, found[-1][0]]
        return found


def make_with_head(folder: Path, case: str, **changes: Any) -> Reference:
    """Save a random model to `folder` with a random MTP head, under the published tensor names."""
    model_type, own = CASES[case]
    model = make(folder, model_type, {**own, **changes})
    full = model.config.layer_types.index("full_attention")
    template = model.model.layers[full]
    hidden = model.config.hidden_size
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    parts = {name: type(model.model.norm)(hidden) for name in norms}
    parts |= {"fc": nn.Linear(2 * hidden, hidden, bias=False), "layer": type(template)(model.config, full)}
    head = nn.ModuleDict(parts).eval()
    enliven(head)
    tensors = load_file(folder / "model.safetensors")
    stacked = model_type == "qwen3_5_moe_text"
    for name, tensor in head.state_dict().items():
        stored = f"mtp.{name.replace('layer.', 'layers.0.', 1)}"
        if ".experts." in name and not stacked:
            prefix, _, kind = stored.rpartition(".")
            for index, expert in enumerate(tensor):
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
                for own_name, part in ({"down_proj": expert} if kind == "down_proj" else parts).items():
                    tensors[f"{prefix}.{index}.{own_name}.weight"] = part.clone()
        else:
            tensors[stored] = tensor.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Reference(model, head)


def make_that_predicts(folder: Path, case: str, noise: float, **changes: Any) -> None:
    """Save a model whose next token is a function of the last one, with an MTP head that knows the function.

    The layers add zero to the residual stream, though they are computed: each token's embedding reaches the output
    projection, whose row of the following token matches it. The head passes on the embedding of the token after each
    state, so that it predicts the model's output; `noise` times a random matrix, of the scale of the passed embedding,
    makes it miss some.
    """
    make_with_head(folder, case, **{**changes, "tie_word_embeddings": False})
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) or "norm" in name.rpartition(".")[0]:
            tensor.zero_()  # the norm weights are 1 + w
    embedding, head, fc = (tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight", "mtp.fc.weight"))
    vocabulary, hidden = embedding.shape
    embedding.copy_(torch.randn(vocabulary, hidden, generator=generator))
    order = torch.randperm(vocabulary, generator=generator)
    head[order] = embedding * (12 / hidden)  # gives the following token a logit of about 12
    fc.zero_()
    fc[:, :hidden] = torch.eye(hidden) + noise / hidden**0.5 * torch.randn(hidden, hidden, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
