"""docs/families.md between its marks, from the code: `python -m tests.support.family_tables docs/families.md`."""

import importlib
import re
import sys
from pathlib import Path

from mycli.runtime.engine.unfused import unfused
from mycli.runtime.models.multimodal import TEXT_PARTS
from mycli.runtime.models.registry import REFUSED, families
from tests.support.published import PUBLISHED, published

MARKS = ("<!-- from the code: make docs -->", "<!-- end -->")


def _about(family: str) -> str:
    """The first sentence of its file, without the name before the colon."""
    said = importlib.import_module(f"mycli.runtime.models.families.{family}").__doc__ or ""
    return " ".join(said.split("\n\n")[0].split()).rstrip(".").replace("|", "\\|")


def tables() -> str:
    """Both tables: what runs, what is refused."""
    models = {name: published(name) for name in PUBLISHED}
    lines = ["| `model_type` | what it is | the fused GPU pass | counted in the tests |", "|---|---|---|---|"]
    for family in families():
        mine = {name: config for name, config in models.items() if config.model_type == family}
        reasons = {unfused(config) for config in mine.values()}
        fused = "; ".join(sorted("yes" if reason is None else reason.split(": ")[-1] for reason in reasons))
        lines.append(f"| `{family}` | {_about(family)} | {fused} | {', '.join(mine)} |")
    lines += ["", "Folders that also see or hear run as their text part: "]
    lines[-1] += ", ".join(f"`{outer}`" for outer in sorted(TEXT_PARTS)) + "."
    lines += ["", "| refused | because |", "|---|---|"]
    lines += [f"| `{family}` | {reason} |" for family, reason in sorted(REFUSED.items())]
    return "\n".join(lines)


def written(text: str) -> str:
    """`text` with the tables as they are now."""
    pattern = re.escape(MARKS[0]) + ".*" + re.escape(MARKS[1])
    return re.sub(pattern, lambda _: f"{MARKS[0]}\n{tables()}\n{MARKS[1]}", text, flags=re.S)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text()))
