"""Helpers without a subject of their own: atomic files and folders, a bounded worker process, checked JSON."""


def version() -> str:
    """Return the version of the installed distribution; "0+checkout" without one."""
    from importlib import metadata  # takes as long to import as a light command runs

    try:
        return metadata.version("mycli-llm")
    except metadata.PackageNotFoundError:
        return "0+checkout"
