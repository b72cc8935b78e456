"""How numbers are written for a person."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def byte_text(count: int) -> str:
    """1536 as "1.5 KiB": a binary unit, three digits where there is a fraction."""
    if count < 1024:
        return f"{count} bytes" if count != 1 else "1 byte"
    amount = count / 1024
    for unit in _UNITS[:-1]:
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} {_UNITS[-1]}"


def count_text(count: int) -> str:
    """131072 as "131,072"."""
    return f"{count:,}"
