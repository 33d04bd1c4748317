"""Receipts: everything that determined the tokens of a reply, so that it can be replayed and compared by token."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mycli.runtime.device.probe import cpu_name
from mycli.runtime.diagnostics.selftest import versions
from mycli.runtime.errors import Declined, ModelError
from mycli.runtime.kernels.cpu.library.build import native
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.utils.files import disk_errors, read_input, write_atomic
from mycli.runtime.utils.json_fields import Fields, parse_object

if TYPE_CHECKING:  # the caller opens the model; this room may not import `open`
    from mycli.runtime.engine.replies.completion import Completion
    from mycli.runtime.engine.replies.opened_model import OpenedModel

_MAX_BYTES = 64 << 20
_VERSION = 1

Settings = Mapping[str, str | int | bool | None]


@dataclass(frozen=True)
class Receipt:
    """A reply, and everything that determined its tokens.

    files: sha256 of each file of the model by name; template: sha256 of the chat template, "" without one; settings (of
    the engine) and format (of the reply): with the caller's names and values; prompt, tokens: ids.
    """

    model: str
    files: Mapping[str, str]
    template: str
    program: Mapping[str, str]
    settings: Settings
    sampling: SamplingParams
    format: Settings
    stops: tuple[str, ...]
    limit: int | None
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish_reason: str

    def write(self, path: Path) -> None:
        record = {"receipt_version": _VERSION, **json.loads(json.dumps(asdict(self)))}
        with disk_errors(path):
            write_atomic(path, (json.dumps({**record, "sha256": _digest(record)}, indent=1) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a receipt. Raises NotFoundError; ModelError for another file or a changed receipt; UsageError."""
        data = read_input(path, _MAX_BYTES)
        try:
            fields = parse_object(data, path.name, _MAX_BYTES)
        except ModelError as error:
            raise ModelError(error.message, "make a new receipt") from None
        if fields.integer("receipt_version") != _VERSION:
            raise fields.fail("receipt_version", f"must be {_VERSION}", "replay it with the version that wrote it")
        record = {name: value for name, value in fields.values.items() if name != "sha256"}
        if fields.text("sha256") != _digest(record):
            raise ModelError(f"{path}: was changed after it was written: its sha256 differs", "make a new receipt")
        return cls(
            model=fields.text("model"),
            files=_texts(fields.object("files")),
            template=fields.text("template", ""),
            program=_texts(fields.object("program")),
            settings=fields.object("settings").values,
            sampling=_sampling(fields.object("sampling")),
            format=fields.object("format").values,
            stops=tuple(fields.array("stops", str)),
            limit=fields.integer("limit") if fields.has("limit") else None,
            prompt=tuple(fields.array("prompt", int, 1 << 24)),
            tokens=tuple(fields.array("tokens", int, 1 << 24)),
            finish_reason=fields.text("finish_reason"),
        )


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _texts(fields: Fields) -> dict[str, str]:
    return {name: fields.text(name) for name in fields.values}


def _sampling(fields: Fields) -> SamplingParams:
    biases = fields.array("logit_bias", list)
    for pair in biases:
        if len(pair) != 2 or type(pair[0]) is not int or type(pair[1]) not in (int, float):
            raise fields.fail("logit_bias", "must be pairs of a token and a number")
    return SamplingParams(
        temperature=fields.number("temperature"),
        top_k=fields.integer("top_k", low=0),
        top_p=fields.number("top_p"),
        min_p=fields.number("min_p"),
        repetition_penalty=fields.number("repetition_penalty"),
        seed=fields.integer("seed", low=-(1 << 63), high=(1 << 63) - 1) if fields.has("seed") else None,
        logit_bias=tuple((token, bias) for token, bias in biases),
        presence_penalty=fields.number("presence_penalty", low=-2),
        frequency_penalty=fields.number("frequency_penalty", low=-2),
    )


@dataclass(frozen=True)
class TokenDifference:
    """The first position at which two replies differ; None where a reply has ended."""

    index: int
    expected: int | None
    actual: int | None


def file_hashes(paths: Iterable[Path]) -> dict[str, str]:
    """Return the sha256 of each file by name."""
    hashes = {}
    for path in sorted(paths):
        with path.open("rb") as file:
            hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def different_files(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """Return the names of files that differ or are missing on one side."""
    return sorted(name for name in {*expected, *actual} if expected.get(name) != actual.get(name))


def template_hash(opened: "OpenedModel") -> str:
    template = opened.tokenizer.template
    return "" if template is None else hashlib.sha256(template.source().encode()).hexdigest()


def describe_program(opened: "OpenedModel") -> dict[str, str]:
    """Return versions, processor or GPU, and the instruction set of the native code."""
    # Not part of the comparison: other kernels may give the same tokens. Differences are shown as a possible cause.
    device = opened.placement.device
    if device.type == "cuda":
        import torch

        return {**versions(), "device": torch.cuda.get_device_name(device)}
    library = native()
    instructions = "none" if isinstance(library, Declined) else library.isa
    return {**versions(), "device": cpu_name(), "instructions": instructions}


def replay(reply: "Completion", receipt: Receipt) -> TokenDifference | None:
    """Generate `reply` until a token differs from the receipt's; None if the whole reply is the same."""
    # Compared while it is generated, to stop at the first difference: all later tokens follow from it.
    for _ in reply:
        difference = first_difference(receipt.tokens[: len(reply.tokens)], reply.tokens)
        if difference is not None:
            return difference
    return first_difference(receipt.tokens, reply.tokens)


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> TokenDifference | None:
    pairs = enumerate(zip_longest(expected, actual))
    return next((TokenDifference(index, *pair) for index, pair in pairs if pair[0] != pair[1]), None)
