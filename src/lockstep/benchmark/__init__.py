"""The benchmark of tf_cnn_benchmarks on PyTorch: settings, models, data, training loop, outputs, comparison."""
