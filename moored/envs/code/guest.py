"""The other side of the sandbox: limits itself, waits for a program, runs it on its tests.

Started as a script by `moored.envs.code.sandbox`, it imports the standard library alone. A message
is four bytes of length, one of status, and content. The job comes in on descriptor 0; results go
out on what descriptor 1 was at the start. A process that runs a program knows no expected output,
except in jobs of the kind "beside". Those of the kind "assert" hold tests and no program: each call
of its function goes out as a message, and a process with a job of the kind "answer" answers it.

Each import costs every program: `contextlib`, `signal` and `json` would add 6 ms each to the 11 ms
in which an interpreter starts.
"""

import _signal  # pyright: ignore[reportMissingImports]
import atexit
import marshal
import os
import sys
from _json import encode_basestring_ascii, make_scanner

READY, DONE, FAILED, CALL = b"R", b"D", b"F", b"C"
STACK_BYTES = 64 << 20
CONTROL_FD = 60


def main() -> None:
    uid, memory_bytes, num_tasks, num_files, file_bytes = map(int, sys.argv[1:6])
    filters = sys.argv[6:]
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    if filters:
        supervise()
    os.dup2(1, CONTROL_FD, inheritable=False)
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    limit("CORE", 0)
    limit("STACK", STACK_BYTES)
    limit("NOFILE", num_files)
    limit("FSIZE", file_bytes)
    limit("MEMLOCK", 0)
    limit("MSGQUEUE", 0)
    limit("AS", memory_bytes)
    if num_tasks:
        limit("NPROC", num_tasks)
    if filters:
        load_filter(filters)
    send(READY, b"")
    messages = open(os.dup(0), "rb")  # noqa: SIM115
    job = marshal.loads(read_message(messages))
    job["messages"] = messages
    limit("CPU", job["cpu_s"])
    runners = {"stdin": run_stdin, "call": run_calls, "answer": run_calls}
    runners |= {"assert": run_asserts, "beside": run_asserts}
    runners[job["kind"]](job)
    # bwrap does not reap the first process of a sandbox that ends by itself, only one that is
    # killed, and that comes next.
    _signal.pause()


def supervise() -> None:
    """Go on in a child. This process, the first of a container, ends when the child does or when
    nobody holds the other end of descriptor 0 any more; the kernel then ends all others.

    It stays root, so that a program cannot reach it, and holds no capability but to become another
    user.
    """
    import select

    os.chmod("/tmp", 0o1777)  # runc gives it the mode that it has in the image
    ours, childs = os.pipe()
    if os.fork() == 0:
        os.close(ours)
        return
    os.close(childs)
    os.dup2(2, 1)
    for number in (_signal.SIGINT, _signal.SIGPIPE):
        _signal.signal(number, _signal.SIG_IGN)
    poll = select.poll()
    poll.register(0, 0)  # its end is told in any case, and nothing else is wanted
    poll.register(ours, 0)
    poll.poll()
    os._exit(0)


def load_filter(filters: list) -> None:
    """Load the seccomp filter of this machine; each is given as `machine=hexadecimal`."""
    import ctypes

    by_machine = dict(entry.split("=") for entry in filters)
    lines = bytes.fromhex(by_machine[os.uname().machine])

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))

    program = Program(len(lines) // 8, lines)
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privs, seccomp, filter_mode = 38, 22, 2
    if libc.prctl(no_new_privs, 1, 0, 0, 0) or libc.prctl(
        seccomp, filter_mode, ctypes.byref(program)
    ):
        raise OSError(ctypes.get_errno(), "the filter of system calls was refused")


def limit(name: str, value: int) -> None:
    import resource  # not on Windows, where this module is imported too

    kind = getattr(resource, f"RLIMIT_{name}")
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def read_message(messages) -> bytes:
    return messages.read(int.from_bytes(messages.read(4), "big"))


def send(status: bytes, content: bytes) -> None:
    data = len(content).to_bytes(4, "big") + status + content
    while data:
        data = data[os.write(CONTROL_FD, data) :]


def report(error: BaseException) -> None:
    """Only the name: the text of an exception may be anything."""
    send(FAILED, type(error).__name__.encode("utf-8", "replace")[:100])


def run_stdin(job: dict) -> None:
    """The whole program once per test, with the input on descriptor 0 and the output in a file."""
    code = compile(job["source"], "program.py", "exec", dont_inherit=True)
    for text in job["tests"]:
        given, output = new_file(text.encode("utf-8", "surrogatepass")), new_file(b"")
        os.dup2(given, 0)
        os.dup2(output, 1)
        stream = open_streams()
        error: BaseException | None = None
        try:
            run_to_the_end(code, {"__name__": "__main__", "__builtins__": __builtins__})
            flush(sys.stdout)
            flush(stream)
        except BaseException as raised:
            error = raised
        discard(stream)
        if error is None:
            send(DONE, read_back(output, job["output_bytes"]))
        else:
            report(error)
        for descriptor in (given, output):
            os.close(descriptor)


def discard(stream) -> None:
    """Close it now: what it still holds must not end up in the output of the next test."""
    try:
        stream.close()
    except (ValueError, OSError):
        return


def flush(stream) -> None:
    """A program may have closed or taken apart its output; what it wrote before counts."""
    try:
        stream.flush()
    except ValueError:
        return


def run_to_the_end(code, namespace: dict) -> None:
    """What an interpreter does with a script: run it, join its threads, call what waits for exit.

    An exit with a code other than 0 counts as a failure.
    """
    try:
        exec(code, namespace)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if "threading" in sys.modules:
        join_threads()
    atexit._run_exitfuncs()


def join_threads() -> None:
    import threading

    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()


def new_file(content: bytes) -> int:
    """A descriptor of a file that holds `content` and has no name any more."""
    name = os.path.join(os.getcwd(), ".moored")
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    while content:
        content = content[os.write(descriptor, content) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def read_back(descriptor: int, max_bytes: int) -> bytes:
    """The file's content; one byte more than is allowed shows that there is too much."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    parts, missing = [], max_bytes + 1
    while missing > 0:
        part = os.read(descriptor, missing)
        if not part:
            break
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def run_calls(job: dict) -> None:
    """The program once, then a call of its function per test; what it returns goes out as JSON.

    For a job of the kind "answer" calls come one by one.
    """
    silence()
    calls = job["tests"]
    if job["kind"] == "answer":
        calls = iter(lambda: marshal.loads(read_message(job["messages"])), None)
    try:
        namespace = load_program(job)
    except BaseException as error:
        for _ in calls:
            report(error)
        return
    for arguments in calls:
        try:
            value = find_function(namespace, job["entry"])(*arguments)
            content = to_json(value).encode()
        except BaseException as error:
            report(error)
        else:
            send(DONE, content[: job["output_bytes"] + 1])


def run_asserts(job: dict) -> None:
    """The code of each test in a copy of the namespace; the kind "beside" alone has a program."""
    silence()
    try:
        namespace = load_program(job)
        namespace[job["entry"]] = (
            only_plain(find_function(namespace, job["entry"]))
            if job["kind"] == "beside"
            else elsewhere(job["messages"])
        )
    except BaseException as error:
        for _ in job["tests"]:
            report(error)
        return
    for test in job["tests"]:
        try:
            exec(compile(test, "test.py", "exec", dont_inherit=True), dict(namespace))
        except BaseException as error:
            report(error)
        else:
            send(DONE, job["token"])


def elsewhere(messages):
    """The function under test, called in the program's process: data goes out and comes back."""

    def call(*arguments):
        send(CALL, marshal.dumps(arguments))
        answer = read_message(messages)
        if answer[:1] == FAILED:
            # Not the exception itself: a StopIteration would end a loop of the test.
            raise type(answer[1:].decode("ascii", "replace"), (Exception,), {})
        return from_json(answer[1:].decode())

    return call


def from_json(text: str):
    """A value that `to_json` wrote."""
    try:
        value, end = make_scanner(Reading)(text, 0)  # pyright: ignore[reportArgumentType]
    except StopIteration:
        end = -1
    if end != len(text):
        raise ValueError("a result that is not JSON")
    return value


def read_object(entries: list):
    """A value that `to_json` writes as an object."""
    [(kind, parts)] = entries
    return READERS[kind](parts)


def silence() -> None:
    for descriptor in (0, 1):
        os.dup2(2, descriptor)
    open_streams()


def open_streams():
    """`sys.stdin` and `sys.stdout` for what descriptors 0 and 1 are now; returns the latter."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    return sys.stdout


def load_program(job: dict) -> dict:
    module = type(sys)("solution")
    sys.modules["solution"] = module
    exec(compile(job["preamble"], "preamble.py", "exec", dont_inherit=True), vars(module))
    exec(compile(job["source"], "program.py", "exec", dont_inherit=True), vars(module))
    return vars(module)


def find_function(namespace: dict, entry: str):
    """A function of the program, or a method of its class Solution (as LeetCode has it)."""
    if entry in namespace or "Solution" not in namespace:
        return namespace[entry]
    return getattr(namespace["Solution"](), entry)


def only_plain(function):
    """Results as plain data: the `==` of a type of the program could call anything equal."""

    def call(*arguments, **options):
        return from_json(to_json(function(*arguments, **options)))

    return call


def to_json(value) -> str:
    """A value in JSON; tuples, sets, dictionaries, bytes and complex as one-entry objects.

    A subclass counts as its base: the program's own methods are not called.
    """
    for kind, encode in ENCODERS:
        if isinstance(value, kind):
            return encode(value)
    if type(value).__name__ == "deque":
        return to_list(value)
    raise TypeError(f"a result of the type {type(value).__name__}")


def to_list(parts) -> str:
    return f"[{', '.join(map(to_json, parts))}]"


def float_to_json(value: float) -> str:
    text = float.__repr__(value)
    return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(text, text)


def complex_parts(value: complex) -> list:
    return [vars(complex)[name].__get__(value) for name in ("real", "imag")]


ENCODERS: tuple = (
    (type(None), lambda value: "null"),
    (bool, lambda value: "true" if value else "false"),
    (int, int.__repr__),
    (float, float_to_json),
    (str, lambda value: encode_basestring_ascii(str.__str__(value))),
    (list, lambda value: to_list(list.__iter__(value))),
    (tuple, lambda value: f'{{"tuple": {to_list(tuple.__iter__(value))}}}'),
    (set, lambda value: f'{{"set": {to_list(set.__iter__(value))}}}'),
    (frozenset, lambda value: f'{{"set": {to_list(frozenset.__iter__(value))}}}'),
    (dict, lambda value: f'{{"dict": {to_list(map(list, dict.items(value)))}}}'),
    (bytes, lambda value: f'{{"bytes": "{bytes.hex(value)}"}}'),
    (complex, lambda value: f'{{"complex": {to_list(complex_parts(value))}}}'),
)
READERS = {
    "tuple": tuple,
    "set": set,
    "dict": dict,
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
}


class Reading:
    """Options of `make_scanner`."""

    strict, object_hook, object_pairs_hook = True, None, read_object
    parse_float, parse_int, parse_constant = float, int, float


if __name__ == "__main__":
    main()
