"""Generates the tables of docs/families.md: `python -m tests.support.family_tables docs/families.md`."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from mycli.cli.reasons import reason
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.passes.captured import decline_captured
from mycli.runtime.engine.passes.fused_models import decline_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.multimodal_types import FAMILIES, TEXT_PARTS
from mycli.runtime.models.registry import REFUSED, families, parse_config
from mycli.runtime.utils.json_fields import Fields
from tests.support.families import CASES, EMBEDDING, make, reference_config
from tests.support.families import PUBLISHED as RENAMED
from tests.support.family_parts import SMALL
from tests.support.fused_launches import launches_of_layer
from tests.support.published import PUBLISHED, published

_CELL = 20  # names
MARKS = ("<!-- from the code: make docs -->", "<!-- end -->")


def _models(family: str) -> str:
    """Return the first paragraph of the family's docstring as a table cell."""
    text = importlib.import_module(f"mycli.runtime.models.families.{family}").__doc__ or ""
    return " ".join(text.split("\n\n")[0].split()).rstrip(".").replace("|", "\\|")


def gpu_pass(config: ModelConfig) -> str:
    """Describe the decode pass of a packed model of this family on a GPU, and why no faster one is used."""
    fused, captured = decline_config(config), decline_captured(config)
    if fused is None:
        counts = sorted({sum(launches_of_layer(spec).values()) for spec in config.layer_specs})
        return f"fused, {' and '.join(map(str, counts))} launches per layer"
    name = "captured" if captured is None else "plain"
    return f"{name}: {reason(captured or fused)}"


def _small(family: str) -> Iterator[ModelConfig]:
    """Yield the small configurations of a family's tests."""
    for model_type, changes in CASES.values():
        if model_type.removesuffix("_text") != family.removesuffix("_text"):
            continue
        if model_type in RENAMED:  # their published config is made with their files
            with TemporaryDirectory() as folder:
                make(Path(folder), model_type, changes)
                yield open_model_folder(Path(folder)).config
        else:
            saved = {**reference_config(model_type, changes).to_diff_dict(), "model_type": model_type}
            yield parse_config(Fields(saved, "config.json"))
    if family in EMBEDDING:  # has tests of its own
        yield parse_config(Fields({**SMALL, "model_type": family}, "config.json"))


def tables() -> str:
    """Return the tables of supported families, multimodal folders and refused types."""
    configs = {name: published(name) for name in PUBLISHED}
    lines = ["| `model_type` | models | GPU pass | published configs tested |", "|---|---|---|---|"]
    for family in families():
        tested = {name: config for name, config in configs.items() if config.model_type == family}
        passes = sorted(set(map(gpu_pass, tested.values() or _small(family))))
        lines.append(f"| `{family}` | {_models(family)} | {'; '.join(passes)} | {', '.join(tested)} |")
    lines += [
        "",
        "Multimodal folders, and `internlm2`, run as their text model:",
        "",
        "| text model unless the folder names another | `model_type` of folders |",
        "|---|---|",
    ]
    texts = {outer: FAMILIES.get(text, text) for outer, text in TEXT_PARTS.items()}
    for family in sorted(set(texts.values())):
        folders = ", ".join(f"`{outer}`" for outer in sorted(texts) if texts[outer] == family)
        lines.append(f"| `{family}` | {folders} |")
    lines += ["", "| refused because | `model_type` |", "|---|---|"]
    for why in sorted(set(REFUSED.values())):
        names = [f"`{family}`" for family in sorted(REFUSED) if REFUSED[family] == why]
        lines += [f"| {why} | {', '.join(names[at : at + _CELL])} |" for at in range(0, len(names), _CELL)]
    return "\n".join(lines)


def with_tables(text: str) -> str:
    pattern = re.escape(MARKS[0]) + ".*" + re.escape(MARKS[1])
    return re.sub(pattern, lambda _: f"{MARKS[0]}\n{tables()}\n{MARKS[1]}", text, flags=re.S)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text()))
