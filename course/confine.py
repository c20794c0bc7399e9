"""Take rights away from this process before it runs code that nobody has read.

Everything here is one-way: a process that confined itself cannot undo it, nor can what it
starts. Linux only (Landlock from 5.13 on, seccomp); nothing has to be installed or set up, and
root is not needed. Who is root loses its capabilities, so that it is a user like any other.

What is left: computing, reading Python and the installed packages, writing into one folder. What
is gone: starting processes and programs, signals to others, the network, every other file.
"""

import ctypes
import os
import platform
import struct
import sys
import sysconfig

# Elsewhere there is none to load; `missing` says what that means.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_ON_FILES = 1 << 0 | 1 << 1 | _READ_FILE | 1 << 14 | 1 << 15
# Which rights each version of Landlock knows: those it does not know must not be asked for.
_KNOWN_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_ALL_RIGHTS = (1 << 16) - 1
_NETWORK = 1 << 0 | 1 << 1
_SCOPES = 1 << 0 | 1 << 1

_EPERM, _ENOSYS = 1, 38
_DIE_WITH_PARENT = 1
_CLONE_THREAD = 0x10000
# Names beside the numbers of the two processors that have them; None: no such call there.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_FORBIDDEN_CALLS = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "bpf": (321, 280),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    # Memory that the limit on a process's own data would not see.
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "mq_open": (240, 180),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
}
_CLONE, _CLONE3, _PRLIMIT, _PRCTL = (56, 220), (435, 435), (302, 261), (157, 167)


class CannotConfine(Exception):
    """This system lacks what confining needs; the message says what."""


def missing() -> str:
    """Return what this system lacks for confining a process, empty if nothing.

    Example:
        >>> import sys
        >>> missing() == "" or sys.platform != "linux" or "Landlock" in missing()
        True
    """
    if sys.platform != "linux" or platform.machine() not in _ARCHITECTURES:
        return "Linux on x86_64 or aarch64"
    if landlock_version() < 1:
        return "Landlock, which Linux has from 5.13 on unless it is switched off"
    return ""


def landlock_version() -> int:
    """Return the version of Landlock this kernel has switched on, 0 or less for none."""
    return _LIBC.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))


def confine(folder: str, readable: list[str], *, data: int, seconds: int, file_size: int) -> None:
    """Confine this process, and all it will ever start, for good.

    Call it while the process has one thread: other threads would stay as free as they are.

    Args:
        folder: The only folder it may write to.
        readable: Further files and folders it may read, beside Python and installed packages.
        data: Bytes of memory of its own, from the start of the process on.
        seconds: Seconds of a processor's time.
        file_size: Bytes of the largest file.

    Raises:
        CannotConfine: The system lacks something, or refused; nothing may be run then.
    """
    lacking = missing()
    if lacking:
        raise CannotConfine(f"confining a submission needs {lacking}")
    _limit(data, seconds, file_size)
    _call("prctl", _LIBC.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS
    _drop_capabilities()
    _restrict_files(folder, [*_python_folders(), *_SYSTEM_FILES, "/proc/self", *readable])
    _restrict_calls()


def die_with_parent() -> None:
    """End this process as soon as the one that started it ends, whatever it is doing then."""
    _call("prctl", _LIBC.prctl(_DIE_WITH_PARENT, 9, 0, 0, 0))


#: What libraries read on their way: number of processors, fonts, time zone, random numbers.
_SYSTEM_FILES = (
    *("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share", "/dev/null", "/dev/urandom"),
    *("/etc/fonts", "/etc/localtime", "/etc/ld.so.cache", "/proc/cpuinfo", "/proc/meminfo"),
    "/sys/devices/system/cpu",
)


def _python_folders() -> list[str]:
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    libraries = [paths[name] for name in names]
    shared = sysconfig.get_config_var("LIBDIR")
    return [sys.prefix, *libraries, *([shared] if shared else [])]


def _limit(data: int, seconds: int, file_size: int) -> None:
    import resource  # Not on Windows, where this module is imported all the same.

    limits = {
        resource.RLIMIT_DATA: data,
        resource.RLIMIT_FSIZE: file_size,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: seconds,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _call("capset", _LIBC.capset(header, (ctypes.c_uint32 * 6)()))


def _restrict_files(folder: str, readable: list[str]) -> None:
    version = landlock_version()
    rights = _KNOWN_RIGHTS.get(version, _ALL_RIGHTS)
    wanted = struct.pack("QQQ", rights, _NETWORK, _SCOPES)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _LIBC.syscall(_LANDLOCK_CREATE, wanted, ctypes.c_size_t(size), ctypes.c_uint32(0))
    _call("landlock_create_ruleset", rules)
    writable = rights & ~(1 << 0)
    for path, allowed in [(folder, writable)] + [(p, _READ_FILE | _READ_DIR) for p in readable]:
        if not os.path.exists(path):
            continue
        # /dev/null is there to be written to, and harmless.
        allowed |= 1 << 1 if path == "/dev/null" else 0
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed &= rights if os.path.isdir(path) else rights & _ON_FILES
        rule = struct.pack("=Qi", allowed, handle)
        done = _LIBC.syscall(_LANDLOCK_ADD, rules, 1, rule, ctypes.c_uint32(0))
        _call("landlock_add_rule", done)
        os.close(handle)
    _call("landlock_restrict_self", _LIBC.syscall(_LANDLOCK_RESTRICT, rules, ctypes.c_uint32(0)))
    os.close(rules)


def _restrict_calls() -> None:
    machine = platform.machine()
    column = list(_ARCHITECTURES).index(machine)
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | _EPERM, 0x00050000 | _ENOSYS
    load, equal, at_least, bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    number, architecture, first_argument = 0, 4, 16
    code = [
        (load, 0, 0, architecture),
        (equal, 1, 0, _ARCHITECTURES[machine]),
        (answer, 0, 0, refuse),
        (load, 0, 0, number),
        # The 32-bit interface of a 64-bit processor has other numbers for the same calls.
        (at_least, 0, 1, 0x40000000),
        (answer, 0, 0, refuse),
        (equal, 0, 1, _CLONE3[column]),
        # "No such call": the C library then uses clone, whose flags a filter can see.
        (answer, 0, 0, unknown),
        (equal, 0, 4, _CLONE[column]),
        (load, 0, 0, first_argument),
        (bits, 1, 0, _CLONE_THREAD),
        (answer, 0, 0, refuse),
        (answer, 0, 0, allow),
        # Who ends together with its parent must not undo that.
        (equal, 0, 4, _PRCTL[column]),
        (load, 0, 0, first_argument),
        (equal, 0, 1, _DIE_WITH_PARENT),
        (answer, 0, 0, refuse),
        (answer, 0, 0, allow),
        (equal, 0, 4, _PRLIMIT[column]),
        (load, 0, 0, first_argument),
        (equal, 0, 1, 0),
        (answer, 0, 0, allow),
        (answer, 0, 0, refuse),
    ]
    for numbers in _FORBIDDEN_CALLS.values():
        if numbers[column] is not None:
            code += [(equal, 0, 1, numbers[column]), (answer, 0, 0, refuse)]
    code.append((answer, 0, 0, allow))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    address = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    )
    _call("seccomp", _LIBC.prctl(22, 2, address, 0, 0))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _call(name: str, result: int) -> None:
    if result < 0:
        reason = os.strerror(ctypes.get_errno())
        raise CannotConfine(f"the system refused {name}: {reason}")
