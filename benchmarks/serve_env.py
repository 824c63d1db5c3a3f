"""How many requests a second `moored serve-env` answers, and what they cost it.

    python benchmarks/serve_env.py [--sessions 1500] [--connections 32] [--seconds 10]
    python benchmarks/serve_env.py --sessions 1 --connections 1 --reply-bytes 8000000

A server of FrozenLake in a process of its own. Every session is opened; then the connections, each
with its share of the sessions, reset and step them in turn. Client and server share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path


class Connection:
    """One connection that is kept open, for one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def post(self, path: str, body: dict[str, object]) -> dict[str, object]:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", answer.lower())
        assert length is not None and answer.startswith(b"HTTP/1.1 200"), answer
        return json.loads(await self._reader.readexactly(int(length[1])))


async def play(
    connection: Connection, sessions: list[str], reply: str, barrier: asyncio.Barrier, run_s: float
) -> tuple[int, float]:
    """Open so many sessions, then step all of them until the time is over: requests and seconds."""
    for index in range(len(sessions)):
        opened = await connection.post("/sessions", {})
        sessions[index] = str(opened["session"])
        await connection.post(f"/sessions/{sessions[index]}/reset", {"task_seed": index})
    await barrier.wait()
    turns, count, start_s = [0] * len(sessions), 0, time.perf_counter()
    while time.perf_counter() - start_s < run_s:
        index = count % len(sessions)
        path = f"/sessions/{sessions[index]}"
        if turns[index] < 0:
            await connection.post(f"{path}/reset", {"task_seed": count})
            turns[index] = 0
        else:
            text = f"{reply}{count}"
            result = await connection.post(f"{path}/step", {"reply": text, "turn": turns[index]})
            turns[index] = -1 if result["terminated"] or result["truncated"] else turns[index] + 1
        count += 1
    return count, time.perf_counter() - start_s


async def measure(port: int, pid: int, options: argparse.Namespace) -> tuple[float, float]:
    """Requests a second, and seconds of the server's processor for one."""
    barrier = asyncio.Barrier(options.connections + 1)
    reply = "<think>" + "x" * options.reply_bytes + "</think><answer>Up</answer>"
    jobs = []
    for index in range(options.connections):
        number = len(range(index, options.sessions, options.connections))
        connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
        jobs.append(play(connection, [""] * number, reply, barrier, options.seconds))
    playing = asyncio.gather(*jobs)
    await barrier.wait()
    before_s = cpu_s(pid)
    played = await playing
    num_requests = sum(count for count, _ in played)
    rate = num_requests / max(seconds for _, seconds in played)
    return rate, (cpu_s(pid) - before_s) / num_requests


def cpu_s(pid: int) -> float:
    """Seconds of processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mb(pid: int) -> float:
    """Most memory that a process has held."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1500)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--reply-bytes", type=int, default=200)
    options = parser.parse_args()
    command = [sys.executable, "-m", "moored", "serve-env", "frozen_lake", "--port=0"]
    command.append(f"--max-sessions={options.sessions}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2].split()[0])
            rate, each_s = asyncio.run(measure(port, server.pid, options))
            cost = f"{each_s * 1e3:.2f} ms of processor each"
            print(f"{rate:.0f} requests/s, {cost}, peak memory {peak_mb(server.pid):.0f} MB")
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
