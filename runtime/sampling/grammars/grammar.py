"""Structured output: compiles a JSON schema, regular expression or grammar for the tokens of one model."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import llguidance

from mycli.runtime.errors import ModelError, UsageError, UserError
from mycli.runtime.sampling.grammars.ending import Ending, Symbols, SymbolTable
from mycli.runtime.sampling.grammars.json_schema import FREE_NODES, PreparedSchema, count_values, prepare
from mycli.runtime.sampling.grammars.lark import CallGrammar, LarkRules, Prelude, grammars_of
from mycli.runtime.sampling.grammars.patterns import rust_pattern
from mycli.runtime.sampling.grammars.probe import GrammarProbe
from mycli.runtime.sampling.grammars.state import GrammarState, Reasoning, ReplyLimits
from mycli.runtime.sampling.grammars.worker import LEXER_FUEL
from mycli.runtime.tokenizer.tokenizer import Tokenizer

MAX_SOURCE = 1 << 16  # characters of a schema or expression: compiling takes time quadratic in the properties
MAX_GBNF = 1 << 14  # characters: converting it takes time quadratic in the rules, 0.6 s for these
MAX_DEPTH = 64
# Items of the parser in one step: an ambiguous grammar takes 0.1 s a token at 50,000, and every other reply waits.
STEP_ITEMS = 20_000
# Between two tokens of JSON: one space, or a new line with indentation. Small models fill a context with whitespace.
WHITESPACE = r" |\n {0,8}"
_STRICT: Mapping[str, Any] = {"lenient": False, "coerce_one_of": True}
_FREE: Mapping[str, Any] = {**_STRICT, "whitespace_pattern": WHITESPACE}
# The JSON style in which chat templates write tool calls.
_COMPACT: Mapping[str, Any] = {**_STRICT, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
JSON_MODE = '{"type": "object"}'
_CALLS = "tools"  # the request field of calls, for messages


class _Vocabulary:
    """The tokenizer interface of llguidance: the bytes of all tokens, the control tokens, and encoding."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        pieces = [tokenizer.piece(index, first=False) for index in range(len(tokenizer.vocabulary))]
        control = {index for index, piece in enumerate(pieces) if piece is None} | tokenizer.control_ids | stop_ids
        self.eos_token_id = min(stop_ids)
        self.bos_token_id = tokenizer.bos
        self.special_token_ids = sorted(control)
        self.tokens = [
            (tokenizer.vocabulary[index] or f"<unused {index}>").encode() if index in control else piece or b""
            for index, piece in enumerate(pieces)
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(whole, add_special=False)


@dataclass(frozen=True)
class Alternative:
    """A source in llguidance's format that may be generated instead of calls.

    kind: its name in messages; field: the request field that holds it; schemas: its JSON schema, if it has one.
    """

    source: str
    kind: str
    field: str
    schemas: tuple[PreparedSchema, ...] = ()


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    All methods raise UsageError if the source is invalid, unsupported, too large or matches nothing. A grammar that may
    be costly is returned before it is compiled (`Grammar.ready`).
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int], extra_properties: bool = False) -> None:
        """Build the token table. Raises ModelError without an end token.

        extra_properties: allow properties that a schema does not name, as JSON Schema does.
        """
        self._closed = not extra_properties
        if not stop_ids:
            raise ModelError("the model has no end token, so it cannot end a constrained reply", "use another model")
        # Once per tokenizer: the table of a large vocabulary takes half a second.
        vocabulary = _Vocabulary(tokenizer, stop_ids)
        self._symbols = SymbolTable(vocabulary.tokens, vocabulary.special_token_ids, stop_ids)
        self._table = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary),
            n_vocab=len(tokenizer.vocabulary),
            eos_token=sorted(stop_ids),
            slices=None,
        )
        self._control = {tokenizer.vocabulary[index]: index for index in tokenizer.control_ids}
        self._rules = LarkRules(self._control)
        self._stop_ids = stop_ids

    def schema(self, text: str, source: str, prelude: Prelude | None = None, strict: bool = True) -> "Grammar":
        """Compile a JSON schema; `source`: its name in messages. Remote references are not fetched.

        strict: refuse keywords that are not supported; otherwise they are left out (`Grammar.loosened`).
        """
        prepared = self._prepare(text, source, strict)
        grammar = self._compile(self._schema(prepared, source, _FREE), source, prelude, [prepared])
        grammar.values = count_values(json.loads(text))
        return grammar

    def regex(self, pattern: str, prelude: Prelude | None = None) -> "Grammar":
        """Compile a regular expression for the whole reply, without look-around and back-references."""
        return self._compile(self._from_regex(pattern, "regular expression"), "regular expression", prelude)

    def lark(self, text: str, prelude: Prelude | None = None) -> "Grammar":
        """Compile a grammar in llguidance's dialect of Lark."""
        _check_size(text, "grammar")
        return self._compile(llguidance.LLMatcher.grammar_from_lark(text), "grammar", prelude)

    def gbnf(self, text: str, prelude: Prelude | None = None) -> "Grammar":
        """Compile a grammar in GBNF, the EBNF of llama.cpp and XGrammar; without `::=` it is read as Lark."""
        return self._compile(self._from_gbnf(text), "grammar", prelude)

    def alternative(self, kind: str, text: str, source: str, strict: bool = True) -> Alternative:
        """Return a schema, regex, lark or gbnf (`kind`) that the field `source` holds; `strict`: as in `schema`."""
        if kind == "schema":
            prepared = self._prepare(text, source, strict)
            return Alternative(self._schema(prepared, source, _FREE), source, source, (prepared,))
        if kind == "gbnf":
            return Alternative(self._from_gbnf(text), "grammar", source)
        if kind == "regex":
            return Alternative(self._from_regex(text, source), "regular expression", source)
        _check_size(text, source)
        return Alternative(str(llguidance.LLMatcher.grammar_from_lark(text)), "grammar", source)

    def any_text(self, prelude: Prelude) -> "Grammar":
        """Compile any text that is not blank, control tokens included, after reasoning within its budget."""
        others = set(self._control.values()) - self._stop_ids - {self._control.get(prelude.open)}
        tokens = sorted(str(index) for index in others - {self._control.get(prelude.close)})
        control = f" | <[{','.join(tokens)}]>" if tokens else ""
        rules = f"start: (FIRST{control}) (MORE{control})*\n{self._rules.texts(prelude)}"
        grammar = self._compile(rules, "reasoning budget", prelude, free=True)
        grammar.compile()  # its size depends on nothing in the request
        return grammar

    def calls(
        self,
        calls: Sequence[CallGrammar],
        single: bool,
        prelude: Prelude | None = None,
        otherwise: Alternative | None = None,
    ) -> "Grammar":
        """Compile one or more calls, each one of `calls`, or a single one; `otherwise`: an alternative to calls.

        The JSON has one space after each comma and colon, and no other whitespace.
        """
        choices, bodies, schemas = self._calls(calls)
        start = "call" if single else "call+"
        if otherwise is not None:
            start += " | @otherwise"
            first, *rest = grammars_of(otherwise.source)
            bodies += [{**first, "name": "otherwise"}, *rest]
            schemas += otherwise.schemas
        text = json.dumps({"grammars": [{"lark_grammar": f"start: {start}\ncall: {choices}"}, *bodies]})
        cheap = otherwise is None or bool(otherwise.schemas)
        grammar = self._compile(text, _CALLS, prelude, schemas, cheap)
        if otherwise is not None and not cheap:
            grammar.otherwise = Grammar(otherwise.source, otherwise.kind, self._table, self._symbols)
            grammar.otherwise.field = otherwise.field
        return grammar

    def calls_in_text(self, calls: Sequence[CallGrammar], prelude: Prelude | None = None) -> "Grammar":
        """Compile any text that is not blank, with any number of `calls` in it; all begin with the same mark."""
        mark = calls[0].before.strip()
        if mark in self._control:
            choices, bodies, schemas = self._calls(calls)
            rules = f"start: (FIRST | call MORE?) (call MORE?)*\ncall: {choices}\n"
        else:
            # A mark that is not a control token is ordinary text, so the text before a call is matched up to the mark.
            rest = [replace(call, before=call.before.removeprefix(mark)) for call in calls]
            choices, bodies, schemas = self._calls(rest)
            rules = f"start: FIRST | before ({choices}) (marked ({choices}))* MORE?\n"
            for name, restriction in (("before", self._rules.outside(prelude)), ("marked", "")):
                rules += f"{name}[suffix={json.dumps(mark)}]: /(.|\\n)*/{restriction}\n"
        rules += self._rules.texts(prelude, mark)
        text = json.dumps({"grammars": [{"lark_grammar": rules}, *bodies]})
        return self._compile(text, _CALLS, prelude, schemas, free=True)

    def _calls(self, calls: Sequence[CallGrammar]) -> tuple[str, list[dict[str, Any]], list[PreparedSchema]]:
        # Alternatives in Lark, the grammars that they name, and the schemas.
        schemas = [self._prepare(call.schema, _CALLS, call.strict) for call in calls]
        bodies, rules = [], []
        for index, (call, schema) in enumerate(zip(calls, schemas, strict=True)):
            (body,) = json.loads(self._schema(schema, _CALLS, _COMPACT))["grammars"]
            bodies.append({**body, "name": f"call{index}"})
            rules.append(f"({self._rules.literal(call.before)} @call{index} {self._rules.literal(call.after)})")
        return " | ".join(rules), bodies, schemas

    def _from_regex(self, pattern: str, source: str) -> str:
        _check_size(pattern, source)
        try:
            return str(llguidance.LLMatcher.grammar_from_regex(rust_pattern(pattern)))
        except ValueError as error:
            raise UsageError(f"regular expression: {error}", "use an expression without them") from None

    def _from_gbnf(self, text: str) -> str:
        from mycli.runtime.sampling.grammars.gbnf import lark_grammar

        _check_size(text, "grammar", MAX_GBNF)
        try:
            lark = lark_grammar(text)
        except Exception as error:  # the converter raises IndexError and RecursionError for damaged grammars
            cause = str(error) or type(error).__name__
            raise UsageError(f"grammar: not a usable GBNF grammar: {cause:.200}", "see llama.cpp's grammars") from None
        return str(llguidance.LLMatcher.grammar_from_lark(lark))

    def _prepare(self, text: str, source: str, strict: bool) -> PreparedSchema:
        _check_size(text, source)
        try:
            schema = json.loads(text)
            if not isinstance(schema, dict):
                raise ValueError(f"a schema must be an object, not a {type(schema).__name__}")
            if _deeper_than(schema, MAX_DEPTH):
                raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
            return prepare(schema, strict, self._closed)
        except RecursionError:
            raise _unusable(source, "references lead too deep") from None
        except ValueError as error:
            raise _unusable(source, error) from None

    def _schema(self, prepared: PreparedSchema, source: str, options: Mapping[str, Any]) -> str:
        try:
            compiled = llguidance.LLMatcher.grammar_from_json_schema(
                dict(prepared.schema),
                overrides=dict(options),  # type: ignore[arg-type]  # its TypedDict exists in the stub alone
            )
            return str(compiled)
        except ValueError as error:
            raise _unusable(source, error) from None

    def _compile(
        self,
        source: str,
        kind: str,
        prelude: Prelude | None,
        schemas: Sequence[PreparedSchema] = (),
        cheap: bool = True,
        free: bool = False,
    ) -> "Grammar":
        loosened = tuple(path for schema in schemas for path in schema.loosened)
        whole = self._rules.after(prelude, source)
        grammar = Grammar(whole, kind, self._table, self._symbols, loosened, self._reasoning(prelude), free)
        grammar.fault = next((schema.fault for schema in schemas if schema.fault), "")
        grammar.places = {text: place for schema in schemas for text, place in schema.places.items()}
        # `cheap`: all that the request wrote is in `schemas`, whose cost is known; other sources are probed first.
        light = cheap and schemas and not any(schema.patterns for schema in schemas)
        if light and sum(schema.nodes for schema in schemas) <= FREE_NODES:
            grammar.compile()
        return grammar

    def _reasoning(self, prelude: Prelude | None) -> Reasoning | None:
        if prelude is None:
            return None
        opening, closing = self._spelled(prelude.open), self._spelled(prelude.close)
        return Reasoning(opening, closing, prelude.opened, prelude.budget)

    def _spelled(self, text: str) -> Symbols:
        pieces = self._rules.pieces(text)
        return tuple(
            symbol
            for piece in pieces
            for symbol in (piece.encode() if isinstance(piece, str) else self._symbols.symbols(piece))
        )


class Grammar:
    """A grammar for the tokens of one model; it must be compiled before it is started."""

    def __init__(
        self,
        source: str,
        kind: str,
        table: Any,
        symbols: SymbolTable,
        loosened: Sequence[str] = (),
        reasoning: Reasoning | None = None,
        free: bool = False,
    ) -> None:
        """`source`: in llguidance's format, for the tokens of `table`; `kind`: its name in messages.

        `loosened`: paths of the schema's keywords that were left out; `free`: any text that is not blank matches.
        """
        self.kind, self.loosened = kind, tuple(loosened)
        self.fault, self.places = "", dict[str, str]()  # of the schema, as in `PreparedSchema`
        self.field = kind  # of the request that holds the source, if that is another
        self.values: int | None = None  # scalar values of a reply, if a schema bounds them
        # The output format alone, if calls are an alternative to it: an error in it is reported under its own field.
        self.otherwise: Grammar | None = None
        self._source, self._table, self._symbols = source, table, symbols
        self._reasoning, self.free = reasoning, free
        self._start: Any = None
        self._ending: Ending | None = None

    @property
    def ready(self) -> bool:
        return self._start is not None

    def compile(self, probe: GrammarProbe | None = None) -> None:
        """Compile the grammar; `probe`: check its cost first. Raises UsageError if it cannot be used."""
        if self.otherwise is not None:
            try:
                self.otherwise.compile(probe)
            except UserError:
                self.field = self.otherwise.field
                raise
        if probe is not None:
            probe.check(self._source, self.kind)
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL, step_max_items=STEP_ITEMS, verbose_errors=False
        )
        start = llguidance.LLMatcher(self._table, self._source, log_level=0, limits=limits)
        start.compute_bitmask()  # some limits and empty grammars are only detected by the first step
        if start.is_error() or start.is_stopped():
            cause = " ".join(start.get_error().replace("<non-verbose/>", "").split())
            if fault := re.search(r"regex parse error: .*? error: (.+?)(?: \d+ \| .*)?$", cause):
                cause = fault[1]  # the rest quotes the library's internal grammar
                if place := self._place(start.get_error()):
                    raise _unusable(self.kind, f"{place}: {cause}")
            if cause in ("", "NoExtension", "NoExtensionBias"):
                cause = "nothing can match"
            if self.fault and re.match(r"Expected .+ for '|.+ must be ", cause):
                raise _unusable(self.kind, self.fault)  # the compiler does not say where
            message = f"{self.kind}: {cause:.300}"
            raise UsageError(message, "use a simpler one, or one that can match")
        tags = self._reasoning
        closing, opened = ((), False) if tags is None else (tags.close, tags.opened)
        self._ending = Ending(start.deep_copy(), self._symbols, closing, opened)
        self._start = start

    def _place(self, error: str) -> str:
        # The path of the regular expression that an error quotes, with more escapes than the schema has.
        quoted = re.search(r"regex parse error:\n {4}(.*)\n", error)
        text = _plain(quoted[1]) if quoted else None
        return next((place for pattern, place in self.places.items() if _plain(pattern) == text), "")

    @classmethod
    def from_schema(
        cls,
        text: str,
        source: str,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int],
        extra_properties: bool = False,
    ) -> "Grammar":
        """Compile one schema, within the limits of `GrammarProbe`. Raises as `GrammarCompiler`."""
        return GrammarCompiler(tokenizer, stop_ids, extra_properties).schema(text, source)._bounded(tokenizer)

    @classmethod
    def from_regex(cls, pattern: str, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> "Grammar":
        return GrammarCompiler(tokenizer, stop_ids).regex(pattern)._bounded(tokenizer)

    def _bounded(self, tokenizer: Tokenizer) -> "Grammar":
        if not self.ready:
            self.compile(GrammarProbe(len(tokenizer.vocabulary)))
        return self

    def start(self, limits: ReplyLimits = ReplyLimits()) -> GrammarState:  # noqa: B008  # frozen
        """Return the state of a reply within `limits`."""
        assert self._ending is not None, "the grammar is not compiled"
        parser = self._start.deep_copy()
        return GrammarState(self.kind, parser, self._ending, self._symbols, limits, self._reasoning, self.free)


def _check_size(text: str, source: str, most: int = MAX_SOURCE) -> None:
    if not text or len(text) > most:
        raise UsageError(f"{source} has {len(text)} characters", f"use between 1 and {most} characters")


def _unusable(source: str, cause: object) -> UsageError:
    return UsageError(f"{source}: not a usable JSON schema: {cause}", "see https://json-schema.org")


def _plain(pattern: str) -> str:
    return re.sub(r"\\[nrt]|[\\\s]", "", pattern)


def _deeper_than(value: Any, depth: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth == 0 or any(_deeper_than(child, depth - 1) for child in children)
