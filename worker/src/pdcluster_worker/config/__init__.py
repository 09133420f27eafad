"""The worker's two files: the engine file, fixed for a revision, and the reloadable policy file."""
