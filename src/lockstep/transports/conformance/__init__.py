"""The suite that every transport passes. It needs neither pytest nor torch.

The caller provides the nodes that live in processes of their own (``stage.NodeHosts``); ``tests/conformance_hosts`` has
some, and a command that runs all cases.
"""

from __future__ import annotations

from lockstep.transports.conformance.events import CaseFailed
from lockstep.transports.conformance.stage import NodeHosts, Victim
from lockstep.transports.conformance.suite import CASES, Case, Outcome, run_case, run_suite

__all__ = ["CASES", "Case", "CaseFailed", "NodeHosts", "Outcome", "Victim", "run_case", "run_suite"]
