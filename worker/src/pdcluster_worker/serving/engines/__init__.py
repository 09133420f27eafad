"""The engine processes of this worker, as its server process sees them."""
