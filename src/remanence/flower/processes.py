"""A whole federation on one machine: a SuperLink, SuperNodes and runs as processes, for the
quickstart and for tests.

Everything Flower writes goes below one folder, its telemetry and its look for updates are off, and
it installs nothing at run time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remanence.core.errors import InputError, RunFailed
from remanence.flower.certificates import make_certificates, make_site_key

HOST = "127.0.0.1"
CONNECTION = "federation"  # its name in Flower's own config.toml
STARTING = 120.0  # seconds a process has until it is there
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


@dataclass
class Federation:
    """Processes on this machine. `secure`: with TLS and authentication of nodes, as everywhere
    outside of one machine.
    """

    folder: Path
    secure: bool = True
    port: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """The SuperLink, with new certificates."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()
        certificates = self.folder / "certificates"
        if self.secure:
            make_certificates(certificates, [HOST, "localhost"])
        home = self.folder / "flwr"
        home.mkdir(exist_ok=True)
        trust = (
            f'root-certificates = "{certificates / "ca.crt"}"' if self.secure else "insecure = true"
        )
        lines = [
            "[superlink]",
            f'default = "{CONNECTION}"',
            f"[superlink.{CONNECTION}]",
            f'address = "{HOST}:{self.port}"',
            trust,
        ]
        (home / "config.toml").write_text("\n".join(lines) + "\n")
        self.start_superlink()

    def start_superlink(self) -> None:
        certificates = self.folder / "certificates"
        command = [
            "flower-superlink",
            "--host",
            HOST,
            "--port",
            str(self.port),
            "--disable-runtime-dependency-installation",
        ]
        command += ["--database", str(self.folder / "superlink.db")]
        if self.secure:
            command += [
                "--enable-supernode-auth",
                "--ssl-ca-certfile",
                str(certificates / "ca.crt"),
            ]
            command += [
                "--ssl-certfile",
                str(certificates / "server.crt"),
                "--ssl-keyfile",
                str(certificates / "server.key"),
            ]
        else:
            command += ["--insecure"]
        self._start("superlink", command)
        self._wait_for_port("superlink", self.port)

    def add_site(self, name: str, site_file: Path, register: bool = True) -> None:
        """A key for the site, its registration, and a SuperNode."""
        if self.secure and not (self.folder / "keys" / f"{name}.key").exists():
            make_site_key(self.folder / "keys", name)
            if register:
                self.register(name)
        self.start_site(name, site_file)

    def register(self, name: str) -> int:
        """-> the node id that Flower gives to the site's key"""
        told = self.flwr(
            "supernode",
            "register",
            str(self.folder / "keys" / f"{name}.key.pub"),
            CONNECTION,
            "--name",
            name,
            "--format",
            "json",
        )
        return int(told["node-id"])

    def unregister(self, node: int) -> None:
        """From now on the key of that node is refused."""
        self.flwr("supernode", "unregister", str(node), CONNECTION, "--format", "json")

    def start_site(self, name: str, site_file: Path, root: Path | None = None) -> None:
        """A SuperNode; `root`: a certificate to trust in place of the authority's."""
        command = [
            "flower-supernode",
            "--superlink",
            f"{HOST}:{self.port}",
            "--port",
            str(free_port()),
        ]
        command += ["--node-config", f'site="{site_file.resolve()}"']
        if self.secure:
            command += ["--root-certificates", str(root or self.folder / "certificates" / "ca.crt")]
            command += ["--auth-supernode-private-key", str(self.folder / "keys" / f"{name}.key")]
        else:
            command += ["--insecure"]
        self._start(name, command)

    def run(self, app: Path, config: str = "", name: str = "run") -> subprocess.Popen[bytes]:
        """Submit an app. -> a process that writes its log into `name`.log and ends when the run
        has ended
        """
        self._start(
            name,
            ["flwr", "run", str(app), CONNECTION, "--stream", *(("-c", config) if config else ())],
        )
        return self.processes[name]

    def flwr(self, *words: str) -> Any:
        """A command of Flower's own, which answers with JSON."""
        done = subprocess.run(
            [find_program("flwr"), *words],
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=STARTING,
            check=False,
        )
        begin = done.stdout.find("{")
        try:
            told = json.loads(done.stdout[begin:]) if begin >= 0 else {}
        except ValueError:
            told = {}
        if done.returncode or not told.get("success", True) or not told:
            complaint = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise RunFailed(
                f"flwr {words[0]} failed:"
                f" {' '.join(complaint[-3:]) if complaint else f'it ended with {done.returncode}'}"
            )
        return told

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def end(self, name: str, how: int = signal.SIGTERM) -> None:
        """End a process and what it started; its workers follow it by themselves."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def stop(self) -> None:
        """End everything, the sites first."""
        for name in reversed(list(self.processes)):
            self.end(name)

    def _start(self, name: str, command: list[str]) -> None:
        with self.log(name).open("ab") as log:
            words = [find_program(command[0]), *command[1:]]
            self.processes[name] = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                cwd=self.folder,
                start_new_session=True,
            )

    def _wait_for_port(self, name: str, port: int) -> None:
        end = time.monotonic() + STARTING
        while self.processes[name].poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError):
                socket.create_connection((HOST, port), timeout=1).close()
                return
            time.sleep(0.2)
        raise RunFailed(f"{name} did not start: its log is {self.log(name)}")

    def _environment(self) -> dict[str, str]:
        programs = str(Path(find_program("flwr")).parent)  # Flower starts its own programs by name
        path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"
        return {
            **os.environ,
            **QUIET,
            "PATH": path,
            "FLWR_HOME": str(self.folder / "flwr"),
            **self.environment,
        }


def find_program(name: str) -> str:
    """A program of Flower, from the same environment as this Python."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise InputError(
            f'{name} is not here: a federation needs Flower, pip install "remanence[flower]"'
        )
    return found


def free_port() -> int:
    """A port that nobody uses at this moment."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])
