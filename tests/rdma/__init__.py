"""``grpc+verbs`` over a real RDMA device: Soft-RoCE of a stock kernel, in small virtual machines."""
