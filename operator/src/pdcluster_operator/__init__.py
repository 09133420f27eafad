"""The PDCluster operator: API types, pure planning, manifests, and pdctl."""

__version__ = "0.1.0"
