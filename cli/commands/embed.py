"""`mycli embed`: the vectors of texts, from a file or a pipe, as JSON lines or a NumPy array."""

from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated

from mycli.cli.command import Call, command
from mycli.cli.flags import options
from mycli.cli.flags.records import RunFlags
from mycli.cli.load import load_engine
from mycli.cli.text.input import read_file, read_standard_input
from mycli.runtime.errors import NotFoundError, UsageError
from mycli.runtime.utils.files import require_writable, write_atomic
from mycli.runtime.utils.json_fields import strict_json
from mycli.runtime.utils.units import pluralize

EXAMPLES = (
    "mycli embed Qwen/Qwen3-Embedding-0.6B texts.txt -o vectors.npy  # needs the model, and a file",
    "mycli embed Qwen/Qwen3-Embedding-0.6B queries.jsonl --prompt query  # needs the model, and a file",
)
_TOGETHER = 64  # texts that run concurrently; their vectors are printed together
_FULL_LENGTH = 4  # texts as long as the context that the cache holds


@command
def embed(
    call: Call,
    model: options.Model,
    file: Annotated[
        str,
        options.argument("FILE", "One text a line; .jsonl: a JSON string or an object with text; -: stdin."),
    ] = "-",
    output: Annotated[
        Path | None, options.option("-o --output", "FILE", "Write a NumPy array (.npy) instead of JSON lines.")
    ] = None,
    prompt: Annotated[
        str | None, options.option("--prompt", "NAME", "The model's prompt for these texts, such as query.")
    ] = None,
    dimensions: Annotated[int | None, options.option("--dimensions", "N", "Keep the first N values.", min=1)] = None,
    *,
    running: RunFlags,
) -> None:
    """Compute the vectors of texts with an embedding model.

    The model is a sentence-transformers folder, such as Qwen3-Embedding or EmbeddingGemma. Vectors are printed as JSON
    lines with the number of their text, or written to a .npy file as one fp32 row a text. A text longer than the
    context is refused with its line.
    """
    if output is not None:
        if output.suffix != ".npy":
            raise UsageError(f"-o {output}: not a .npy file", "for example: -o vectors.npy")
        require_writable(output)
    texts = _texts(call, file)
    with load_engine(call, model, running.resolve(_FULL_LENGTH, _TOGETHER)) as opened:
        rows = []
        for start in range(0, len(texts), _TOGETHER):
            vectors = opened.embed(texts[start : start + _TOGETHER], prompt, dimensions, first=start + 1)
            if output is not None:
                rows.append(vectors.numpy())
                continue
            for index, vector in enumerate(vectors.tolist(), start):
                call.out.json_record({"index": index, "embedding": vector})
    if output is not None:
        import numpy

        array, data = numpy.concatenate(rows), BytesIO()
        numpy.save(data, array, allow_pickle=False)
        write_atomic(output, data.getvalue())
        call.out.note(f"{output}: {pluralize(len(texts), 'vector')} of {array.shape[1]} values")


def _texts(call: Call, file: str) -> Sequence[str]:
    source = "standard input" if file == "-" else file
    if file != "-" and not Path(file).exists():
        raise NotFoundError(f"{file}: no such file", "name a file, or pipe the texts: echo TEXT | mycli embed MODEL")
    content = read_standard_input(call.out.note) if file == "-" else read_file(Path(file))
    lines = content.split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    if not any(map(str.strip, lines)):
        raise UsageError(f"{source} is empty", "write one text a line")
    texts = list(_json_texts(lines, source)) if file.endswith(".jsonl") else [line.rstrip("\r") for line in lines]
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise UsageError(f"{source}: line {number} is empty", "remove it: the vectors are numbered by line")
    return texts


def _json_texts(lines: Sequence[str], source: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        try:
            value = strict_json(line.encode())
        except ValueError as error:
            raise UsageError(f"{source}: line {number}: not valid JSON: {error}", "one value a line") from None
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise UsageError(f"{source}: line {number}: no text", 'a line is "..." or {"text": "..."}')
        yield text
