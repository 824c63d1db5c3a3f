"""The system calls that a program in the sandbox may not make, as a filter bubblewrap loads.

Namespaces and resource limits do most of the work. The filter closes what they leave open: new
processes (each would have a memory limit of its own), memory outside the address space (System V
segments, memfd), sockets, tracing, new namespaces, keyrings, rarely used parts of the kernel, and
the wish not to die with the parent.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct

from moored.errors import EnvError

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine -> AUDIT_ARCH of the kernel."""

# Name -> number on x86_64, on aarch64 (None: it does not exist there).
FORBIDDEN: dict[str, tuple[int, int | None]] = {
    **{"fork": (57, None), "vfork": (58, None), "ptrace": (101, 117), "kcmp": (312, 272)},
    **{"process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438)},
    **{"shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186)},
    **{"mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447)},
    **{"socket": (41, 198), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426)},
    **{"io_uring_register": (427, 427), "userfaultfd": (323, 282), "bpf": (321, 280)},
    **{"perf_event_open": (298, 241), "inotify_init": (253, None), "inotify_init1": (294, 26)},
    **{"fanotify_init": (300, 262), "add_key": (248, 217), "request_key": (249, 218)},
    **{"keyctl": (250, 219), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40)},
    **{"umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428)},
    **{"move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432)},
    **{"mount_setattr": (442, 442), "mknod": (133, None), "mknodat": (259, 33)},
    **{"name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "acct": (163, 89)},
    **{"personality": (135, 92), "syslog": (103, 116), "quotactl": (179, 60)},
    **{"reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "vhangup": (153, 58)},
    **{"init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106)},
    **{"kexec_load": (246, 104), "iopl": (172, None), "ioperm": (173, None)},
    **{"modify_ldt": (154, None), "sethostname": (170, 161), "setdomainname": (171, 162)},
    **{"settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171)},
    **{"clock_adjtime": (305, 266)},
}
CLONE = {"x86_64": 56, "aarch64": 220}
PRCTL = {"x86_64": 157, "aarch64": 167}
PR_SET_PDEATHSIG = 1
CLONE3 = 435
CLONE_THREAD = 0x00010000
X32_BIT = 0x40000000

LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCH_AT, FIRST_ARGUMENT_AT = 0, 4, 16
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


@functools.cache
def seccomp_filter(machine: str | None = None) -> bytes:
    """The filter as an array of `struct sock_filter`, for `bwrap --seccomp`."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise EnvError(
            f"code: the bubblewrap sandbox knows the system calls of "
            f"{' and '.join(ARCHITECTURES)}, not of {machine}; set sandbox=docker"
        )
    column = list(ARCHITECTURES).index(machine)
    numbers = [found[column] for found in FORBIDDEN.values()]
    lines = [
        *[_line(LOAD, ARCH_AT), _line(EQUAL, ARCHITECTURES[machine], 1, 0), _line(RETURN, KILL)],
        *[_line(LOAD, NUMBER_AT), _line(AT_LEAST, X32_BIT, 0, 1), _line(RETURN, KILL)],
        # The C library then falls back to clone, whose flags a filter can read.
        *_refuse(CLONE3, errno.ENOSYS),
        *(line for number in numbers if number is not None for line in _refuse(number)),
        # Threads are allowed, processes are not.
        *[_line(EQUAL, CLONE[machine], 0, 3), _line(LOAD, FIRST_ARGUMENT_AT)],
        *[_line(HAS_BITS, CLONE_THREAD, 5, 0), _line(RETURN, REFUSE | errno.EPERM)],
        # A guest that is process 1 dies with bwrap by this signal alone.
        *[_line(EQUAL, PRCTL[machine], 0, 3), _line(LOAD, FIRST_ARGUMENT_AT)],
        *_refuse(PR_SET_PDEATHSIG),
        _line(RETURN, ALLOW),
    ]
    return b"".join(lines)


def _refuse(number: int, code: int = errno.EPERM) -> list[bytes]:
    return [_line(EQUAL, number, 0, 1), _line(RETURN, REFUSE | code)]


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
