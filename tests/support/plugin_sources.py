"""Source text of plugins that tests install."""

GOOD = """
from darkbloom_core.hookspecs import hookimpl

api_version = (1, 0)


class Family:
    version = "1"

    def __init__(self, name, *model_types):
        self.name = name
        self.model_types = frozenset(model_types)
"""

FAMILY = (
    GOOD
    + """
@hookimpl
def model_families():
    return [Family("{name}", "{model_type}")]
"""
)


def family(name, model_type):
    return FAMILY.replace("{name}", name).replace("{model_type}", model_type)
