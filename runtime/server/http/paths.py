"""The other paths under which clients of other servers request a route."""

# Of Cohere and vLLM, and of llama.cpp: all answer with `results` of `index` and `relevance_score`.
_ALIASES = {"/v1/rerank": ("/v2/rerank", "/v1/reranking", "/reranking")}


def other_paths(path: str) -> tuple[str, ...]:
    """Return the undocumented paths of the route `path`."""
    # Clients of llama.cpp, and OpenAI clients with a base URL without /v1, omit the prefix.
    short = path.startswith("/v1/") and not path.startswith("/v1/messages")
    return (*((path.removeprefix("/v1"),) if short else ()), *_ALIASES.get(path, ()))
