"""What a person can do about an error, in the words of the command line: one line for each code.

An error raised below `cli/` says what happened and names its remedy by a code; flags and commands are spelled here
alone. Knows every code; a test holds the table against the codes that are raised.
"""

from collections.abc import Mapping

from mycli.runtime.errors import UserError

# code -> what to do; the fields in braces are the error's data
REMEDIES: Mapping[str, str] = {
    "pull-again": "download the model again: mycli pull MODEL",
    # of the hub, and of files
    "pull": "mycli pull {model}",
    "pull-online": "without --offline: mycli pull {model}",
    "pull-whole": "mycli pull MODEL fetches a whole model",
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
