"""Every rank trains: gradients are averaged among the workers, and the mean is in ``p.grad`` when backward ends.

``rank_replica.py`` decides when a bucket is ready; an ``Averager`` carries it. ``torch_averager.py`` uses gloo or NCCL.
"""
