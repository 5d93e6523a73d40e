"""Everything that uses torch: buckets, hooks, optimizers, models, the benchmark."""
