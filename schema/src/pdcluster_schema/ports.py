"""Ports of a worker, and the names in its certificate and of its gRPC service."""

WORKER_NAME = "worker.pdcluster"  # what a worker expects its peer's certificate to say
WORKER_SERVICE = "pdcluster.worker.Worker"  # of its gRPC port

HTTP_PORT, GRPC_PORT, KV_PORT = 8000, 9000, 9100

MAX_ENGINES = 8  # engine processes of one worker
MAX_RANKS = 8  # of one engine: the accelerators of one machine
NUM_KV_PORTS = MAX_ENGINES * MAX_RANKS  # from KV_PORT on, as many as any revision may use
NUM_UCX_PORTS = 128  # behind them: one for each rank and each network device of the machine
