"""The suite that every transport passes. It needs neither pytest nor torch.

The caller provides the nodes that run in separate processes (``stage.NodeHosts``); ``tests/conformance_hosts`` has
some, and a command that runs all cases.
"""

from __future__ import annotations

from lockstep.transports.conformance.events import CaseFailed
from lockstep.transports.conformance.stage import NodeHosts, RemoteVictim
from lockstep.transports.conformance.suite import CASES, CaseOutcome, SuiteCase, run_case, run_suite

__all__ = ["CASES", "CaseFailed", "CaseOutcome", "NodeHosts", "RemoteVictim", "SuiteCase", "run_case", "run_suite"]
