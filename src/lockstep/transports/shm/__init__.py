"""The data plane ``grpc+shm``: regions in shared memory, and a local socket for the signals."""
