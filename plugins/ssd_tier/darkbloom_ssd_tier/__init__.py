"""Plugin module."""

api_version = (1, 0)
