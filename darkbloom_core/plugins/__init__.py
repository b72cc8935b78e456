"""Find, check, load, block and report plugins. A broken plugin is reported and breaks nothing else."""

from darkbloom_core.plugins._options import PluginOptions
from darkbloom_core.plugins._plugins import Plugins, load_plugins
from darkbloom_core.plugins._report import PluginReport, PluginState

__all__ = ["PluginOptions", "PluginReport", "PluginState", "Plugins", "load_plugins"]
