"""One per cluster: counts the quotas of all ingresses, and collects the metrics of all processes.

A member reports every few seconds. Promises that a member which has ended holds no quota after `SILENT_SECONDS`, and that each
report corrects what was counted for its member, so that a new coordinator learns which requests run. Knows nothing about Ray.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outrider.server.http.exposition import merged
from outrider.server.http.quotas import Quotas, Refusal
from outrider.server.settings import Auth
from outrider.server.telemetry.metrics import Metrics

REPORT_SECONDS = 5.0
SILENT_SECONDS = 4 * REPORT_SECONDS


@dataclass
class Member:
    """The last report of one process."""

    reported_at: float  # the clock's time at the report
    page: bytes = b""
    held: Counter[str] = field(default_factory=Counter)  # running requests by principal


class Coordinator:
    """The quotas and the metrics of a cluster."""

    def __init__(self, auth: Auth, clock: Callable[[], float] = time.monotonic) -> None:
        """`auth` needs no keys, only the quotas by name."""
        self._quotas = Quotas(auth, Metrics(), clock=clock)
        self._clock = clock
        self._members: dict[str, Member] = {}

    async def admit(self, member: str, principal: str, seconds_per_request: float) -> Refusal | None:
        """Counts a request of an ingress, unless the quota is used up."""
        refusal = self._quotas.enter(principal, seconds_per_request)
        self._member(member).held[principal] += refusal is None
        return refusal

    async def release(self, member: str, principal: str) -> None:
        """Records that a request has ended."""
        known = self._members.get(member)
        if known is not None and known.held[principal] > 0:
            known.held[principal] -= 1
            self._quotas.adopt(principal, -1)

    async def charge(self, principal: str, requests: int) -> None:
        self._quotas.charge(principal, requests)

    async def report(self, member: str, page: bytes, held: Mapping[str, int]) -> None:
        """Takes a member's metrics page, and the requests that it runs, which replace what was counted for it."""
        known = self._member(member)
        for principal in {*known.held, *held}:
            self._quotas.adopt(principal, held.get(principal, 0) - known.held[principal])
        known.held = Counter(held)
        known.page, known.reported_at = page, self._clock()
        self._drop_silent()

    async def page(self) -> bytes:
        """The metrics of all members, with the label `replica`."""
        self._drop_silent()
        return merged([(name, member.page) for name, member in self._members.items()], "replica")

    def _member(self, name: str) -> Member:
        return self._members.setdefault(name, Member(self._clock()))

    def _drop_silent(self) -> None:
        for name, member in list(self._members.items()):
            if self._clock() - member.reported_at > SILENT_SECONDS:
                for principal, count in member.held.items():
                    self._quotas.adopt(principal, -count)
                del self._members[name]
