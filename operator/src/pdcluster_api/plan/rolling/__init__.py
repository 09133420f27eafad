"""Rolling: old workers are replaced by new ones step by step, all roles in step. Pure."""
