"""The data plane ``grpc+tcp``: regions sent over plain TCP connections, from memory to memory."""
