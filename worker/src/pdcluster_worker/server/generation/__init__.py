"""One generation, whatever its API: from a checked body to a plan, its run, and its answer."""
