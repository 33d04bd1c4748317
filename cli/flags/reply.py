"""Options of one reply, as typed: the prompt, the output format, and beam search."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mycli.cli.flags import options
from mycli.cli.flags.records import SamplingFlags
from mycli.cli.text.input import read_file, read_prompt
from mycli.runtime.engine.sequence import BeamOptions
from mycli.runtime.errors import UsageError

if TYPE_CHECKING:  # torch takes seconds to import
    from mycli.runtime.engine.loading.loader import LoadedModel
    from mycli.runtime.sampling.grammars.grammar import Grammar


@dataclass(frozen=True)
class PromptFlags:
    """The prompt and its source, as typed."""

    prompt: Annotated[str | None, options.argument("PROMPT", "The prompt; - reads it from standard input.")] = None
    file: Annotated[
        Path | None, options.option("-f --file", "FILE", "Read the prompt, or its first part, from a file.")
    ] = None
    encoding_errors: Annotated[
        str, options.option("--encoding-errors", "strict|replace", "How to treat input that is not UTF-8.")
    ] = "strict"
    batch: Annotated[
        str | None, options.option("--batch", "FILE", "Answer each line of a JSON-lines file; - is standard input.")
    ] = None
    out: Annotated[
        Path | None,
        options.option("--out", "FILE", "With --batch: write the answers here; skip lines already answered there."),
    ] = None

    def resolve(self, note: Callable[[str], None]) -> str:
        """Return the prompt, "" with --batch. Raises UsageError for options that exclude each other."""
        if self.out is not None and self.batch is None:
            raise UsageError("--out needs --batch", "redirect the output instead: > FILE")
        if self.batch is None:
            errors = options.choice("--encoding-errors", self.encoding_errors, ("strict", "replace"))
            return read_prompt(self.prompt, self.file, errors, note)
        if self.prompt is not None or self.file is not None:
            raise UsageError("--batch reads the prompts from the file", "omit PROMPT and --file")
        from mycli.cli.replies.batch_file import check_batch

        check_batch(self.batch)
        return ""


@dataclass(frozen=True)
class GrammarFlags:
    """The output format of a reply, as typed."""

    schema: Annotated[
        str | None,
        options.option(
            "--schema", "FILE|JSON", "Reply with JSON that matches this JSON schema: a file, or the schema."
        ),
    ] = None
    regex: Annotated[
        str | None, options.option("--regex", "RE", "Reply with text that matches this regular expression completely.")
    ] = None
    json_mode: Annotated[bool, options.flag("--json-mode", "Reply with a JSON object.")] = False
    extra_properties: Annotated[
        bool, options.flag("--extra-properties", "Allow JSON properties that the schema does not name.")
    ] = False

    @property
    def used(self) -> bool:
        return self.schema is not None or self.regex is not None or self.json_mode

    def text(self) -> str | None:
        """Return the text of the schema, before a model is loaded.

        Raises UsageError for an unreadable schema and options that exclude each other.
        """
        formats = sum((self.schema is not None, self.regex is not None, self.json_mode))
        if formats > 1:
            raise UsageError("--schema, --regex and --json-mode exclude each other", "use one of the three")
        if self.schema is None or _is_inline(self.schema):
            return self.schema
        return read_file(Path(self.schema))

    def resolve(self, schema: str | None, model: "LoadedModel") -> "Grammar | None":
        """Return the grammar for `model`, None for free text; `schema` is the result of `text`."""
        if not self.used:
            return None
        from mycli.runtime.sampling.grammars.grammar import JSON_MODE, Grammar

        if self.regex is not None:
            return Grammar.from_regex(self.regex, model.tokenizer, model.stop_ids)
        inline = self.schema is not None and _is_inline(self.schema)
        source = "--json-mode" if schema is None else "--schema" if inline else str(self.schema)
        text = JSON_MODE if schema is None else schema
        return Grammar.from_schema(text, source, model.tokenizer, model.stop_ids, self.extra_properties)


@dataclass(frozen=True)
class BeamFlags:
    """Beam search, as typed."""

    beams: Annotated[
        int | None,
        options.option("--beams", "N", "Search for the most likely reply with N beams instead of sampling.", min=1),
    ] = None
    length_penalty: Annotated[
        float,
        options.option("--length-penalty", "X", "With --beams: above 0 favours long replies, below 0 short ones."),
    ] = 1.0
    early_stopping: Annotated[
        str,
        options.words(
            "--early-stopping",
            ("off", "on", "never"),
            "With --beams: on ends the search with N finished replies, never when no better one is possible.",
        ),
    ] = "off"

    def resolve(
        self, samples: int, sampling: SamplingFlags, grammar: GrammarFlags, draft: str, logprobs: int | None
    ) -> BeamOptions | None:
        """Return the options of the search. Raises UsageError for options that a search does not have."""
        early = options.choice("--early-stopping", self.early_stopping, ("off", "on", "never"))
        if self.beams is None:
            if self != BeamFlags():
                raise UsageError("--length-penalty and --early-stopping need --beams", "add --beams N")
            return None
        excluded = [*options.given_options(sampling), *options.given_options(replace(grammar, extra_properties=False))]
        excluded += ["--draft"] * (draft != "none") + ["--logprobs"] * (logprobs is not None)
        if excluded:
            raise UsageError(f"--beams and {excluded[0]} exclude each other", f"omit --beams, or omit {excluded[0]}")
        if samples > self.beams:
            raise UsageError(f"--samples {samples} of {self.beams} beams", f"use --beams {samples}")
        return BeamOptions(self.beams, self.length_penalty, "never" if early == "never" else early == "on")


def _is_inline(schema: str) -> bool:
    # A schema is an object; a file whose name begins so can be named ./{...
    return schema.lstrip().startswith("{")
