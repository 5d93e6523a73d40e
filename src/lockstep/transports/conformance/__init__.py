"""The suite that every transport passes. Shipped, and needs neither pytest nor torch.

``python -m lockstep.transports.conformance grpc`` prints a table and exits with 0 or 1.
"""

from __future__ import annotations

from lockstep.transports.conformance.events import CaseFailed
from lockstep.transports.conformance.suite import CASES, Case, Outcome, run_case, run_suite

__all__ = ["CASES", "Case", "CaseFailed", "Outcome", "run_case", "run_suite"]
