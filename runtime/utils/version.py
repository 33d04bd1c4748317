"""The version of this program. Knows the name of its distribution."""


def version() -> str:
    """Of the installed distribution; a checkout that runs from its links is not installed."""
    from importlib import metadata  # which takes as long as a light command

    try:
        return metadata.version("mycli-llm")
    except metadata.PackageNotFoundError:
        return "0+checkout"
