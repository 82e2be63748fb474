"""Every exception asyncrl raises on purpose.

    AsyncRLError           exit code 1: the launcher starts the process again
    ├── ConfigError        the user's mistake: printed as one line, exit code 2, never a traceback
    │   ├── NoAnswer       nobody answers at bus.url
    │   ├── NoSuchRun      the bus is there and knows no run of that name
    │   ├── NoRoom         no GPUs are free for another process
    │   └── NameTaken      another rollout worker of the run has this name: exit code 4
    ├── LaunchError        a launcher could not start a process; the next try may work
    ├── HopelessError      starting again would end the same way: exit code 3
    ├── BusError           the bus refused or lost us
    │   ├── BusFull        a topic holds as many messages as it may; try again when some were taken
    │   ├── ObjectGone     a large object is not in the store, or not any more
    │   ├── MessageTooLarge  a message is over the server's max_payload
    │   └── MessageError   bytes that are not the message they should be
    ├── EngineError        one request failed; the prompt group is tried again elsewhere
    │   ├── PromptError     no engine can answer this prompt; the group is buried
    │   └── EngineDied     the engine is gone; the rollout worker ends and its launcher restarts it
    ├── RolloutError       a RolloutFn failed on a group; it is buried with the reason
    ├── RewardError        a group could not be rewarded; it is buried with the reason
    ├── WeightsError       a weight version cannot be read (gone, torn, wrong checksum)
    ├── BackendError       a training step could not be done
    └── CheckpointError    a checkpoint cannot be written or read

To add one: subclass the boundary it belongs to, say in a sentence who catches it, put it in the tree.
"""

INTERRUPTED = 130
"""Exit code of what was drained or stopped before it was done."""


class AsyncRLError(Exception):
    """Root of everything asyncrl raises on purpose. ``exit_code``: of the process that it ends."""

    exit_code = 1


class ConfigError(AsyncRLError, ValueError):
    """The user asked for something that cannot be: where, what, and how to mend it, in one line."""

    exit_code = 2


class NoAnswer(ConfigError):
    """Nobody answers at bus.url. Who watches a run waits for it."""


class NoSuchRun(ConfigError):
    """There is no run of this name: the bus answers and has none, or none is up in the run's folder."""


class NoRoom(ConfigError):
    """No GPUs are free for another process. `asyncrl run` refuses it; a fleet that is up stays as it is."""


class NameTaken(ConfigError):
    """Another rollout worker of the run has this name. `asyncrl run` starts its own again under another one."""

    exit_code = 4


class LaunchError(AsyncRLError):
    """A launcher could not start a process. `asyncrl run` takes it for one that died: it may be tried again."""


class HopelessError(AsyncRLError):
    """What starting the process again cannot heal. Launchers end the run."""

    exit_code = 3


class BusError(AsyncRLError):
    """The bus refused a request or cannot be reached."""


class Forbidden(BusError):
    """The server does not let our role do this."""


class Unanswered(BusError):
    """The server is there and does not answer this, or has been restarted since it could have."""


class BusFull(BusError):
    """A topic is full. The publisher waits; nothing was stored."""


class ObjectGone(BusError):
    """An object is not in the store, or was removed while it was read. The weight channel takes another way."""


class MessageTooLarge(BusError):
    """A message is larger than the server takes. Nothing was stored; trying again cannot help."""


class MessageError(BusError, ValueError):
    """Bytes that do not decode to the message type they should be, or a message that contradicts itself."""


class EngineError(AsyncRLError):
    """One generation failed. The rollout worker gives the prompt back."""


class PromptError(EngineError):
    """This prompt can be answered by no engine: too long for the model, or not of its tokens. The group is buried."""


class EngineDied(EngineError):
    """The engine is gone. The rollout worker's process ends with it."""


class RolloutError(AsyncRLError):
    """A user's RolloutFn failed. The rollout worker buries the group with the reason; nothing crashes."""


class RewardError(AsyncRLError):
    """A group could not be rewarded. The rollout worker buries it with the reason; nothing crashes."""


class WeightsError(AsyncRLError):
    """A weight version cannot be read. The follower waits for the next one."""


class BackendError(AsyncRLError):
    """A training step could not be done."""


class CheckpointError(AsyncRLError):
    """A checkpoint cannot be written or read."""
