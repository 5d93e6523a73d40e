"""What a server does not take: workers with another model than the chief's, and gradients that do not count."""

from __future__ import annotations

from lockstep.protocol import phrases
from lockstep.protocol.core.causes import Cause, Reason
from lockstep.protocol.core.events import GradientArrived
from lockstep.protocol.core.ids import CHIEF
from lockstep.protocol.core.messages import Layout
from lockstep.protocol.core.plan import first_difference, first_untrained_difference
from lockstep.protocol.server.contributing import ContributingWorkers
from lockstep.protocol.server.ledger import Ledger, WorkerSide, newest_edition, sealed_edition


def why_not_admitted(side: WorkerSide, chief: Layout) -> Reason | None:
    """``chief``: its layout; the worker has said its own."""
    assert side.layout is not None
    untrained = first_untrained_difference(chief.untrained, side.layout.untrained)
    if untrained is not None:
        return Reason(Cause.MISMATCH, phrases.starts_with_another_model(untrained), peer=str(CHIEF))
    if side.layout.plan_hash != chief.plan_hash:
        difference = first_difference(chief.parameters, side.layout.parameters)
        return Reason(Cause.MISMATCH, phrases.model_differs(side.id, difference), peer=str(CHIEF))
    return None


def why_not_counted(
    event: GradientArrived, ledger: Ledger, side: WorkerSide, contributing: ContributingWorkers
) -> str | None:
    """``ledger`` and ``side``: of the gradient's bucket and sender."""
    if event.incarnation != side.incarnation:
        return "of another incarnation of this worker"
    if event.step != ledger.version:
        return f"of step {event.step}; this bucket is in step {ledger.version}"
    if not contributing.includes(event.peer, event.step):
        return "does not contribute to this step"
    if ledger.is_closed:
        return "a duplicate; the step is being applied"
    known = ledger.arrived.get(event.peer)
    if known is not None and known.edition >= event.edition:
        return "a duplicate"
    final = sealed_edition(side.seal, event.step, event.bucket)
    # One that has only asked for a norm may begin the step anew, and its gradients may be here before its word.
    seal = side.seal
    if final is not None and seal is not None and seal.asks and event.edition > newest_edition(seal, event.bucket):
        return None
    if final is not None and event.edition != final:
        return f"edition {event.edition}; edition {final} was sealed"
    return None
