"""``make fuzz``: mutated real inputs for every parser, and for the live ports of a small job."""
