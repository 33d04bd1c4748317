"""Which requests can ever have their turn, told before they wait for it.

Plain Python: knows numbers of tokens; does not know who else wants something.
"""

from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import UsageError


def reply_room(context: int, prompt: int) -> int:
    """Return how many tokens can be sampled after `prompt` tokens; below 1 if the prompt does not fit.

    The last sampled token needs no place in the cache, so there is room for one more than the context has left.
    """
    return context - prompt + 1


def reply_limit(request: Request, context: int, held: int) -> int:
    """Tokens that may be drawn at most, in a context of `context` tokens and a cache that holds `held`.

    Raises UsageError for an empty prompt, and with the numbers for what does not fit.
    """
    prompt = len(request.prompt)
    if not prompt:
        raise UsageError("the prompt is empty", "write something, or use a model that has a start token")
    if prompt > context:
        raise UsageError(f"the prompt has {prompt} tokens, the context has room for {context}", code="more-context")
    room = reply_room(context, prompt)
    if request.limit is not None and request.limit > room:
        raise UsageError(
            f"{prompt} prompt tokens and {request.limit} more do not fit the context of {context}",
            code="fewer-tokens-or-more-context",
            data={"tokens": max(room, 0)},
        )
    limit = room if request.limit is None else request.limit
    if prompt + max(limit - 1, 0) > held:
        raise UsageError(
            f"{prompt} prompt tokens and {limit} more do not fit the cache of {held} tokens",
            code="fewer-tokens-or-more-context",
            data={"tokens": max(held - prompt + 1, 0)},
        )
    return limit
