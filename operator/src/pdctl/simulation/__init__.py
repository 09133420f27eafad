"""`pdctl simulate`: inputs of the simulator, and its results as text and pictures."""
