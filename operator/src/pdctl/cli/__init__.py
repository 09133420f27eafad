"""Commands: arguments in, exit codes out; the work is in the rooms below."""
