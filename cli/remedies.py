"""What a person can do about an error, in the words of the command line: one line for each code.

An error raised below `cli/` says what happened and names its remedy by a code; flags and commands are spelled here
alone. Knows every code; a test holds the table against the codes that are raised.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from mycli.cli.reasons import in_words
from mycli.runtime.errors import UserError


@dataclass(frozen=True)
class Subject:
    """What a command is about, as far as it is known when something goes wrong.

    model: as it was typed, or the word for one; fetched: whether it is of the hub; recorded: whether a record says what
    its files should hold; longest_context: whether the context is all that the model was made for.
    """

    model: str = "MODEL"
    fetched: bool = True
    recorded: bool = True
    longest_context: bool = False


# code -> what to do; the fields in braces are the error's data, and {model} is what the command is about
REMEDIES: Mapping[str, str] = {
    # a model and its files
    "pull-again": "the file is damaged or incomplete: mycli verify {model} --drop; mycli pull {model}",
    "pull-whole": "fetch the whole model: mycli pull {model}",
    "name-or-pull": "fetch the whole model: mycli pull {model}",
    "wait-or-pull-again": "another program writes to the folder: wait for it; then mycli verify {model}",
    "verify-files": "compare the files with their source: mycli verify {model}",
    "verify-files-or-fp32": "the weights may be damaged: mycli verify {model}; or try --dtype fp32",
    "allow-nonfinite": "compare the file with its source: mycli verify {model}; or load it as it is: --allow-nonfinite",
    "give-adapter": "mycli run {base} --adapter {adapter}",
    "merge-first": "name the model that it was packed from, and then: mycli quantize MODEL --adapter ADAPTER",
    "show-template": "mycli show {model} --template prints it",
    # a prompt and its context
    "no-prompt": "ask something: mycli run {model} PROMPT; or chat with it: mycli chat {model}",
    "allow-special": "take the control token out of the text, or pass --allow-special",
    "continue-text": "continue a text instead: mycli run {model} PROMPT",
    "fewer-tokens-or-more-context": "ask for at most {tokens} tokens, or for more context with --ctx",
    "more-context": "shorten the prompt, or ask for more context with --ctx",
    "less-context": "choose a smaller context with --ctx",
    "larger-windows": "use a larger --ctx",
    "more-tokens-or-less-context": "ask for more with --tokens, or for windows of fewer with --ctx",
    "longer-text-or-less-context": "use a longer text or a smaller --ctx",
    # of a server
    "choose-port": "choose another with --port; --port 0 takes any free one",
    "choose-high-port": "choose a --port above 1023",
    "choose-host": "choose another --host: 127.0.0.1 is this machine alone, 0.0.0.0 all its addresses",
    # what a machine has
    "use-cpu-or-install-cuda": "use --device cpu, or install a CUDA build of torch",
    "use-cpu-or-pretend-gpu": "use --device cpu, or --gpu SIZE",
    "all-kernels-declined": "{declined}",
    "leave-out-shadow": "omit --shadow",
    "other-draft": "choose a small model of the same family, or --draft ngram, which needs none",
    "more-gpus": "a larger --tensor-parallel-size, or a smaller --ctx",
    "set-context": "use --ctx {context}",
    "leave-out-draft": "omit --draft",
    "one-sequence": "use --batch 1",
    "quantize": "quantize it: mycli quantize {model} --bits {bits} --group {group}",
    "free-memory-or-less-context": "end what else uses {place}, or use a smaller --ctx",
    # quantization
    "choose-bits": "--bits takes: {choices}",
    "choose-group": "--group takes: {choices}, channel",
    "choose-block": "--group takes: {choices}",
    "choose-method": "--method takes: {choices}",
    "method-alone": "--method {name}",
    "method-bits": "omit --bits and --target-bpw",
    "choose-seq": "choose another length with --seq",
    "longer-or-more-samples": "use more of them: --samples, or longer ones: --seq",
    "keep-head": "omit --head, or --head keep",
    "other-group": "use --group {group}",
    "larger-target-or-group": "a larger --target-bpw, or a larger --group",
    "tune-with-data": "use --method {method} --tune",
    "other-calibration-text": "the model's numbers overflow on this text; try another with --calib",
    "longer-text-or-shorter-windows": "use a longer text, a smaller --seq, or the text that comes with the program",
    "more-samples": "use more --samples or a longer text",
    "fewer-samples": "close other programs, or use fewer --samples",
    "run-again-or-fewer-samples": "close other programs and run it again, which continues where it was; "
    "or use fewer --samples",
    "raise-max-ram": "the minimum is --max-ram {mib}MiB; fewer --samples need less",
    "raise-max-vram": "the minimum is --max-vram {mib}MiB; fewer --samples need less",
    "other-output": "choose another folder with -o",
    "wait-or-other-work-folder": "wait for it, or choose another folder with --work-dir",
    "remove-work-folder": "remove the folder, or choose another with --work-dir",
    "finish-or-remove-work": "run it again as it was begun, or remove the folder, or choose another with --work-dir",
    "requantize": "--requantize rounds what must be, and says what was lost",
    "fp32-or-requantize": "--to safetensors:fp32 keeps all of it; --requantize rounds, and says what was lost",
    "quantize-first": "quantize it first: mycli quantize MODEL",
    # of the hub, and of files
    "pull": "mycli pull {model}",
    "pull-online": "without --offline: mycli pull {model}",
    "search-hub": "mycli search {words} looks for it on the hub; mycli list shows the models on this machine",
    "hub-candidates": "on the hub: {candidates} (mycli pull fetches one); mycli search {words} finds more",
    "remove-model": "mycli rm {model}, and quantize it again",
    "fetch-anyway": "another program may run it: --force fetches it anyway",
    "list-models": "mycli list shows the models on this machine",
    "remove-by-hand": "delete it yourself; mycli list shows what can be removed by name",
    "dataset-online": "without --offline it is fetched",
    "log-in": "hf auth login",
    "accept-terms": "accept its terms at {page}, then set HF_TOKEN or run: hf auth login",
    "private-model": "check the spelling; or it is private: set HF_TOKEN or run hf auth login",
    "cache-full": "mycli rm MODEL frees space, HF_HUB_CACHE names another disk, --force tries anyway",
    "target-exists": "choose another name, or replace it with --overwrite",
}


# the same for a model that did not come from a hub, so that no pull brings it back
_LOCAL: Mapping[str, str] = {
    "pull-again": "the file is damaged: mycli verify {model} says what else is; then quantize the model again",
    "pull-whole": "mycli verify {model} says what is missing; then quantize the model again",
    "name-or-pull": "mycli verify {model} says what is missing; then quantize the model again",
}
# and for a folder of which nothing says what it should hold, so that it cannot be verified
_COPIED: Mapping[str, str] = {
    "pull-again": "the file is damaged or incomplete: copy the folder again from where it came from",
    "pull-whole": "copy the folder again from where it came from, or name another",
    "name-or-pull": "name a folder that holds a model; mycli list shows the models on this machine",
    "wait-or-pull-again": "another program writes to the folder: wait for it",
    "verify-files": "compare the files with where the folder came from",
    "verify-files-or-fp32": "the weights may be damaged; or try --dtype fp32",
    "allow-nonfinite": "compare the file with where it came from; or load it as it is: --allow-nonfinite",
}
# and where more context is no remedy, because the model was made for no more
_LONGEST: Mapping[str, str] = {
    "fewer-tokens-or-more-context": "ask for at most {tokens} tokens: the model was made for no longer context",
    "more-context": "shorten the prompt: the model was made for no longer context",
}


def remedy(error: UserError, subject: Subject = Subject()) -> str:  # noqa: B008  # frozen, so one for all is as good
    """The line of what to do: the words of the error's code for `subject`, or the error's own; "" for nothing."""
    if not error.code:
        return error.hint
    words = REMEDIES[error.code]
    if not subject.fetched:
        words = (_LOCAL if subject.recorded else _COPIED).get(error.code, words)
    if subject.longest_context:
        words = _LONGEST.get(error.code, words)
    data = {field: in_words(value) for field, value in error.data.items()}
    return words.format_map({"model": shlex.quote(subject.model), **data})
