"""Amounts of memory in words. Knows no model and no device."""

GIB = 1 << 30


def gib(count: float) -> str:
    """Bytes as GiB, or where that is less than one in the largest unit that is not: 5.11 GiB, 273 MiB, 1.5 KiB."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    size, unit = next(((s, u) for s, u in ((1 << 20, "MiB"), (1 << 10, "KiB")) if count >= s), (1, "bytes"))
    return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:.0f} {unit}"
