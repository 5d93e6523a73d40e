"""What every transport with a gRPC stream between its two ends shares."""
