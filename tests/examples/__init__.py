"""Every example runs, at small size, as a person would start it."""
