"""Hosts for the nodes of the conformance suite that run in separate processes.

They are here and not in the package because a node host starts processes for anyone who reaches its port. Nothing in
this folder needs pytest, so that a machine under test can run it::

    PYTHONPATH=tests python -m conformance_hosts grpc+shm
"""
