"""The hint of every error code: what the user can do, as commands and options.

Errors raised below `cli/` name their remedy by a code; only here are options and commands spelled. A test compares
the table with the codes that are raised.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from mycli.runtime.errors import UserError


@dataclass(frozen=True)
class Subject:
    """The model of a command, as far as it is known when an error is printed.

    `model`: its name as typed; `fetched`: it is a model of the hub; `recorded`: mycli.json lists its files and hashes;
    `single_file`: it is a file that a user names, not a folder; `longest_context`: the context cannot be made longer.
    """

    model: str = "MODEL"
    fetched: bool = True
    recorded: bool = True
    single_file: bool = False
    longest_context: bool = False


# code -> hint; the fields in braces are the error's data, and {model} is `Subject.model`
REMEDIES: Mapping[str, str] = {
    # a model and its files
    "pull-again": "the file is damaged or incomplete: mycli verify {model} --drop; mycli pull {model}",
    "pull-whole": "download the whole model: mycli pull {model}",
    "replace-index": "the index is of other weights: copy the one of these files, or join them in model.safetensors",
    "name-or-pull": "download the whole model: mycli pull {model}",
    "wait-or-pull-again": "another program is writing to the folder: wait for it, then run: mycli verify {model}",
    "verify-files": "check the files: mycli verify {model}",
    "verify-files-or-fp32": "the weights may be damaged: mycli verify {model}; or try --dtype fp32",
    "no-hashes": "to compare its weights with another program's reading: mycli verify {model} --as transformers",
    "allow-nonfinite": "check the file: mycli verify {model}; or accept these values: --allow-nonfinite",
    "give-adapter": "mycli run {base} --adapter {adapter}",
    "merge-first": "name the model that it was quantized from: mycli quantize MODEL --adapter ADAPTER",
    "show-template": "mycli show {model} --template prints it",
    "add-template": "add --chat-template FILE",
    # a prompt and its context
    "no-prompt": "give a prompt: mycli run {model} PROMPT; or chat: mycli chat {model}",
    "allow-special": "remove the control token from the text, or pass --allow-special",
    "continue-text": "add --chat-template FILE, or continue a text instead: mycli run {model} PROMPT",
    "fewer-tokens-or-more-context": "use -n {tokens} or less, or a larger --ctx",
    "embedding-model": "for text: mycli run, with a generative model; for vectors: mycli embed, with modules.json",
    "reranker": "serve it: mycli serve {model}; its clients send a query and documents to POST /v1/rerank",
    "fewer-beams": "use fewer beams, a smaller -n, or a larger --ctx; a server: a larger --max-sequences",
    "more-context": "shorten the prompt, or use a larger --ctx",
    "less-context": "use a smaller --ctx",
    "larger-windows": "use a larger --ctx",
    "no-data-no-report": "choose a --method without data, and add --report none",
    "more-tokens-or-less-context": "use a larger --tokens, or a smaller --ctx",
    "longer-text-or-less-context": "use a longer text or a smaller --ctx",
    # a server
    "choose-port": "use another --port; --port 0 takes a free one",
    "choose-high-port": "use a --port above 1023",
    "choose-host": "use another --host: 127.0.0.1 is reachable from this machine only, 0.0.0.0 from others too",
    # the machine
    "use-cpu-or-install-cuda": "use --device cpu, or install a CUDA build of torch",
    "use-cpu-or-pretend-gpu": "use --device cpu, or --gpu SIZE",
    "all-kernels-declined": "{declined}",
    "portable-on-cpu": "use --device cpu, or omit --portable-bits",
    "portable-in-bf16": "use --dtype bf16, or omit --portable-bits",
    "without-portable-bits": "{declined}; omit --portable-bits",
    "leave-out-prompt-copy": "omit --shadow or --fp8-prompts",
    "other-prompt-copy": "omit --fp8-prompts, or use --shadow",
    "other-draft": "use a small model of the same family, or --draft ngram, which needs no model",
    "more-gpus": "use a larger --tensor-parallel-size, or a smaller --ctx",
    "set-context": "use --ctx {context}",
    "leave-out-draft": "omit --draft",
    "one-sequence": "use --batch 1",
    "quantize": "quantize it: mycli quantize {model} --bits {bits} --group {group}",
    "free-memory-or-less-context": "close other programs that use {place}, or use a smaller --ctx",
    # quantization
    "choose-bits": "--bits takes: {choices}",
    "choose-group": "--group takes: {choices}, channel",
    "choose-block": "--group takes: {choices}",
    "choose-method": "--method takes: {choices}",
    "method-alone": "use --method {name}",
    "method-bits": "omit --bits and --target-bpw",
    "choose-seq": "use another --seq",
    "longer-or-more-samples": "use more --samples, or a larger --seq",
    "keep-head": "omit --head, or --head keep",
    "other-group": "use --group {group}",
    "larger-target-or-group": "use a larger --target-bpw, or a larger --group",
    "tune-codes": "use --tune --tune-codes",
    "tune-with-data": "use --method {method} --tune",
    "hessian-method": "use --method {method} --hessian model",
    "other-calibration-text": "try another calibration text: --calib FILE",
    "longer-text-or-shorter-windows": "use a longer text, a smaller --seq, or omit --calib to use the built-in text",
    "more-samples": "use more --samples or a longer text",
    "fewer-samples": "close other programs, or use fewer --samples",
    "run-again-or-fewer-samples": "close other programs and run the same command again, which continues the work; "
    "or use fewer --samples",
    "raise-max-ram": "the minimum is --max-ram {mib}MiB; fewer --samples need less",
    "raise-max-vram": "the minimum is --max-vram {mib}MiB; fewer --samples need less",
    "other-output": "use another folder with -o",
    "wait-or-other-work-folder": "wait for it, or use another --work-dir",
    "remove-work-folder": "drop that work with --restart, or use another --work-dir",
    "finish-or-remove-work": "repeat the first command unchanged; or drop that work: --restart; or keep it: --work-dir",
    "gguf-mix": "mycli quantize {model} --bits {type}",
    "requantize": "add --requantize to round these weights; the loss is reported",
    "fp32-or-requantize": "use --to safetensors:fp32 to keep every bit, or --requantize to round; the loss is reported",
    "quantize-first": "quantize it first: mycli quantize {model}",
    # the hub and files
    "pull": "mycli pull {model}",
    "pull-then-quantize": "download the whole model, then quantize it: mycli pull {model}; mycli quantize {model}",
    "pull-online": "run it without --offline: mycli pull {model}",
    "search-hub": "search the hub: mycli search {words}; mycli list shows the models on this machine",
    "hub-candidates": "on the hub: {candidates} (download with mycli pull NAME); mycli search {words} finds more",
    "finish-quantizing": "repeat the mycli quantize command to continue it, or delete it: mycli rm {model}.work",
    "finish-quantizing-folder": "repeat the mycli quantize command to continue it, or delete it: rm -r {folder}",
    "remove-model": "remove it and quantize it again: mycli rm {model}",
    "fetch-anyway": "mycli cannot run it; --force downloads it for use in another program",
    "list-models": "mycli list shows the models on this machine",
    "remove-by-hand": "delete it by hand; mycli list shows the models that can be removed by name",
    "dataset-online": "run it without --offline to download it",
    "log-in": "log in: hf auth login",
    "accept-terms": "accept its terms at {page}, then set HF_TOKEN or log in: hf auth login",
    "private-model": "check the spelling; for a private model set HF_TOKEN or log in: hf auth login",
    "cache-full": "free space with mycli rm MODEL, choose another disk with HF_HUB_CACHE, or try anyway with --force",
    "target-exists": "use another name, or replace it with --overwrite",
}


# for a model that is not from the hub and cannot be pulled again
_LOCAL: Mapping[str, str] = {
    "pull-again": "the file is damaged: mycli verify {model} lists all damaged files; then quantize the model again",
    "pull-whole": "mycli verify {model} lists the missing files; then quantize the model again",
    "name-or-pull": "mycli verify {model} lists the missing files; then quantize the model again",
}
# for a folder without a record of its files, which cannot be verified
_COPIED: Mapping[str, str] = {
    "pull-again": "the file is damaged or incomplete: copy the folder again from its source",
    "pull-whole": "copy the folder again from its source, or name another folder",
    "name-or-pull": "name a folder that holds a model; mycli list shows the models on this machine",
    "wait-or-pull-again": "another program is writing to the folder: wait for it",
    "verify-files": "compare the files with their source",
    "verify-files-or-fp32": "the weights may be damaged; or try --dtype fp32",
    "allow-nonfinite": "compare the file with its source; or accept these values: --allow-nonfinite",
}
# the same for a file, such as a GGUF model
_COPIED_FILE: Mapping[str, str] = {
    **_COPIED,
    "no-hashes": "to compare its weights with another program's reading: mycli verify {model} --as gguf-py",
    "pull-again": "the file is damaged or incomplete: copy it again from its source",
    "pull-whole": "copy all files of the model again from their source",
    "name-or-pull": "name a file that holds a model; mycli list shows the models on this machine",
    "wait-or-pull-again": "another program is writing to the file: wait for it",
    "verify-files": "compare the file with its source",
}
# when the model supports no longer context
_LONGEST: Mapping[str, str] = {
    "fewer-tokens-or-more-context": "use -n {tokens} or less: the model supports no longer context",
    "more-context": "shorten the prompt: the model supports no longer context",
}


def remedy(error: UserError, subject: Subject = Subject()) -> str:  # noqa: B008  # frozen
    """Return the hint of an error: the text of its code for `subject`, or its own `hint`; "" if it has neither."""
    if not error.code:
        return error.hint
    from mycli.cli.reasons import in_words  # a long table, needed only for an error

    hint = REMEDIES[error.code]
    if not subject.fetched:
        copied = _COPIED_FILE if subject.single_file else _COPIED
        hint = (_LOCAL if subject.recorded else copied).get(error.code, hint)
    if subject.longest_context:
        hint = _LONGEST.get(error.code, hint)
    data = {field: in_words(value) for field, value in error.data.items()}
    return hint.format_map({"model": shlex.quote(subject.model), **data})
