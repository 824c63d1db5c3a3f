"""Programs that try to get out of the sandbox, or to use up the machine.

One that reaches what it should not prints ESCAPED. `@SECRET@` is a file outside that holds the word
`treasure`, `@MARKER@` a path outside that does not exist, `@PORT@` a port on which this machine
listens, `@PID@` the process that runs the tests.
"""

from __future__ import annotations

LIBC = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
"""Not every Python has ctypes; without it the program fails, which contains it too."""


def attempt(code: str, *, then: str = "print('ESCAPED')") -> str:
    """A program that says ESCAPED when `code` raises nothing."""
    body = "\n".join(f"    {line}" for line in code.splitlines())
    handler = "except BaseException as error:\n    print(type(error).__name__)"
    return f"try:\n{body}\n{handler}\nelse:\n    {then}\n"


def write_to(path: str, text: str) -> str:
    """A program that writes at once: an error in a buffered file would come too late."""
    return attempt(f"import os\nos.write(os.open({path!r}, os.O_WRONLY), {text.encode()!r})")


def on_other_processes(code: str) -> str:
    """A program that says ESCAPED when `code` raises nothing for the `pid` of another process."""
    tried = attempt(code, then="print('ESCAPED', pid)")
    body = "".join(f"    {line}\n" for line in tried.splitlines())
    return (
        "import os, resource\n"
        "for pid in {int(x) for x in os.listdir('/proc') if x.isdigit()} - {os.getpid()}:\n" + body
    )


def system_call(number: str, *arguments: str) -> str:
    """A program that makes a system call of x86_64 and says ESCAPED when it works."""
    call = ", ".join(f"ctypes.c_long({value})" for value in (number, *arguments))
    return LIBC + f"print('ESCAPED' if libc.syscall({call}) >= 0 else ctypes.get_errno())\n"


FILES = {
    "read a file outside": attempt("text = open('@SECRET@').read()", then="print('ESCAPED', text)"),
    "write a file outside": attempt("open('@MARKER@', 'w').write('here')"),
    "make a folder outside": "import os\nos.makedirs('@MARKER@/x')\nprint('in its own /tmp')\n",
    "read the password file": attempt("print(open('/etc/shadow').read())"),
    "read the users": attempt("print(open('/etc/passwd').read())"),
    "list the home": attempt("import os; assert os.listdir('/root')"),
    "list the homes": attempt("import os; assert os.listdir('/home')"),
    "write to the root": attempt("open('/here', 'w')"),
    "write to the libraries": attempt("open('/usr/lib/here', 'w')"),
    "write to Python": attempt("open('/python/lib/here', 'w')"),
    "overwrite the guest": attempt("open('/guest.pyc', 'w').write('')"),
    "delete the libraries": attempt("import os; os.unlink('/usr/lib/os-release')"),
    "symlink out of /tmp": attempt(
        "import os; os.symlink('@SECRET@', '/tmp/link'); open('/tmp/link').read()"
    ),
    "symlink to the root of process 1": attempt(
        "import os; os.symlink('/proc/1/root', '/tmp/r'); open('/tmp/r@SECRET@').read()"
    ),
    "hard link out of /tmp": attempt("import os; os.link('/guest.pyc', '/tmp/guest.py')"),
    "hard link from outside": attempt("import os; os.link('@SECRET@', '/tmp/secret')"),
    "dot-dot out of the root": attempt("open('/..' * 20 + '@SECRET@').read()"),
    "dot-dot by a descriptor": attempt(
        "import os\nfd = os.open('/', os.O_RDONLY)\nos.open('../..@SECRET@', 0, dir_fd=fd)"
    ),
    "rename over a system file": attempt(
        "import os; open('/tmp/x', 'w'); os.rename('/tmp/x', '/usr/lib/x')"
    ),
    "make a library writable": attempt("import os; os.chmod('/usr/lib', 0o777)"),
    "a file in shared memory": attempt("open('/dev/shm/here', 'w')"),
    "a file in /dev": attempt("open('/dev/here', 'w')"),
}
PROCESSES = {
    "signal the parent": attempt("import os; os.kill(@PID@, 9)"),
    "signal process 1 with 0": attempt("import os; os.kill(-1, 0)\nopen('/proc/@PID@/stat')"),
    "kill everything": "import os\nos.kill(-1, 9)\nprint('still here')\n",
    "kill process 1": "import os\nos.kill(1, 9)\nprint('fine')\n",
    "kill its group": "import os\nos.killpg(0, 9)\nprint('still here')\n",
    "see processes outside": attempt("open('/proc/@PID@/cmdline').read()"),
    "count the processes": (
        "import os\nnumbers = [x for x in os.listdir('/proc') if x.isdigit()]\n"
        "print('ESCAPED' if len(numbers) > 3 else 'alone')\n"
    ),
    "memory of other processes": on_other_processes("os.open(f'/proc/{pid}/mem', os.O_RDWR)"),
    "memory of other processes by a call": LIBC
    + on_other_processes(
        "data = (ctypes.c_long * 2)(ctypes.addressof(ctypes.create_string_buffer(1)), 0)\n"
        "assert libc.process_vm_writev(pid, data, 1, data, 1, 0) >= 0"
    ),
    "descriptors of other processes": on_other_processes("os.listdir(f'/proc/{pid}/fd')"),
    "limits of other processes": on_other_processes(
        "resource.prlimit(pid, resource.RLIMIT_AS, (1 << 40, 1 << 40))"
    ),
    "read limits of other processes": on_other_processes(
        "resource.prlimit(pid, resource.RLIMIT_AS)"
    ),
    "trace other processes": LIBC + on_other_processes("assert libc.ptrace(16, pid, 0, 0) >= 0"),
    "environment of process 1": attempt(
        "import os\ntext = open('/proc/1/environ').read()\n"
        "assert {line.partition('=')[0] for line in text.split('\\0')} - {'', *os.environ}"
    ),
    "change a kernel setting": attempt(
        "import os; os.write(os.open('/proc/sys/kernel/hostname', os.O_WRONLY), b'x')"
    ),
    "ask for a reboot": attempt(
        "import os; os.write(os.open('/proc/sysrq-trigger', os.O_WRONLY), b'b')"
    ),
    "lower the OOM score": attempt(
        "import os; os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1000')"
    ),
    "fork": attempt("import os; os.fork()"),
    "a subprocess": attempt("import subprocess; subprocess.run(['/python/bin/python3', '-V'])"),
    "a shell": attempt("import os; assert os.system('true') == 0"),
    "spawn": attempt("import os; os.posix_spawn('/python/bin/python3', ['python3', '-V'], {})"),
    "a fork bomb": "import os\nwhile True:\n    os.fork()\n",
    "a patient fork bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    ),
    "zombies": "import os\nfor _ in range(10**5):\n    if os.fork() == 0:\n        os._exit(0)\n",
    "a pool of processes": attempt("from multiprocessing import Pool\nPool(4).map(abs, [1])"),
    "trace process 1": system_call("101", "16", "1", "0", "0"),
    "a new namespace": system_call("272", "0x10000000"),
    "a device node": attempt("import os; os.mknod('/tmp/disk', 0o60600, os.makedev(8, 0))"),
    "mount": system_call("165", "0", "0", "0", "0"),
    "change the root": system_call("161", "0"),
    "a key in the keyring": system_call("250", "0", "-4", "0"),
    "outlive its parent": LIBC + attempt("assert libc.prctl(1, 0, 0, 0, 0) >= 0"),
    "become root": attempt("import os; os.setuid(0)"),
    "become the group of root": attempt("import os; os.setgid(0)"),
    "a setuid program": attempt(
        "import os\nopen('/tmp/su', 'w')\nos.chmod('/tmp/su', 0o4755)\nos.chown('/tmp/su', 0, 0)"
    ),
    "raise a limit": attempt(
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))"
    ),
    "more priority": attempt("import os; os.nice(-10)"),
    "read the disk": attempt("open('/dev/vda', 'rb').read(1)"),
    "read the memory": attempt("open('/dev/mem', 'rb').read(1)"),
}
NETWORK = {
    "connect to this machine": attempt(
        "import socket; socket.create_connection(('127.0.0.1', @PORT@), 1)"
    ),
    "connect over IPv6": attempt("import socket; socket.create_connection(('::1', @PORT@), 1)"),
    "connect beyond": attempt("import socket; socket.create_connection(('1.1.1.1', 53), 1)"),
    "look up a name": attempt("import socket; socket.gethostbyname('example.com')"),
    "send a datagram": attempt(
        "from socket import *\nsocket(AF_INET, SOCK_DGRAM).sendto(b'x', ('10.0.0.1', 9))"
    ),
    "listen": attempt("import socket; socket.create_server(('127.0.0.1', 0))"),
    "a raw socket": attempt("import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    "fetch a page": attempt(
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:@PORT@')"
    ),
    "the network of process 1": attempt(
        "import os; os.symlink('/proc/1/ns/net', '/tmp/n')\n"
        "lines = open('/proc/net/dev').read().splitlines()[2:]\nassert len(lines) > 1"
    ),
}
FLOODS = {
    "memory in one piece": "x = bytearray(10**10)\nprint('ESCAPED')\n",
    "memory bit by bit": "x = []\nwhile True:\n    x.append(bytearray(10**7))\n",
    "memory by a mapping": (
        "import mmap\nx = [mmap.mmap(-1, 1 << 26) for _ in range(100)]\nprint('ESCAPED')\n"
    ),
    "shared memory segments": system_call("29", "0", "1 << 30", "0o1600"),
    "an anonymous file": attempt("import os; os.memfd_create('x')"),
    "a large file": attempt("open('/tmp/x', 'wb').write(bytes(1 << 26))"),
    "a sparse file": attempt(
        "import os\nos.truncate(os.open('/tmp/x', os.O_CREAT | os.O_RDWR), 1 << 40)"
    ),
    "many files": attempt(
        "for i in range(1000):\n    open(f'/tmp/{i}', 'wb').write(bytes(1 << 20))"
    ),
    "many open files": attempt("x = [open('/dev/null') for _ in range(1000)]"),
    "many threads": attempt(
        "import threading, time\n"
        "sleep = lambda: time.sleep(9)\n"
        "for _ in range(1000):\n    threading.Thread(target=sleep, daemon=True).start()"
    ),
    "one line without end": "while True:\n    print('x' * 10**6, end='')\n",
    "many lines": "while True:\n    print('x')\n",
    "a flood of errors": "import sys\nfor _ in range(10**5):\n    sys.stderr.write('x' * 100)\n",
    "a flood of messages": "import os\nwhile True:\n    os.write(60, b'x' * 65536)\n",
    "a message of four gigabytes": (
        "import os\nos.write(60, b'\\xff\\xff\\xff\\xffD')\nwhile True: pass\n"
    ),
    "a deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)\nf([sorted([1], key=f)])\n"
    ),
    "a crash in C": LIBC + "ctypes.string_at(0)\n",
    "a huge number": "print(len(str(9**9**9)))\n",
}
HANGS = {
    "a loop": "while True:\n    pass\n",
    "a long sleep": "import time\ntime.sleep(1000)\n",
    "a loop deaf to signals": (
        "import signal\nfor number in range(1, 65):\n    try:\n"
        "        signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\n"
        "while True:\n    pass\n"
    ),
    "a loop that catches everything": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass\n"
    ),
    "blocked signals": (
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
        "time.sleep(1000)\n"
    ),
    "a thread that never ends": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"
    ),
    "a hook at the end": "import atexit, time\natexit.register(time.sleep, 1000)\n",
    "a lock": "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()\n",
    "one call into C": "sum(range(10**12))\n",
    "a regular expression": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')\n",
    "a pipe that nobody writes": "import os\nos.read(os.pipe()[0], 1)\n",
    "stop itself": (
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(1000)\n"
    ),
}
HOSTILE = {**FILES, **PROCESSES, **NETWORK, **FLOODS, **HANGS}
