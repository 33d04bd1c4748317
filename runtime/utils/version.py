"""The version of this program. Knows the name of its distribution."""

from importlib import metadata


def version() -> str:
    """Of the installed distribution; a checkout that runs from its links is not installed."""
    try:
        return metadata.version("mycli-llm")
    except metadata.PackageNotFoundError:
        return "0+checkout"
