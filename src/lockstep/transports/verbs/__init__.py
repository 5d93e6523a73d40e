"""The data plane ``grpc+verbs``: NIXL held to RDMA. It is used as asked for or not at all; it never falls back."""
