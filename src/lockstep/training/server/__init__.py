"""A server's shard: reducing gradients and making the next version."""
