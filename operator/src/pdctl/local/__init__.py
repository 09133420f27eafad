"""The process back end of `pdctl up`: etcd and workers as child processes of one machine."""
