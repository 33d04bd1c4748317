"""`mycli spec verify`: does a draft change what a model says?"""

from pathlib import Path
from typing import Annotated

import typer

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import LoadFlags
from mycli.cli.load import load_engine
from mycli.cli.text.input import read_file
from mycli.runtime.errors import GateError, UsageError

EXAMPLES = ("mycli spec verify pico pico-draft -n 16 --draws 2000",)
SMALLEST_P = 1e-4  # chance of a false alarm
TOP_K = 8


@command
def spec_verify(
    call: Call,
    model: options.Model,
    draft: options.DraftName,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="A file of prompts, one per line.", show_default="built in"),
    ] = None,
    limit: Annotated[int, typer.Option("-n", "--max-tokens", metavar="N", min=1, help="Tokens per reply.")] = 32,
    length: Annotated[int, typer.Option("-k", "--length", metavar="N", min=1, max=64, help="Tokens per draft.")] = 4,
    draws: Annotated[
        int, typer.Option("--draws", metavar="N", min=100, help="Draws for the test of the distribution.")
    ] = 20_000,
    context: options.Context = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    dtype: options.Precision = "auto",
) -> None:
    """Test that a draft changes nothing but the speed.

    A draft is a model, or mtp: the head that some models ship with.

    Greedy replies must be the same, token by token; where they part, the lead of the likeliest token over the second
    says whether it was a tie within rounding. Pairs of drawn tokens are counted and compared with the model's own
    probabilities (chi squared). Exits with 6 if something differs by more than chance or rounding.
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
        raise UsageError(f"{draft}: not a model", "name a model as the draft, or mtp for the head of MODEL itself")
    subject = SpeculationSubject(
        loaded.runner, lambda: proposer, loaded.vocabulary_size, loaded.stop_ids, opened.engine.context
    )
    if prompts is None:
        asked = [ids for kind in built_in(loaded.tokenizer).values() for ids in kind]
    else:
        asked = [
            loaded.tokenizer.encode(line, add_special=True) for line in read_file(prompts).splitlines() if line.strip()
        ]
    if not asked:
        raise UsageError(f"{prompts}: no prompts", "write one per line")
    with call.out.progress("greedy replies", len(asked)) as bar:
        divergences = []
        for divergence in greedy_divergences(subject, asked, limit, length):
            bar.advance(1)
            if divergence is not None:
                divergences.append(divergence)
    drawn = SamplingParams(temperature=1.0, top_k=TOP_K, seed=0)
    test = chi_squared(subject, proposer, least_certain(subject, asked), drawn, draws)
    answer = {
        "prompts": len(asked),
        "divergences": [vars(one) for one in divergences],
        "chi_squared": {**vars(test), "p_value": test.p_value},
    }
    if not call.out.answered(answer):
        same = f"{len(asked) - len(divergences)} of {len(asked)} replies the same"
        parts = [
            f"prompt {one.prompt + 1} differs from token {one.position + 1}, lead {one.margin:.2g}"
            f" ({'a tie within rounding' if one.tie else 'beyond rounding'})"
            for one in divergences
        ]
        result = f"p = {test.p_value:.3g} (chi squared {test.statistic:.1f}, {test.freedom} degrees of freedom)"
        rows = [("greedy", "; ".join([same, *parts])), ("drawn", f"{draws:,} pairs of tokens, top-k {TOP_K}: {result}")]
        call.out.card(f"{model} with the draft {draft}", rows)
    hint = "report it with the output of mycli doctor"
    if any(not one.tie for one in divergences):
        raise GateError("greedy replies differ by more than rounding", hint)
    if test.p_value < SMALLEST_P:
        raise GateError(f"the drawn distribution differs (p = {test.p_value:.2g})", hint)
