"""Worker records in etcd, and the drain commands.  Keys are built in `keys` and nowhere else."""
