"""Which addresses our own processes listen on, looked at again and again while something runs."""

import contextlib
import ipaddress
import threading
from collections.abc import Iterator, Sequence

import psutil

PAUSE = 0.1  # seconds between two looks: a socket that is open for less may be missed


def listening(process: psutil.Process) -> set[tuple[str, str]]:
    """Return address:port and command line of every socket on which a process or its descendants take connections."""
    found: set[tuple[str, str]] = set()
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            command = " ".join(one.cmdline())[:200]
            sockets = one.net_connections(kind="inet")
            found |= {(f"{s.laddr.ip}:{s.laddr.port}", command) for s in sockets if s.status == psutil.CONN_LISTEN}
    return found


def is_open(address: str) -> bool:
    """Return whether others than this machine reach an address."""
    ip = ipaddress.ip_address(address.rpartition(":")[0].partition("%")[0])
    return not (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


@contextlib.contextmanager
def watched(allowed: Sequence[str] = ()) -> Iterator[set[tuple[str, str]]]:
    """Fail at the end if this process, or one that it started, listened to more than loopback meanwhile.

    ``allowed`` are parts of command lines that may, such as ``torchrun``'s own. What is yielded fills with all sockets
    that listened, so that a test can say that the watch saw something.
    """
    seen: set[tuple[str, str]] = set()
    failures: list[BaseException] = []
    over, me = threading.Event(), psutil.Process()
    before = listening(me)

    def look() -> None:
        try:
            while not over.wait(PAUSE):
                seen.update(listening(me) - before)
        except BaseException as error:
            failures.append(error)

    watch = threading.Thread(target=look, daemon=True)
    watch.start()
    try:
        yield seen
    finally:
        over.set()
        watch.join()
    assert not failures, failures
    opened = {one for one in seen if is_open(one[0]) and not any(part in one[1] for part in allowed)}
    assert not opened, f"open to the network: {sorted(opened)}"
