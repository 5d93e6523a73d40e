"""The data plane ``grpc+verbs``: NIXL restricted to RDMA. It runs as requested or not at all, and never falls back."""
