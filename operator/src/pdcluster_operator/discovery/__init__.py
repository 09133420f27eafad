"""What workers announce in etcd, and the commands for them.  Keys are built in `keys` and nowhere else."""
