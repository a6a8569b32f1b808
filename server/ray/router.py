"""Chooses the replica of a request by consistent hashing; a busy machine is not a full one."""

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class AffinityRouter(ConsistentHashRouter):  # type: ignore[misc]  # Ray is not installed everywhere
    """Ray's router, with more time for a replica to say how many requests it has.

    One that does not say it in time counts as full, so the request goes to its neighbour, which has none of its conversation.
    """

    queue_len_response_deadline_s = 2.0
    max_queue_len_response_deadline_s = 5.0
