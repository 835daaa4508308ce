"""Code that Ray's own processes run: the router of calls by tokens, and the rule of autoscaling.

Kept apart from the deployments, for routers and the controller import no torch.
"""

from typing import Any

from ray.serve.config import AutoscalingContext
from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from bytetx.serve.balance import TokenLedger, estimate_tokens
from bytetx.serve.calls import Call

QUEUED_TOKENS = "queued_tokens"  # what engines report: tokens that wait or run


class TokenAwareRouter(FIFOMixin, RequestRouter):
    """Sends a call to the replica with the fewest tokens under way, in the order of arrival.

    What this sender has sent is known at once, what others have sent from the replicas' reports.
    """

    def initialize_state(self, **_: Any) -> None:
        self.ledger: TokenLedger[ReplicaID] = TokenLedger()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Each replica is a rank of its own: one that refuses leaves the call to the next."""
        if pending_request is not None:
            # Without it Ray asks again without a pause while all replicas refuse.
            pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        reported = {
            name: float(replica.routing_stats.get(QUEUED_TOKENS, 0.0))
            for name, replica in by_id.items()
        }
        return [[by_id[name]] for name in self.ledger.ranked(by_id, reported)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        call = pending_request.args[0] if pending_request.args else None
        tokens = estimate_tokens(call) if isinstance(call, Call) else 1
        self.ledger.begin(replica_id, pending_request.metadata.internal_request_id, tokens)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self.ledger.end(replica_id, internal_request_id)


class QueuedTokensPolicy:
    """As many replicas as share all queued and running tokens, target_tokens for each.

    Ray keeps the number within its bounds and applies its delays.
    """

    def __init__(self, target_tokens: int):
        self._target_tokens = target_tokens

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        reports = (context.aggregated_metrics or {}).get(QUEUED_TOKENS)
        if not reports:  # replicas that start have said nothing yet
            return context.target_num_replicas, {}
        return sum(reports.values()) / self._target_tokens, {}
