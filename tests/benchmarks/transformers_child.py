"""Prints logits and greedy tokens of transformers with GPTQModel: python transformers_child.py REQUEST OUT.

Runs in an environment with GPTQModel. REQUEST is a JSON: `folders` by name, `prompts` (lists of ids, equally long),
`reply` tokens. OUT becomes a safetensors file: for each folder NAME/logits fp32 [prompts, prompt, vocabulary] and
NAME/tokens int64 [prompts, reply]. For a folder that cannot be loaded it prints a line with its name and the reason.
Imports nothing of this project.
"""

import json
import sys
from pathlib import Path
from typing import Any


def settings(folder: Path) -> Any:
    """Return the plain torch kernels of GPTQModel, the only ones that compute in fp32."""
    from transformers import AwqConfig, GPTQConfig

    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    known = {"bits": found["bits"], "group_size": found["group_size"], "backend": "torch"}
    return AwqConfig(**{**known, "backend": "torch_awq"}) if found["quant_method"] == "awq" else GPTQConfig(**known)


def main() -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    request = json.loads(Path(sys.argv[1]).read_text())
    tokens = torch.tensor(request["prompts"])
    results: dict[str, torch.Tensor] = {}
    for name, folder in request["folders"].items():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, device_map="cpu", quantization_config=settings(Path(folder))
            )
            model = model.eval()
            with torch.no_grad():
                logits = model(tokens).logits.float()
                replies = model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    do_sample=False,
                    max_new_tokens=request["reply"],
                    min_new_tokens=request["reply"],
                    pad_token_id=0,
                )
        except Exception as error:  # GPTQModel may raise anything
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
            continue
        results[f"{name}/logits"] = logits.contiguous()
        results[f"{name}/tokens"] = replies[:, tokens.shape[1] :].contiguous()
    save_file(results, sys.argv[2])


if __name__ == "__main__":
    main()
