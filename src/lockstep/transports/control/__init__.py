"""The control plane: the gRPC contract, its codec, channels and links."""
