"""What the hub finds for words of a name: repositories with safetensors, the most fetched first.

Asks for what tells whether a model can run, its family and size. Fetches nothing, and does not know what runs here.
"""

from dataclasses import dataclass
from urllib.parse import urlencode

from mycli.runtime.errors import UsageError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.names import normalize_model_name, split_name
from mycli.runtime.utils.json_fields import Fields

_EXPAND = ("config", "downloads", "gated", "safetensors")


@dataclass(frozen=True)
class SearchResult:
    """A repository: downloads of the last month, parameters and the `model_type` of its config; None: not said."""

    name: str
    downloads: int
    parameters: int | None
    model_type: str | None
    gated: bool


def search_models(hub: Hub, words: str, limit: int) -> list[SearchResult]:
    """At most `limit` models whose name holds `words`. Raises UsageError for none, and what `Hub.models` raises."""
    words = normalize_model_name(words).strip()
    if not words or len(words) > 200:
        raise UsageError("nothing to look for", "give a part of a name, such as llama 3.2")
    query = [("search", words), ("filter", "safetensors"), ("sort", "downloads"), ("limit", str(limit))]
    listing = hub.models(urlencode([*query, *(("expand[]", field) for field in _EXPAND)]))
    return [one for one in map(_parse, listing[:limit]) if one is not None]


def _parse(item: Fields) -> SearchResult | None:
    """None for a name that could not be fetched either, so that it is never shown as one."""
    name = item.text("id")
    try:
        split_name(name)
    except UsageError:
        return None
    size = item.object("safetensors").integer("total", 0, low=0, high=1 << 50)
    return SearchResult(
        name=name,
        downloads=item.integer("downloads", 0, low=0, high=1 << 50),
        parameters=size or None,
        model_type=item.object("config").text("model_type", "") or None,
        gated=item.values.get("gated", False) not in (False, None),
    )
