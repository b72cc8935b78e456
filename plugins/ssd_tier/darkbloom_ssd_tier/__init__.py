"""The encrypted prefix cache on disk. It is not built yet: the plugin says so, and offers no tier."""

api_version = (1, 0)

notice = "not available yet: no tier is offered, and nothing is written to disk"
