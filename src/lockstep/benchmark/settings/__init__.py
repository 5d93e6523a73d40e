"""What a benchmark run is, and what can be wrong with it. Torch-free."""
