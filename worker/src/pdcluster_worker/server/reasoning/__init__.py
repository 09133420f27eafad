"""What a model writes before its answer, told from the answer by tags."""
