"""`mycli run`: one prompt in, one reply out; plain text on stdout, so that it can stand in a pipe."""

import time
from pathlib import Path
from typing import Annotated

import typer

from mycli.cli import options
from mycli.cli.command import Call, command
from mycli.cli.loading import choose_sampling, load
from mycli.cli.prompt import read_prompt

EXAMPLES = (
    'mycli run pico "What is the capital of Japan?"',
    'mycli run pico "Tell me a story." --temperature 0.8 --seed 1 -n 64',
    'mycli run pico --raw "Once upon a time" -n 20',
    'echo "What is 7 times 8?" | mycli run pico -',
    'mycli run pico "Hello!" --json',
)
DEFAULT_LIMIT = 512


@command
def run(
    call: Call,
    model: options.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads standard input.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="Read the prompt, or its beginning, from a file.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--max-tokens",
            parser=options.parse_count,
            metavar="N",
            help="Most tokens to write.",
            show_default="512",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    allow_special: Annotated[
        bool, typer.Option("--allow-special", help="Read control tokens spelled in the prompt as such.")
    ] = False,
    escapes: Annotated[
        bool, typer.Option("--escapes", help="Show control characters to a terminal as they are.")
    ] = False,
    encoding_errors: Annotated[
        str,
        typer.Option("--encoding-errors", metavar="strict|replace", help="What to do with input that is not UTF-8."),
    ] = "strict",
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    context: options.Context = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Answer one prompt and exit; made for pipes.

    A model with a chat template is asked; one without, or with --raw, continues the text.
    """
    began = time.perf_counter()
    text = read_prompt(prompt, file, "replace" if encoding_errors == "replace" else "strict")
    loaded = load(call, model, device=device, dtype=dtype, context=context)
    from mycli.runtime.assistant import Reply
    from mycli.runtime.template import Message

    assistant = loaded.assistant
    if raw or assistant.tokenizer.template is None:
        ids = assistant.tokenizer.encode(text, add_special=True, allow_special=allow_special)
    else:
        messages = ([Message("system", system)] if system is not None else []) + [Message("user", text)]
        ids = assistant.tokenizer.chat(messages, allow_special=allow_special)
    sampling = choose_sampling(
        assistant.defaults,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    room = loaded.session.capacity - len(ids) + 1
    if limit is None and room > DEFAULT_LIMIT:
        limit = DEFAULT_LIMIT  # a default gives way to a full context, a number that was asked for does not
    reply = Reply(assistant, loaded.session, ids, sampling, limit=limit, stops=stop or ())
    loading = time.perf_counter() - began
    pieces = []
    for piece in reply:
        pieces.append(piece)
        if not call.out.json_mode:
            call.out.stream(piece, raw=escapes)
    timing = reply.timing
    if call.out.json_mode:
        call.out.json(
            {
                "model": loaded.source.name,
                "text": "".join(pieces),
                "finish_reason": reply.finish_reason,
                "prompt_tokens": timing.prompt,
                "completion_tokens": len(reply.tokens),
                "load_seconds": round(loading, 4),
                "first_token_seconds": round(timing.first_token_seconds, 5),
                "tokens_per_second": round(timing.tokens_per_second, 2),
            }
        )
        return
    call.out.result("")
    if reply.finish_reason != "stop":
        call.out.detail(f"the reply was cut off: {reply.finish_reason} (-n and --ctx set the limits)")
    first = f"TTFT {timing.first_token_seconds * 1e3:.0f} ms"
    speed = f"{len(reply.tokens)} tok · {timing.tokens_per_second:.1f} tok/s"
    call.out.detail(f"{speed} · {first} · prompt {timing.prompt} · loaded in {loading:.1f} s")
