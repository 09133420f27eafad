"""Pure rendering: from a PDCluster to the objects and files that run it; `render` joins them."""
