"""What a task knows of itself, and how it notices and reports that something is stuck."""
