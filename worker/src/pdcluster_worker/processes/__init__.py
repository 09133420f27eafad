"""The processes of a worker: each wires its rooms, runs them, and ends with the others."""
