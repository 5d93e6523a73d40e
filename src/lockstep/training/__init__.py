"""Everything that knows torch: buckets, hooks, optimizers, models, the benchmark."""
