"""darkbloom serves large language models with MLX from a small core and plugins.

The core knows no model by name: families, cache tiers and telemetry sinks are
separate packages found through the entry-point group ``darkbloom``.
"""

from importlib.metadata import version

__version__ = version("darkbloom-core")
__all__ = ["__version__"]
