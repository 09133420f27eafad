"""Worker records in etcd, and the drain commands."""
