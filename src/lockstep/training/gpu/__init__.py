"""What workers and servers on a GPU share: pinned memory, events, a stream of their own."""
