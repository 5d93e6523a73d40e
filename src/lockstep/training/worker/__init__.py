"""A worker's model: gradients into buckets, parameters out of them, on CPUs and GPUs."""
