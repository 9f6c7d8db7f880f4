"""What a service prepares while it answers requests: new versions, and new processes."""

import os
import threading

# Less than a tenth of a processor beside a process that wants all of it: requests hardly notice it,
# and it ends however busy the host is. Linux's idle policy would wait until nobody else has to run.
_NICE = 10


def give_way() -> None:
    """Lowers the priority of the calling thread, if it isn't as low, for ever: who takes it back
    needs a privilege. Processes and threads that it begins inherit that."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), _NICE))
