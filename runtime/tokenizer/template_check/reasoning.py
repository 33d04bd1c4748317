"""Checks reasoning: whether that of earlier replies stays in the prompt, and until when."""

from collections.abc import Iterator

from mycli.runtime.errors import UserError
from mycli.runtime.tokenizer.template_check.finding import Finding
from mycli.runtime.tokenizer.template_check.probe import THOUGHT, Probe, assistant, calling, result, user


def check_reasoning(probe: Probe) -> Iterator[Finding]:
    """Check a reply with reasoning as the last message, before a new question, and inside a tool loop."""
    if not probe.has_reasoning:
        return
    reply = assistant(0, reasoning=THOUGHT)
    last = THOUGHT in probe.text([user(0), reply])
    later = THOUGHT in probe.text([user(0), reply, user(1)], more=True)
    if not last and not later:
        yield Finding("reasoning-dropped")
        return
    if last and not later:
        yield Finding("reasoning-dropped-later")
    if not probe.has_tools:
        return
    try:
        loop = [user(0), calling(1, THOUGHT), result()]
        if THOUGHT not in probe.text(loop, more=True, tools=True):
            yield Finding("reasoning-dropped-in-loop")
    except UserError:
        return  # refused calls are reported by the check of tools
