"""Modules of a package without the rest of it: its own ``__init__`` runs when something of it is asked for.

A library of many models may import all of its tools at once, which a family that wants a
few of its layers would wait for at every start.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

_lock = threading.RLock()


class _Deferred(ModuleType):
    """A package whose ``__init__`` has not run. Its submodules can be imported; any other name runs it first."""

    def __getattr__(self, name: str) -> Any:  # only for names that are not there
        with _lock:
            if isinstance(self, _Deferred):
                spec = self.__spec__
                assert spec is not None
                assert spec.loader is not None
                self.__class__ = ModuleType  # type: ignore[assignment]
                try:
                    spec.loader.exec_module(self)
                except BaseException:
                    self.__class__ = _Deferred
                    raise
        return getattr(self, name)


def defer_package(name: str) -> None:
    """Let imports below the top-level package ``name`` not run its ``__init__``; it runs once it is needed.

    Nothing is done if the package is imported already, or not installed.
    """
    with _lock:
        if name in sys.modules:
            return
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None or spec.submodule_search_locations is None:
            return
        module = importlib.util.module_from_spec(spec)
        module.__class__ = _Deferred
        sys.modules[name] = module
