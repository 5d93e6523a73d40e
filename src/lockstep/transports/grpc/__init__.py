"""The data plane ``grpc``: regions copied in chunks over one bidirectional gRPC stream per link."""
