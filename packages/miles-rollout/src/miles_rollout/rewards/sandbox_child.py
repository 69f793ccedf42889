"""First code of a sandboxed process: gives up rights and bounds itself, then becomes the program to be judged.

Run as `python -I -S sandbox_child.py LIMITS -- PROGRAM ARGUMENTS...` with LIMITS a JSON object. What it could not
isolate is written, as JSON, to the file descriptor `report_fd` before the program starts, and nothing starts
unless everything in `require` was isolated. It uses the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys

_NEWUSER, _NEWNET, _NEWPID, _NEWNS, _NEWIPC = 0x10000000, 0x40000000, 0x20000000, 0x00020000, 0x08000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_MS_REC_PRIVATE, _MS_BIND, _MS_REMOUNT_RDONLY = 0x4000 | 0x40000, 0x1000, 0x20 | 0x1000 | 1
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 1

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _call(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _attributes(path: bytes, flags: int, *, on: int = 0, off: int = 0) -> None:
    attr = _MountAttr(on, off, 0, 0)
    size = ctypes.sizeof(attr)
    _call(
        _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, flags, ctypes.byref(attr), size),
        f"mount_setattr {path!r}",
    )


def _read_only_but(folder: bytes) -> None:
    """Every mount becomes read-only in this namespace, except `folder`."""
    _call(_libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None), "mount /")
    _call(_libc.mount(folder, folder, None, _MS_BIND, None), "bind the working folder")
    _attributes(b"/", _AT_RECURSIVE, on=_ATTR_RDONLY)
    _attributes(folder, 0, off=_ATTR_RDONLY)
    os.chdir(folder)  # the folder opened before lies under the new mount


def _isolate(folder: bytes) -> dict[str, str | None]:
    """Enter new namespaces. For each of network, processes and files: None, or why it is not isolated."""
    try:
        _call(_libc.unshare(_NEWUSER | _NEWNET | _NEWPID | _NEWIPC | _NEWNS), "unshare")
    except (OSError, AttributeError) as error:
        return dict.fromkeys(("network", "processes", "files"), str(error))
    try:
        _read_only_but(folder)
    except OSError as error:
        return {"network": None, "processes": None, "files": str(error)}
    return {"network": None, "processes": None, "files": None}


def _bound(limits: dict[str, int]) -> None:
    seconds, memory = limits["cpu_s"], limits["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_bytes"], limits["file_bytes"]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits["open_files"], limits["open_files"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _parent_died(parent: int) -> None:
    """Die with the process that waits for us, also when it is killed."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() not in (parent, 0):  # 0: the parent is outside of this process's namespace
        os._exit(1)


def _exit_like(child: int) -> None:
    """Wait for one child, whatever orphans end before it, and end with its status."""
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def main() -> None:
    """Isolate, report, bound, run."""
    split = sys.argv.index("--")
    limits, program = json.loads(sys.argv[1]), sys.argv[split + 1 :]
    _parent_died(os.getppid())
    failed = _isolate(os.fsencode(os.getcwd()))
    os.write(limits["report_fd"], json.dumps(failed).encode())
    os.close(limits["report_fd"])
    if any(failed[name] is not None for name in limits["require"]):
        os._exit(1)
    if failed["processes"] is None:
        # The first child is process 1 of the new namespace: when it ends, so does everything in there. It only
        # waits, because the kernel keeps some signals (such as that of the CPU limit) from process 1.
        if child := os.fork():
            _exit_like(child)
        _parent_died(0)
        if program_process := os.fork():
            _exit_like(program_process)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _bound(limits)
    os.execve(program[0], program, {"PATH": "/usr/bin:/bin", "HOME": os.getcwd(), "TMPDIR": os.getcwd()})


if __name__ == "__main__":
    main()
