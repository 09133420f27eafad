"""The processes of a worker: each creates its parts, runs them, and ends with the others."""
