"""The coordinator's state machines, each as a table of the allowed transitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from ddpjob_runtime.protocol import CoordinatorState, MemberState


class RoundState(Enum):
    """The states of a round.

    `BROKEN` means that the round can no longer succeed. `JUDGED` means that the cause is settled as
    well, although some workers may still be ending.
    """

    BUILDING = "Building"
    RUNNING = "Running"
    BROKEN = "Broken"
    JUDGED = "Judged"
    SUCCEEDED = "Succeeded"
    SUPERSEDED = "Superseded"


MEMBER_TRANSITIONS: Mapping[MemberState, set[MemberState]] = {
    MemberState.STARTING: {MemberState.READY, MemberState.RUNNING, MemberState.LEAVING, MemberState.LOST},
    MemberState.READY: {MemberState.RUNNING, MemberState.LEAVING, MemberState.LOST},
    MemberState.RUNNING: {MemberState.READY, MemberState.FINISHED, MemberState.LEAVING, MemberState.LOST},
    MemberState.FINISHED: {MemberState.READY, MemberState.LEAVING, MemberState.LOST},
    MemberState.LEAVING: {MemberState.LOST},
    MemberState.LOST: set(),
}
"""Allowed changes to a member's state. A member that reconnects to a new coordinator changes
directly from Starting to Running.
"""

ROUND_TRANSITIONS: Mapping[RoundState, set[RoundState]] = {
    RoundState.BUILDING: {RoundState.RUNNING, RoundState.BROKEN, RoundState.SUCCEEDED, RoundState.SUPERSEDED},
    RoundState.RUNNING: {RoundState.BROKEN, RoundState.SUCCEEDED, RoundState.SUPERSEDED},
    RoundState.BROKEN: {RoundState.JUDGED, RoundState.SUPERSEDED},
    RoundState.JUDGED: set(),
    RoundState.SUCCEEDED: set(),
    RoundState.SUPERSEDED: set(),
}
"""Allowed changes to a round's state. A round that was taken over becomes Superseded when a member
of a later round reconnects.
"""

COORDINATOR_TRANSITIONS: Mapping[CoordinatorState, set[CoordinatorState]] = {
    CoordinatorState.FORMING: {
        CoordinatorState.RUNNING,
        CoordinatorState.RESTARTING,
        CoordinatorState.SUCCEEDED,
        CoordinatorState.STOPPED,
    },
    CoordinatorState.RUNNING: {
        CoordinatorState.RESTARTING,
        CoordinatorState.FORMING,
        CoordinatorState.SUCCEEDED,
        CoordinatorState.STOPPED,
    },
    CoordinatorState.RESTARTING: {
        CoordinatorState.RUNNING,
        CoordinatorState.FORMING,
        CoordinatorState.SUCCEEDED,
        CoordinatorState.STOPPED,
    },
    CoordinatorState.SUCCEEDED: set(),
    CoordinatorState.STOPPED: set(),
}
"""Allowed changes to the coordinator's state. The state returns to Forming if the round was
superseded. If a round is taken over after all its members have finished, the state becomes
Succeeded without having been Running.
"""

S = TypeVar("S", bound=Enum)


class IllegalTransition(Exception):
    """A change of state is not in the table of allowed changes. This is a bug
    in the coordinator.
    """


class State(Generic[S]):
    """A state that can change only as its table of transitions allows."""

    def __init__(self, initial: S, transitions: Mapping[S, set[S]]) -> None:
        self.now = initial
        self._transitions = transitions

    def become(self, state: S) -> None:
        """Change to `state`. Do nothing if that is the current state.

        Raises:
            IllegalTransition: the table does not allow the change.
        """
        if state is self.now:
            return
        if state not in self._transitions[self.now]:
            raise IllegalTransition(f"{type(state).__name__}: {self.now.value} -> {state.value}")
        self.now = state
