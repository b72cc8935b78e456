"""Which family reads which ``model_type``, and what to say when none does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from darkbloom_core.contracts import ModelFamily
from darkbloom_core.plugins._discovery import normalize
from darkbloom_core.plugins._report import PluginReport


class FamilyTable:
    """The families so far, by ``model_type``. What a plugin offers is taken whole or not at all."""

    def __init__(self) -> None:
        self.by_model_type: dict[str, ModelFamily] = {}
        self.plugin_of: dict[str, str] = {}
        self._families: list[ModelFamily] = []

    @property
    def families(self) -> tuple[ModelFamily, ...]:
        """In the order of their plugins."""
        return tuple(self._families)

    def add(self, plugin: str, families: Sequence[ModelFamily]) -> None:
        """Take the families of ``plugin``.

        Raises ``ValueError`` for a ``model_type`` that is taken, ``TypeError`` for what is no family.
        """
        claims: dict[str, ModelFamily] = {}
        for family in families:
            if not isinstance(family.name, str) or not isinstance(family.version, str):
                raise TypeError(f"{type(family).__name__}.name and .version must be str")
            if isinstance(family.model_types, str):
                raise TypeError(f"{type(family).__name__}.model_types must be a set of str")
            for model_type in family.model_types:
                claim = model_type.lower()
                if claim in claims or claim in self.by_model_type:
                    owner = (claims.get(claim) or self.by_model_type[claim]).name
                    raise ValueError(
                        f"the family {owner} reads model_type {claim} already: keep one of the two"
                    )
                claims[claim] = family
        self.by_model_type.update(claims)
        self.plugin_of.update((family.name, plugin) for family in families)
        self._families.extend(families)


def missing_family(
    model_type: str,
    known: Sequence[str],
    catalogue: Mapping[str, Sequence[str]],
    reports: Sequence[PluginReport],
) -> str:
    """One line: no family reads ``model_type``, and what to install or mend."""
    start = f"no installed family reads model_type {model_type!r}"
    packages = catalogue.get(model_type.lower(), ())
    for report in reports:
        if report.distribution and normalize(report.distribution) in packages:
            state = f"{report.state}: {report.reason}" if report.reason else report.state
            return f"{start}: the plugin {report.name} of {report.distribution} does, but it is {state}"
    if packages:
        return f"{start}: pip install {' or '.join(packages)}"
    readable = ", ".join(sorted(known)) if known else "none"
    return (
        f"{start}: install a package that adds such a family to darkbloom, and see `darkbloom plugins` "
        f"(readable here: {readable})"
    )
