"""What a person can do about an error, in the words of the command line: one line for each code.

An error raised below `cli/` says what happened and names its remedy by a code; flags and commands are spelled here
alone. Knows every code; a test holds the table against the codes that are raised.
"""

from collections.abc import Mapping

from mycli.runtime.errors import UserError

# code -> what to do; the fields in braces are the error's data
REMEDIES: Mapping[str, str] = {
    # a model and its files
    "pull-again": "the file is damaged or incomplete; download the model again: mycli pull MODEL",
    "pull-whole": "mycli pull MODEL fetches a whole model",
    "name-or-pull": "name a model folder, or mycli pull MODEL",
    "wait-or-pull-again": "another program writes to the folder: wait for it, or pull it again: mycli pull MODEL",
    "verify-files": "compare the files with their source: mycli verify MODEL",
    "verify-files-or-fp32": "the weights may be damaged: mycli verify MODEL; or try --dtype fp32",
    "allow-nonfinite": "compare the file with its source: mycli verify MODEL; or load it as it is: --allow-nonfinite",
    "show-template": "mycli show MODEL --template prints it",
    # a prompt and its context
    "allow-special": "take the control token out of the text, or pass --allow-special",
    "continue-text": "mycli run MODEL PROMPT continues a text instead",
    "fewer-tokens-or-more-context": "ask for at most {tokens} tokens, or for more context with --ctx",
    "more-context": "shorten the prompt, or ask for more context with --ctx",
    "less-context": "choose a smaller context with --ctx",
    "larger-windows": "take a larger --ctx",
    "longer-text-or-less-context": "take a longer text or a smaller --ctx",
    # what a machine has
    "use-cpu-or-install-cuda": "use --device cpu, or install a CUDA build of torch",
    "use-cpu-or-pretend-gpu": "use --device cpu, or --gpu SIZE",
    "leave-out-shadow": "leave out --shadow",
    "other-draft": "choose a draft of the same family, or --draft ngram, which needs none",
    "set-context": "use --ctx {context}",
    "leave-out-draft": "leave out --draft",
    "one-sequence": "use --batch 1",
    "quantize": "quantize it: mycli quantize MODEL --bits {bits} --group {group}",
    "free-memory-or-less-context": "end what else uses {place}, or use a smaller --ctx",
    # quantization
    "choose-bits": "--bits takes: {choices}",
    "choose-group": "--group takes: {choices}, channel",
    "choose-method": "--method takes: {choices}, awq, awq+gptq",
    "choose-seq": "choose another length with --seq",
    "longer-or-more-samples": "take more of them: --samples, or longer ones: --seq",
    "keep-head": "leave out --head, or --head keep",
    "other-group": "use --group {group}",
    "larger-target-or-group": "a larger --target-bpw, or a larger --group",
    "tune-gptq": "use --method gptq --tune",
    "other-calibration-text": "the model does not hold on this text; try another with --calib",
    "longer-text-or-shorter-windows": "take a longer text, a smaller --seq, or the text that comes with the program",
    "more-samples": "take more --samples or a longer text",
    "fewer-samples": "close other programs, or take fewer --samples",
    "run-again-or-fewer-samples": "close other programs and run it again, which goes on where it was; "
    "or take fewer --samples",
    "raise-max-ram": "the least that would do is --max-ram {mib}MiB; fewer --samples need less",
    "raise-max-vram": "the least that would do is --max-vram {mib}MiB; fewer --samples need less",
    "other-output": "choose another folder with -o",
    "wait-or-other-work-folder": "wait for it, or choose another folder with --work-dir",
    "remove-work-folder": "remove the folder, or choose another with --work-dir",
    "finish-or-remove-work": "run it again as it was begun, or remove the folder, or choose another with --work-dir",
    # of the hub, and of files
    "pull": "mycli pull {model}",
    "pull-online": "without --offline: mycli pull {model}",
    "list-models": "mycli list shows the models on this machine",
    "remove-by-hand": "rm -r {model}",
    "dataset-online": "without --offline it is fetched",
    "log-in": "hf auth login",
    "accept-terms": "accept its terms at {page}, then set HF_TOKEN or run: hf auth login",
    "private-model": "check the spelling; or it is private: set HF_TOKEN or run hf auth login",
    "cache-full": "mycli rm MODEL frees space, HF_HUB_CACHE names another disk, --force tries nevertheless",
    "target-exists": "choose another name, or replace it with --overwrite",
}


def remedy(error: UserError) -> str:
    """The line of what to do: the words of the error's code, or the error's own. "" where nothing can be done."""
    return REMEDIES[error.code].format_map(error.data) if error.code else error.hint
