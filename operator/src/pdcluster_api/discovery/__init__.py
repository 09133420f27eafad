"""Worker records and drain commands in etcd, and verifications of KV transfers by gRPC."""
