"""Amounts of memory in words. Knows no model and no device."""

GIB = 1 << 30


def gib(count: float) -> str:
    """Bytes as GiB, with enough digits for small things: 5.11 GiB, 0.0107 GiB."""
    value = count / GIB
    return f"{value:.2f} GiB" if value >= 1 else f"{value:.3g} GiB"
