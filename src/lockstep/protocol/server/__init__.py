"""The machines of a server: what has arrived, what may be applied, who gets which version."""
