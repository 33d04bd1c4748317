"""`mycli verify`: compare stored files with recorded hashes, or weights with what another program reads."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.output import Column
from mycli.cli.text.progress import stages
from mycli.quant import readers
from mycli.runtime.checkpoint.gguf_parts import blob_digest
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.errors import GateError, UsageError
from mycli.runtime.hub.integrity import CheckedFile, drop_damaged, files_to_verify, find_local, has_record, verify_files
from mycli.runtime.hub.resolve import Source, resolve
from mycli.runtime.utils.units import pluralize

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.quant.verification import Verified

EXAMPLES = (
    "mycli quantize pico --method rtn --report none && mycli verify pico-rtn-int4-g128",
    "mycli verify pico-rtn-int4-g128 --json",
    "mycli export pico --to gguf -o pico.gguf && mycli verify pico.gguf --as gguf-py --ref pico",
    "mycli verify Qwen/Qwen3-0.6B --drop && mycli pull Qwen/Qwen3-0.6B  # needs the network",
)
_COLUMNS = (Column("file", "name"), Column("bytes", "bytes", right=True), Column("state", "state"))


def _logits(answer: dict[str, Any]) -> str:
    if answer["logits"] is None:
        return "the program gives none"
    shared = "" if answer["likeliest"] is None else f", {answer['likeliest']:.0%} of its likeliest tokens shared"
    rounded = answer["rounded_logits"]
    packed = "" if rounded is None else f"; by {rounded:.2g} with the program's own rounding of activations"
    return f"differ by {answer['logits']:.2g} nats at most, {answer['tolerance']:g} allowed{shared}{packed}"


def _weights(answer: dict[str, Any]) -> str:
    if not answer["weights"]:
        return "not compared: the program packs them anew"
    wrong = len(answer["faults"])
    return f"{answer['weights']}, " + (f"{wrong} differ" if wrong else "equal bit for bit")


_DIFFERENT = "do not publish it: export it again, and report the fault if it returns"
_MISSING = (
    "this program does not read the model in this format; try another one: mycli verify --help lists them,"
    " and transformers leaves out experts of GPTQ and AWQ, which gptqmodel reads"
)
_READING = (Column("program", "program"), Column("weights", _weights), Column("logits", _logits))


@command
def verify(
    call: Call,
    model: options.Model,
    reader: Annotated[
        str | None,
        options.words("--as", readers.names(), "Let this program read the model, and compare weights and logits."),
    ] = None,
    ref: Annotated[
        str | None,
        options.option(
            "--ref", "MODEL", "With --as: the model that it was exported from.", show_default="our own reading"
        ),
    ] = None,
    program: Annotated[
        Path | None,
        options.option(
            "--program",
            "PATH",
            "With --as: the Python that has the program, or the folder of llama.cpp's binaries.",
            show_default="this Python, or PATH",
        ),
    ] = None,
    drop: Annotated[
        bool, options.flag("--drop", "Delete damaged files of a hub model, so that pull downloads them again.")
    ] = False,
) -> None:
    """Check a model's files against their recorded hashes, or against another program's reading.

    Compares size and hash of every file of a model that mycli or Ollama pulled, or that was quantized here. With --as
    another program reads the model too: every weight is compared bit for bit, and the logits of a few tokens. Exits
    with 6 if something differs or is missing, and names it.
    """
    if reader is None:
        if ref is not None or program is not None:
            raise UsageError("--ref and --program need --as", f"--as takes: {', '.join(readers.names())}")
        _verify_hashes(call, model, drop)
        return
    if drop:
        raise UsageError("--drop excludes --as", "use one of the two")
    options.choice("--as", reader, readers.names())
    source = resolve(model, offline=call.offline)
    if has_record(source):
        _require_intact(source, model)
    _verify_reading(call, source, model, reader, ref, program)


def _verify_reading(call: Call, source: Source, model: str, reader: str, ref: str | None, program: Path | None) -> None:
    from mycli.quant.verification import tokens_to_score, verify_reading

    folder = open_model_folder(source.folder)
    reference = folder if ref is None else open_model_folder(resolve(ref, offline=call.offline).folder)
    tokens, module = tokens_to_score(folder.config.vocab_size), readers.load(reader)
    reading = module.read(readers.Task(source.folder, tokens, program))
    placement = EngineConfig(device="cpu", dtype="float32").place(folder.config)
    with stages(call.out.result_progress) as progress:
        verified = verify_reading(reading, module.WEIGHT_NAMES, reference, folder, tokens, placement, progress)
    answer = {
        "model": model,
        "program": verified.program,
        "ok": not verified.faults and not verified.logits_fail,
        "weights": verified.weights,
        "faults": [{"weight": fault.weight, "row": fault.row, "problem": fault.problem} for fault in verified.faults],
        "logits": verified.logits,
        "tolerance": verified.tolerance,
        "likeliest": verified.likeliest,
        "rounded_logits": verified.rounded,
    }
    call.out.show(answer, _READING, title=f"{model} as {reader} reads it")
    if source.adapter is not None:
        call.out.note(f"(without the adapter {source.adapter.name[:19]}..., which was not compared)")
    _require_equal(verified, model)


def _require_equal(verified: "Verified", model: str) -> None:
    from mycli.quant.verification import MISSING

    if verified.faults:
        first = verified.faults[0]
        count = f"{len(verified.faults)} of {pluralize(verified.weights, 'weight')} differ"
        raise GateError(
            f"{model}: {count} as {verified.program} reads them; {first.weight} {first.problem}",
            _MISSING if first.problem == MISSING else _DIFFERENT,
        )
    if verified.logits_fail:
        apart, allowed = verified.logits, verified.tolerance
        if verified.rounding_fails:
            apart, allowed = verified.rounded, verified.rounded_tolerance
        raise GateError(
            f"{model}: weights are equal, but the logits of {verified.program} differ by {apart:.3g} nats,"
            f" more than {allowed:g}",
            "the program may compute this architecture differently; compare another version of it",
        )


def _require_intact(source: Source, model: str) -> None:
    bad = _bad(verify_files(source, files_to_verify(source), lambda count: None))
    if bad:
        raise GateError(f"{model}: {bad[0]} differs from its record", f"mycli verify {model} lists all files")


def _bad(files: list[CheckedFile]) -> list[str]:
    return [file.name for file in files if file.state in ("damaged", "missing")]


def _verify_hashes(call: Call, model: str, drop: bool) -> None:
    source = find_local(model)
    files = files_to_verify(source)
    show_progress = call.out.progress if drop else call.out.result_progress  # --drop deletes files: it is completed
    with show_progress(f"Reading {model}", sum(file.size for file in files.values()), "B") as bar:
        checked = verify_files(source, files, bar.advance)
    bad = _bad(checked)
    dropped = drop_damaged(source, checked) if drop else []
    records = [{"name": file.name, "bytes": file.nbytes, "state": file.state} for file in checked]
    answer = {"model": model, "folder": str(source.folder), "ok": not bad, "files": records, "dropped": dropped}
    call.out.show(answer, _COLUMNS, rows="files")
    if bad:
        count = f"{len(bad)} of {pluralize(len(checked), 'file')}"
        damaged = not dropped and any(file.state == "damaged" for file in checked)
        raise GateError(f"{model}: {count} damaged or missing, the first is {bad[0]}", _again(source, model, damaged))


def _again(source: Source, model: str, damaged: bool) -> str:
    """Return how to get the files again; damaged: some must be dropped before."""
    if blob_digest(source.folder) is not None:
        return f"ollama pull {model}"
    if source.repo is None:
        return "quantize it again"
    return f"mycli verify {model} --drop && mycli pull {model}" if damaged else f"mycli pull {model}"
