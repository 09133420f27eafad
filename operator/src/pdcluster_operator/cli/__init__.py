"""pdctl: arguments in, exit codes out; the work is in `local` and `api`."""
