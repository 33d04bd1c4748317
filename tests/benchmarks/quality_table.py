"""Produces the figures of docs/quality.md: KL and perplexity of rounding, plain GPTQ and mycli's methods.

    PYTHONPATH=.links python -m tests.benchmarks.quality_table [--bits 4 3] [--group 128] [--samples 128]
        [--tokens 16384] [--methods NAME ...] [--model pico|pico-draft|outliers|heavy-tails|sinks|mixture|FOLDER]
        [--calibration-text FILE] [--held-out FILE]

`outliers` and `heavy-tails` are pico with the same function and weights that are harder to quantize
(tests/support/planted_outliers.py), `sinks` has massive activations at one token (tests/support/sink_tokens.py).
`mixture` is pico with 8 copies of each MLP, two of which are chosen for a token by a router with skewed shares
(tests/support/skewed_mixture.py).

All rows use the same calibration windows and are measured on the same held-out tokens by the same code. Plain GPTQ is
the original program's solver (IST-DASLab/gptq): positive scale from the largest weight, columns in natural order, group
scales computed when a group is reached, damping 0.01; inputs from the quantized prefix, as there with
--true-sequential.
"""

import argparse
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycli.quant import solvers
from mycli.quant.calibration import sampler as calibration
from mycli.quant.calibration.output_moments import output_moments
from mycli.quant.evaluate import cut, evaluate, held_out_text, read_text
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.output.work_folder import Solved
from mycli.quant.recipe import Recipe
from mycli.quant.rounding.error_compensation import Moments
from mycli.quant.rounding.grid import Grid, Quantized, Search, dequantize_codes
from mycli.quant.solvers import Solution, SolverModule, SolverSpec, rtn
from mycli.quant.solving.blockwise import BlockSolver, OriginalBlocks, quantize_blocks
from mycli.quant.solving.linear_solver import LinearSolver, SolvedProduct
from mycli.quant.tuning.end_to_end import tune_model
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.tokenizer.tokenizer import Tokenizer
from tests.support import planted_outliers, sink_tokens, skewed_mixture
from tests.support.models import CPU
from tests.support.paths import DRAFT, PICO

MODELS = ("pico", "pico-draft", "outliers", "heavy-tails", "sinks", "mixture")


class PlainGptq:
    """Implements the solver of the original program, column by column."""

    SOLVER = SolverSpec(help="", needs_data=True)

    def solve(self, weight: Tensor, grid: Grid, hessian: Tensor | None, outputs: Tensor | None = None) -> Solution:
        assert hessian is not None
        weight, hessian = weight.float().clone(), hessian.clone()
        rows, columns = weight.shape
        hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
        upper = torch.linalg.cholesky(inverse, upper=True)
        group = columns // grid.packing.groups(columns)
        codes = torch.empty(rows, columns, dtype=torch.uint8)
        scales = torch.empty(rows, columns // group, dtype=grid.scale_dtype)
        for start in range(0, columns, group):
            part = weight[:, start : start + group]
            scale = (part.abs().amax(1) / (grid.half - 0.5)).clamp(min=1e-8).to(grid.scale_dtype)
            scales[:, start // group] = scale
            for column in range(start, start + group):
                level = (weight[:, column] / scale.float()).round().clamp(-grid.half, grid.half - 1)
                codes[:, column] = level + grid.half
                error = (weight[:, column] - level * scale.float()) / upper[column, column]
                weight[:, column:] -= torch.outer(error, upper[column, column:])
        return Solution(Quantized(codes, scales))


class Peer(LinearSolver):
    """Runs a scheme against the original weights, without the drift of the quantized prefix."""

    def __init__(self, scheme: SolverModule) -> None:
        super().__init__("gptq", torch.bfloat16, "mse")
        self.solve_matrix = scheme.solve

    def solve(
        self,
        weights: Mapping[str, Tensor],
        packing: Packing,
        fitted: Moments,
        held_out: Moments,
        outputs: Tensor | None = None,
    ) -> SolvedProduct:
        still = [replace(each, drift=torch.zeros_like(each.drift)) for each in (fitted, held_out)]
        return super().solve(weights, packing, *still)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="ends of the names of methods; default: all")
    parser.add_argument("--model", metavar="|".join((*MODELS, "FOLDER")), default="pico")
    parser.add_argument("--calibration-text", type=Path, help="default: the bundled text")
    parser.add_argument("--held-out", type=Path, help="text to measure on; default: the bundled text")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        table(options, write_model(Path(folder) / "model", options.model))


def write_model(folder: Path, name: str) -> Path:
    if name in ("pico", "pico-draft"):
        return PICO if name == "pico" else DRAFT
    if name in ("mixture", "sinks"):
        return (skewed_mixture if name == "mixture" else sink_tokens).write(folder)
    if name not in MODELS:
        return Path(name)
    return planted_outliers.write(folder, "outliers" if name == "outliers" else "heavy-tails")


def table(options: argparse.Namespace, source: Path) -> None:
    config = StreamedModel(open_model_folder(source), CPU).config
    tokenizer = Tokenizer.load(source, config.vocab_size)
    sizes = options.samples, options.seq
    shown = calibration.calibrate(options.calibration_text, tokenizer, config.vocab_size, *sizes, seed=0)
    text = cut(read_text(options.held_out) if options.held_out else held_out_text(), tokenizer, 512, options.tokens)
    original = load_file(source / "model.safetensors")
    print(f"torch {torch.__version__}, python {platform.python_version()}, {torch.get_num_threads()} threads")
    print(f"calibration {options.samples} x {options.seq}, measured on {text.windows.numel()} held-out tokens\n")
    print("| bits | method | KL | against plain GPTQ | perplexity | same top token | seconds |")
    print("|---|---|---|---|---|---|---|")
    for bits in options.bits:
        packings = Recipe(bits=bits, group=options.group).packings(config)
        ours = LinearSolver("gptq", torch.bfloat16, "mse")
        methods: dict[str, LinearSolver | Search] = {
            "rounding, scale of the largest weight": "absmax",
            "rounding, searched scale (`--method rtn`)": "mse",
            "plain GPTQ": Peer(PlainGptq()),
            "GPTQ of mycli, without refit": Peer(solvers.load("gptq")),
            "`--method awq`": LinearSolver("rtn", torch.bfloat16, "mse", transform="awq"),
            "`--method awq+gptq`": LinearSolver("gptq", torch.bfloat16, "mse", transform="awq"),
            "`--method gptq`": ours,
            "`--method gptq --hessian model`": LinearSolver("gptq", torch.bfloat16, "mse"),
            "`--method gptq --tune`": LinearSolver("gptq", torch.bfloat16, "mse", tunes=True),
            "`--method gptq --hessian model --tune`": LinearSolver("gptq", torch.bfloat16, "mse", tunes=True),
            "`--method gptq --hessian model --tune-codes`": LinearSolver("gptq", torch.bfloat16, "mse", tunes=True),
        }
        plain = 0.0
        chosen = tuple(f"{end}{close}" for end in options.methods or ("",) for close in ("", "`"))
        for name, solver in methods.items():
            if not name.endswith(chosen):
                continue
            state: dict[str, Tensor] = {}

            def sink(solved: Solved, state: dict[str, Tensor] = state) -> None:
                state.update(solved.changed)
                for linear, quantized in solved.linears.items():
                    grid = Grid(packings[linear], torch.bfloat16)  # noqa: B023  # used within this iteration only
                    state[f"{linear}.weight"] = dequantize_codes(quantized, grid).bfloat16()

            started = time.monotonic()
            if isinstance(solver, str):
                for linear, packing in packings.items():
                    solution = rtn.solve(original[f"{linear}.weight"], Grid(packing, torch.bfloat16, solver))
                    sink(Solved({linear: solution.quantized}, {}, ()))
            else:
                blocks: list[Solved] = []
                model = StreamedModel(open_model_folder(source), CPU)
                outputs = output_moments(model, shown.windows, seed=0) if "--hessian model" in name else None
                quantize_blocks(
                    BlockSolver(OriginalBlocks(model, shown.windows), packings, solver, outputs=outputs), blocks.append
                )
                if solver.tunes:
                    codes = name.endswith("--tune-codes`")
                    tuned = tune_model(model, blocks, packings, torch.bfloat16, shown.windows, seed=0, codes=codes)
                    blocks = list(tuned.blocks)
                for block in blocks:
                    sink(block)
            seconds = time.monotonic() - started
            with tempfile.TemporaryDirectory() as folder:
                copy = shutil.copytree(source, Path(folder) / "copy")
                (copy / "model.safetensors").chmod(0o644)
                save_file({**original, **state}, copy / "model.safetensors")
                result = evaluate(
                    StreamedModel(open_model_folder(copy), CPU), text, StreamedModel(open_model_folder(source), CPU)
                )
            assert result.divergence is not None
            kl = result.divergence.kl.value
            plain = kl if name == "plain GPTQ" else plain
            change = f"{kl / plain - 1:+.0%}" if name != "plain GPTQ" and plain else ""
            digits = 4 if kl >= 0.001 else 6
            print(
                f"| {bits} | {name} | {kl:.{digits}f} ± {result.divergence.kl.error:.{digits}f} | {change} |"
                f" {result.perplexity.value:.2f} | {result.divergence.same_top1.value:.1%} | {seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
