"""The CRDs, made from the types: `scripts/crds.py` writes them."""
