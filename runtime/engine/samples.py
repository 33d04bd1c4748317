"""Several replies to one prompt, drawn side by side after one prefill.

Knows text, as `runtime.engine.completion` does, of which this is the form for more than one sequence; does not stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mycli.runtime.engine.completion import Assistant, FinishReason
from mycli.runtime.engine.generate import Session
from mycli.runtime.sampling.grammar import Grammar
from mycli.runtime.sampling.logprobs import LogprobRecorder, TokenLogprob
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.tokenizer.stream import StopMatcher, StreamDecoder


@dataclass
class Sample:
    """One reply: its text, the ids drawn without the end token, why it ended, and its logprobs where wanted."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)


def draw_samples(
    assistant: Assistant,
    session: Session,
    prompt: Sequence[int],
    sampling: SamplingParams,
    count: int,
    limit: int,
    *,
    stops: Sequence[str] = (),
    grammar: Grammar | None = None,
    top: int | None = None,
) -> list[Sample]:
    """`count` replies of at most `limit` tokens; `top` None: no logprobs. `session` then holds the prompt.

    Raises UsageError for a prompt that does not fit the session.
    """
    samples = [Sample() for _ in range(count)]
    decoders = [StreamDecoder(assistant.tokenizer) for _ in samples]
    matchers = [StopMatcher(stops) for _ in samples]
    recorder = None if top is None else LogprobRecorder(top, count)
    session.prefill(prompt)
    branches = session.branch(count, len(prompt) + limit)
    sampler = Sampler(
        sampling,
        assistant.vocabulary_size,
        assistant.model.device,
        count,
        constraint=None if grammar is None else grammar.start(count),
        recorder=recorder,
    )
    for row in branches.generate(prompt, sampler, limit):
        for sample, decoder, matcher, token in zip(samples, decoders, matchers, row, strict=True):
            if sample.finish_reason is not None:
                continue
            if token in assistant.stop_ids:
                sample.finish_reason = "stop"
                continue
            sample.tokens.append(token)
            text, found = matcher.feed(decoder.feed(token))
            sample.text += text
            if found:
                sample.finish_reason = "stop"
        if all(sample.finish_reason for sample in samples):
            break
    for index, (sample, decoder, matcher) in enumerate(zip(samples, decoders, matchers, strict=True)):
        text, found = matcher.feed(decoder.flush())
        sample.text += text if found else text + matcher.flush()
        sample.finish_reason = sample.finish_reason or "length"
        if recorder is not None:
            sample.logprobs = recorder.rows[index][: len(sample.tokens)]
    return samples
