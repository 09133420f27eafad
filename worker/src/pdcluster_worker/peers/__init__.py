"""Other workers: etcd discovery, gRPC clients and services, mutual TLS."""
