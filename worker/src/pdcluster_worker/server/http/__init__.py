"""The HTTP port: connections, limits, keys, and what a request passes before a route sees it."""
