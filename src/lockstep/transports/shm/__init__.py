"""The data plane ``grpc+shm``: regions in shared memory, and a socket of the same host for the signals."""
