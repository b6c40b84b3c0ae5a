"""`unmask` and `python` for tests that run many commands: each in a process of its own, forked from a warm one.

Importing torch and transformers takes seconds, and most commands take less. Signals reach the process, and it dies with
what stands in for it. Tests of the console script itself start it.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory
from threading import Thread

IMPORTED = (
    "unmask.cli",
    "unmask.attacks.recover",
    "unmask.audit.channels.table",
    "unmask.audit.running.runner",
    "unmask.report.trend",
    "unmask.report.write",
    "unmask.terminal.audit",
    "unmask.terminal.compare",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
)
# What stands in for the console script: it hands over its words, folder, environment and streams, then signals.
# A shebang must not hold spaces, so the shell starts Python; to Python, those two lines are a string.
SCRIPT = """#!/bin/sh
'''exec' {python} -ISu "$0" "$@"
'''
import array, json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
said = json.dumps([[os.path.basename(sys.argv[0]), *sys.argv[1:]], os.getcwd(), dict(os.environ)]).encode()
streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
server.sendmsg([len(said).to_bytes(8, "big")], streams)
server.sendall(said)
heard = server.makefile()
process = int(heard.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(process, number))
sys.exit(int(heard.read()))
"""


@contextmanager
def warm_unmask() -> Iterator[Path]:
    """A folder for `PATH` with scripts `unmask` and `python` in it, whose processes have imported everything."""
    with TemporaryDirectory() as folder:
        address = Path(folder, "socket")
        for script in (Path(folder, "unmask"), Path(folder, "python")):
            script.write_text(SCRIPT.format(python=shlex.quote(sys.executable), address=str(address)), encoding="utf-8")
            script.chmod(0o755)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, __file__, address], **pipes) as server:
            assert server.stdout.readline() == b"ready\n"
            yield Path(folder)  # leaving closes the pipes, which ends it


def serve(address: str) -> None:
    """Answer until whoever started this is gone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    for name in IMPORTED:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            answer(connection)
        connection.close()


def answer(connection: socket.socket) -> None:
    """Wait for a grandchild that runs the command, and say how it ended; this does not return."""
    length, streams, _, _ = socket.recv_fds(connection, 8, 3)
    said = connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    child = os.fork()
    if child:
        connection.sendall(f"{child}\n".encode())
        Thread(target=lambda: connection.recv(1) or os.kill(child, signal.SIGKILL), daemon=True).start()
        _, status = os.waitpid(child, 0)
        with suppress(BrokenPipeError):  # whoever asked may be gone
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    connection.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os._exit(command(*json.loads(said)))  # to take all modules apart would take seconds


def command(words: list[str], folder: str, environment: dict[str, str]) -> int:
    """What the console script or the interpreter does; the exit code."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    try:
        if words[0] == "python":
            sys.argv = words[1:]
            run_path(words[1], run_name="__main__")
        else:
            sys.argv = words
            import_module("unmask.cli").main()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    serve(sys.argv[1])
