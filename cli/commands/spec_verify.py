"""`mycli spec verify`: whether a draft changes the replies of a model."""

from pathlib import Path
from typing import Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import LoadFlags
from mycli.cli.load import load_engine
from mycli.cli.output import Column
from mycli.cli.text.input import read_file
from mycli.runtime.errors import GateError, UsageError

EXAMPLES = ("mycli spec verify pico pico-draft -n 16 --draws 2000",)
SMALLEST_P = 1e-4  # probability of a false alarm
TOP_K = 8


def _greedy(answer: dict[str, Any]) -> str:
    divergences = answer["divergences"]
    parts = [f"{answer['prompts'] - len(divergences)} of {answer['prompts']} replies the same"]
    for divergence in divergences:
        cause = "a tie within rounding" if divergence["tie"] else "beyond rounding"
        place = f"prompt {divergence['prompt'] + 1} differs from token {divergence['position'] + 1}"
        parts.append(f"{place}, lead {divergence['margin']:.2g} ({cause})")
    return "; ".join(parts)


def _sampled(answer: dict[str, Any], draws: int) -> str:
    test = answer["chi_squared"]
    statistic = f"chi squared {test['statistic']:.1f}, {test['freedom']} degrees of freedom"
    return f"{draws:,} pairs of tokens, top-k {TOP_K}: p = {test['p_value']:.3g} ({statistic})"


@command
def spec_verify(
    call: Call,
    model: options.Model,
    draft: options.DraftName,
    prompts: Annotated[
        Path | None, options.option("--prompts", "FILE", "A file of prompts, one per line.", show_default="built in")
    ] = None,
    limit: Annotated[int, options.option("-n --max-tokens", "N", "Reply length in tokens.", min=1)] = 32,
    length: Annotated[int, options.option("-k --length", "N", "Draft length in tokens.", min=1, max=64)] = 4,
    draws: Annotated[
        int, options.option("--draws", "N", "Number of samples for the test of the distribution.", min=100)
    ] = 20_000,
    context: options.Context = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    dtype: options.Precision = "auto",
) -> None:
    """Test that a draft changes only the speed.

    DRAFT is a model, or mtp for the MTP head of MODEL.

    Greedy replies with and without the draft must be the same, token by token; where they differ, the lead of the most
    likely token over the second tells whether it was a tie within rounding. Sampled pairs of tokens are counted and
    compared with the probabilities of MODEL (chi squared). Exits with 6 if a difference exceeds rounding or chance.
    """
    opened = load_engine(call, model, LoadFlags(draft=draft, context=context, device=device, dtype=dtype).resolve())
    from mycli.runtime.diagnostics.prompts import prompts as built_in
    from mycli.runtime.diagnostics.speculation_benchmark import SpeculationSubject
    from mycli.runtime.diagnostics.speculation_check import chi_squared, greedy_divergences, least_certain
    from mycli.runtime.sampling.params import SamplingParams
    from mycli.runtime.speculative.mtp import MtpProposer
    from mycli.runtime.speculative.proposers import DraftModel
    from mycli.runtime.speculative.speculator import ProposerSpeculator

    loaded, speculator = opened.model, opened.engine.speculator
    proposer = speculator.proposer if isinstance(speculator, ProposerSpeculator) else None
    if not isinstance(proposer, DraftModel | MtpProposer):
        raise UsageError(f"{draft} is not a model", "name a model as DRAFT, or mtp for the MTP head of MODEL")
    subject = SpeculationSubject(
        loaded.runner, lambda: proposer, loaded.vocabulary_size, loaded.stop_ids, opened.engine.context
    )
    if prompts is None:
        tokens = [ids for kind in built_in(loaded.tokenizer).values() for ids in kind]
    else:
        tokens = [
            loaded.tokenizer.encode(line, add_special=True) for line in read_file(prompts).splitlines() if line.strip()
        ]
    if not tokens:
        raise UsageError(f"{prompts} contains no prompts", "write one prompt per line")
    with call.out.result_progress("greedy replies", len(tokens)) as bar:
        divergences = []
        for divergence in greedy_divergences(subject, tokens, limit, length):
            bar.advance(1)
            if divergence is not None:
                divergences.append(divergence)
    sampling = SamplingParams(temperature=1.0, top_k=TOP_K, seed=0)
    test = chi_squared(subject, proposer, least_certain(subject, tokens), sampling, draws)
    answer = {
        "prompts": len(tokens),
        "divergences": [vars(divergence) for divergence in divergences],
        "chi_squared": {**vars(test), "p_value": test.p_value},
    }
    columns = (Column("greedy", _greedy), Column("sampled", lambda answer: _sampled(answer, draws)))
    call.out.show(answer, columns, title=f"{model} with draft {draft}")
    hint = "report this with the output of mycli doctor"
    if any(not divergence.tie for divergence in divergences):
        raise GateError("greedy replies differ by more than rounding", hint)
    if test.p_value < SMALLEST_P:
        raise GateError(f"the distribution of sampled tokens differs (p = {test.p_value:.2g})", hint)
