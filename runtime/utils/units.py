"""Wording of amounts: bytes and counts."""

GIB = 1 << 30


def pluralize(count: int, noun: str) -> str:
    # "1 token", "2 tokens", "2 replies".
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def percent(share: float, digits: int = 0) -> str:
    """Return a share of at most 1 in percent, rounded; 100% only if it is all: 0.9999 is 99.9% with one digit."""
    rounded = f"{share:.{digits}%}"
    return f"{1 - 0.01 * 10**-digits:.{digits}%}" if share < 1 and rounded == f"{1:.{digits}%}" else rounded


def human_bytes(count: float) -> str:
    """Return bytes in the largest unit that gives at least 1: 5.11 GiB, 273 MiB, 1.5 KiB."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    size, unit = next(((s, u) for s, u in ((1 << 20, "MiB"), (1 << 10, "KiB")) if count >= s), (1, "bytes"))
    if count == 1:
        return "1 byte"
    return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:.0f} {unit}"


def distinct_sizes(first: int, second: int) -> tuple[str, str]:
    """Return two sizes as `human_bytes` words them, or in bytes if different sizes would read the same."""
    rough = human_bytes(first), human_bytes(second)
    return rough if rough[0] != rough[1] or first == second else (f"{first} bytes", f"{second} bytes")
