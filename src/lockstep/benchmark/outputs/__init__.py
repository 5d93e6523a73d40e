"""What a run prints and writes: lines, logs, summaries, traces."""
