"""Generates the tables of docs/families.md: `python -m tests.support.family_tables docs/families.md`."""

import importlib
import re
import sys
import textwrap
from pathlib import Path

from mycli.cli.reasons import reason
from mycli.runtime.engine.passes.fused import decline_config
from mycli.runtime.models.multimodal import TEXT_PARTS
from mycli.runtime.models.registry import REFUSED, families
from tests.support.published import PUBLISHED, published

MARKS = ("<!-- from the code: make docs -->", "<!-- end -->")


def _models(family: str) -> str:
    """The first paragraph of the family's docstring, as a table cell."""
    text = importlib.import_module(f"mycli.runtime.models.families.{family}").__doc__ or ""
    return " ".join(text.split("\n\n")[0].split()).rstrip(".").replace("|", "\\|")


def tables() -> str:
    """The supported families, the multimodal folders and the refused types."""
    configs = {name: published(name) for name in PUBLISHED}
    lines = ["| `model_type` | models | fused GPU pass | published configs tested |", "|---|---|---|---|"]
    for family in families():
        tested = {name: config for name, config in configs.items() if config.model_type == family}
        answers = map(decline_config, tested.values())
        fused = sorted({"yes" if declined is None else f"no: {reason(declined)}" for declined in answers})
        lines.append(f"| `{family}` | {_models(family)} | {'; '.join(fused)} | {', '.join(tested)} |")
    outer = ", ".join(f"`{name}`" for name in sorted(TEXT_PARTS))
    lines += ["", "These multimodal folders run as their text model:", textwrap.fill(f"{outer}.", 100)]
    lines += ["", "| refused `model_type` | reason |", "|---|---|"]
    lines += [f"| `{family}` | {why} |" for family, why in sorted(REFUSED.items())]
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """Replace the tables of the page `text` by the current ones."""
    pattern = re.escape(MARKS[0]) + ".*" + re.escape(MARKS[1])
    return re.sub(pattern, lambda _: f"{MARKS[0]}\n{tables()}\n{MARKS[1]}", text, flags=re.S)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text()))
