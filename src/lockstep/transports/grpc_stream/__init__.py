"""The data plane ``grpc``: regions copied in chunks over one bidirectional gRPC stream for each link."""
