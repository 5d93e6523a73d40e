"""What workers and servers on a GPU share: pinned memory, events, separate streams."""
