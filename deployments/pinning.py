"""Sends a Serve call to the replica it names.

Serve's own routers count requests, not tokens, and choose the replica themselves; a planned shard must go where it
was planned to go. This file leans on private parts of Ray Serve: `PinnedRequestRouter` overrides
one method of Serve's default router, and listens in on two others. `check_ray` refuses a Ray it was not read against.
Serve pickles this module by value: state of the process belongs into `membership.py`.
"""

from __future__ import annotations

import ray
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.handle import DeploymentHandle

from deployments import membership

_SUPPORTED = "2.60."
_PIN = "pin:"


class PinnedRequestRouter(PowerOfTwoChoicesRequestRouter):
    """Serve's default router, except that a call pinned with `pinned` goes to that replica or fails at once.

    Why not a policy of our own: a router with its own queue can hang for ever when one Serve request fans out,
    because nested calls share an internal request id. A pinned call never enters that queue.
    """

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        target = pending_request.metadata.session_id
        if not target.startswith(_PIN):
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        if is_retry:
            # The replica refused (max_ongoing_requests) or could not be reached: without a pause this would spin.
            await self._backoff(0)
        for replica_id, replica in self.curr_replicas.items():
            if replica_id.unique_id == target[len(_PIN) :]:
                return replica
        raise membership.ReplicaGone(f"replica {target[len(_PIN) :]} of {self._deployment_id} is gone")

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        replicas = (replica_id.unique_id for replica_id in self.curr_replicas)
        membership.publish(self._deployment_id.app_name, self._deployment_id.name, replicas)


def pinned(handle: DeploymentHandle, replica: str, method: str) -> DeploymentHandle:
    """`handle` for one call of `method` on exactly this replica."""
    return handle.options(session_id=_PIN + replica, method_name=method)


def check_ray() -> None:
    """Raise RuntimeError when the installed Ray is not the one this file was written against."""
    if not ray.__version__.startswith(_SUPPORTED):
        raise RuntimeError(
            f"ray {ray.__version__} is installed; deployments/pinning.py was written against {_SUPPORTED}x, because it "
            "overrides a private method of Serve's request router. Install ray[serve]==2.60.*"
        )
