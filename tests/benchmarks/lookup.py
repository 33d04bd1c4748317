"""Measures prompt lookup on recorded edits: tokens per pass and tokens/s compared with no draft, alternating.

    python -m tests.benchmarks.lookup [--model MODEL] [--rounds 3] [--only prose]

In each transcript the assistant returns an edited file twice; one is a story without repetition. The engine runs every
pass of the model over all rows, and only the sampled token is replaced by the transcript's, so any model shows the cost
of passes and the acceptance rate of a model that gave these replies.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.replies.opened_model import OpenedModel
from mycli.runtime.engine.scheduled import ScheduledSequence
from mycli.runtime.engine.sequence import Request, SequenceOutput
from mycli.runtime.errors import UserError
from mycli.runtime.open import open_model
from mycli.runtime.speculative.draft_length import LONG_LENGTHS, AdaptiveDraftLength
from mycli.runtime.speculative.lookup import PromptLookup
from mycli.runtime.speculative.speculator import ProposerSpeculator
from tests.support.paths import ROOT

STORY = (
    "Mia walked along the river until the houses ended. Nobody had told her how loud the water was in spring, or that "
    "herons stand so still. At the second bridge an old man mended a net. He asked what she was looking for, and when "
    "she said that she did not know yet, he laughed and gave her half of his bread. They talked about boats, about "
    "winters when the ice carried horses, and about a brother who had gone to sea. By noon the fog had lifted."
)
Edit = Callable[[str], str]


def source(name: str, lines: int) -> str:
    """Return the first lines of a file of this repository."""
    return "\n".join((ROOT / name).read_text().splitlines()[:lines]) + "\n"


@dataclass(frozen=True)
class Transcript:
    """Holds a text and the requested edits, one for each turn of the conversation."""

    text: str
    edits: Sequence[tuple[str, Edit]]

    def turns(self) -> list[tuple[str, str]]:
        """Return the prompt and the reply of each turn; prompts include all earlier turns, as a client sends them."""
        read, text, turns = f"Here is the file:\n{self.text}\n", self.text, []
        for question, edit in self.edits:
            text = edit(text)
            read += f"User: {question}\nAssistant: "
            turns.append((read, text))
            read += f"{text}\n"
        return turns


TRANSCRIPTS = {
    "rename, then a parameter": Transcript(
        source("runtime/cache/block_pool.py", 60),
        [
            ("Rename free to unused.", lambda text: text.replace("free", "unused")),
            ("Add a docstring at the top.", lambda text: '"""Blocks of the cache."""\n\n' + text),
        ],
    ),
    "a line in a configuration": Transcript(
        source("pyproject.toml", 50),
        [
            ("Set the version to 2.0.", lambda text: text.replace('version = "', 'version = "2.0.')),
            ("Require Python 3.12.", lambda text: text.replace("3.10", "3.12").replace("3.11", "3.12")),
        ],
    ),
    "many small edits": Transcript(
        source("runtime/utils/units.py", 45),
        [
            ("Use single quotes.", lambda text: text.replace('"', "'")),
            ("Undo that.", lambda text: text.replace("'", '"')),
        ],
    ),
    "prose": Transcript(STORY, [("Mia is a boy, Tom.", lambda text: text.replace("Mia", "Tom").replace("her", "him"))]),
    "a story (nothing repeats)": Transcript("", [("Tell me a story.", lambda text: STORY)]),
}


class ScriptedEngine(Engine):
    """Runs passes as usual, but takes the tokens from `script`, by position in the sequence, instead of sampling."""

    script: Sequence[int] = ()

    def _sample(
        self, samples: Sequence[tuple[ScheduledSequence, range]], drafted: dict[int, list[int]], logits: Tensor
    ) -> dict[int, list[int] | UserError]:
        found: dict[int, list[int] | UserError] = {}
        for part, _ in samples:
            number, at = part.sequence.id, len(part.sequence.tokens)
            guesses = drafted.get(number, [])
            right = self.script[at : at + len(guesses) + 1]
            kept = next((i for i, (a, b) in enumerate(zip(guesses, right, strict=False)) if a != b), len(guesses))
            found[number] = list(right[: kept + 1])
        return found

    def _advance_ahead(
        self, scheduled: Sequence[ScheduledSequence], steps: list[list[int]], seconds: float
    ) -> list[SequenceOutput]:
        at = len(scheduled[0].sequence.tokens)
        return super()._advance_ahead(scheduled, [[token] for token in self.script[at : at + len(steps)]], seconds)


def engine_of(opened: OpenedModel, drafts: bool, context: int) -> ScriptedEngine:
    from mycli.runtime.memory.cache_shape import CacheShape

    speculator = None
    if drafts:
        speculator = ProposerSpeculator(
            PromptLookup(), lambda: AdaptiveDraftLength(0.0, lengths=LONG_LENGTHS), pipelined=False
        )
    return ScriptedEngine(
        opened.model.runner, CacheShape.paged(context, context, 16), opened.model.vocabulary_size, speculator=speculator
    )


def run(engine: ScriptedEngine, opened: OpenedModel, transcript: Transcript, context: int) -> tuple[int, int, float]:
    """Return the tokens, the passes and the seconds of all replies of a transcript."""
    tokens = passes = 0
    seconds = 0.0
    encode = opened.tokenizer.encode
    for read, answer in transcript.turns():
        prompt, reply = encode(read, add_special=True), encode(answer, add_special=False)
        room = context - len(reply) - 8
        prompt = prompt[-room:] if len(prompt) > room else prompt
        engine.script = [*prompt, *reply]
        engine.submit(Request(tuple(prompt), limit=len(reply)))
        while engine.has_work:
            began = time.perf_counter()
            outputs = engine.step()
            if any(output.tokens for output in outputs):
                tokens += sum(len(output.tokens) for output in outputs)
                seconds, passes = seconds + time.perf_counter() - began, passes + 1
    return tokens, passes, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pico")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="transcripts whose name contains this text")
    parser.add_argument("--context", type=int, default=2048)
    options = parser.parse_args()
    opened = open_model(Path(options.model) if "/" in options.model else options.model, EngineConfig(device="cpu"))
    print("| transcript | tokens a pass | plain, tokens/s | with lookup, tokens/s | ratio |\n|---|---:|---:|---:|---:|")
    for name, transcript in TRANSCRIPTS.items():
        if options.only not in name:
            continue
        speeds: dict[bool, list[float]] = {False: [], True: []}
        per_pass = 0.0
        for _ in range(options.rounds):
            for drafts in (False, True):
                engine = engine_of(opened, drafts, options.context)
                tokens, passes, seconds = run(engine, opened, transcript, options.context)
                speeds[drafts].append(tokens / seconds)
                per_pass = tokens / passes
        ratio = statistics.median(b / a for a, b in zip(speeds[False], speeds[True], strict=True))
        plain, drafted = (statistics.median(speeds[drafts]) for drafts in (False, True))
        print(f"| {name} | {per_pass:.2f} | {plain:.1f} | {drafted:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
