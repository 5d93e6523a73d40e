"""The data plane ``grpc+ucx``: regions written from task to task by NIXL over the network devices that UCX finds."""
