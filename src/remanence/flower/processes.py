"""A whole federation on one machine: a SuperLink, SuperNodes and runs as processes, for the
quickstart and for tests.

Everything that Flower writes goes below one folder. Its telemetry and its check for updates are
off, and it installs nothing at run time.
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
START_TIMEOUT_S = 120.0
NO_TELEMETRY = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


@dataclass
class Federation:
    """The processes of a federation on this machine.

    Args:
        folder: For certificates, keys, logs and runs.
        secure: With TLS and node authentication, as between machines.
        port: Of the SuperLink; 0: a free one.
        environment: More environment variables for the processes.
    """

    folder: Path
    secure: bool = True
    port: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """Make certificates and start the SuperLink."""
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
        command = ["flower-superlink", "--host", HOST, "--port", str(self.port)]
        command += ["--disable-runtime-dependency-installation"]
        command += ["--database", str(self.folder / "superlink.db")]
        if self.secure:
            command += ["--enable-supernode-auth"]
            command += ["--ssl-ca-certfile", str(certificates / "ca.crt")]
            command += ["--ssl-certfile", str(certificates / "server.crt")]
            command += ["--ssl-keyfile", str(certificates / "server.key")]
        else:
            command += ["--insecure"]
        self._start("superlink", command)
        self._wait_for_port("superlink", self.port)

    def add_site(self, name: str, site_file: Path, register: bool = True) -> None:
        """Make and register a key for a site, and start its SuperNode."""
        if self.secure and not (self.folder / "keys" / f"{name}.key").exists():
            make_site_key(self.folder / "keys", name)
            if register:
                self.register(name)
        self.start_site(name, site_file)

    def register(self, name: str) -> int:
        """Register a site's key.

        Returns:
            The node id that Flower assigns to it.
        """
        key = str(self.folder / "keys" / f"{name}.key.pub")
        output = self.flwr(
            "supernode", "register", key, CONNECTION, "--name", name, "--format", "json"
        )
        return int(output["node-id"])

    def unregister(self, node: int) -> None:
        """Stop accepting the key of a node."""
        self.flwr("supernode", "unregister", str(node), CONNECTION, "--format", "json")

    def start_site(self, name: str, site_file: Path, root: Path | None = None) -> None:
        """Launch a SuperNode; `root`: a certificate to trust instead of the authority's."""
        command = ["flower-supernode", "--superlink", f"{HOST}:{self.port}"]
        command += ["--port", str(free_port())]
        command += ["--node-config", f'site="{site_file.resolve()}"']
        if self.secure:
            command += ["--root-certificates", str(root or self.folder / "certificates" / "ca.crt")]
            command += ["--auth-supernode-private-key", str(self.folder / "keys" / f"{name}.key")]
        else:
            command += ["--insecure"]
        self._start(name, command)

    def run(self, app: Path, config: str = "", name: str = "run") -> subprocess.Popen[bytes]:
        """Submit an app.

        Returns:
            A process that writes its log into `name`.log and ends when the run has ended.
        """
        command = ["flwr", "run", str(app), CONNECTION, "--stream"]
        self._start(name, [*command, *(("-c", config) if config else ())])
        return self.processes[name]

    def flwr(self, *words: str) -> Any:
        """Run a command of Flower that prints JSON."""
        done = subprocess.run(
            [find_program("flwr"), *words],
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        begin = done.stdout.find("{")
        try:
            output = json.loads(done.stdout[begin:]) if begin >= 0 else {}
        except ValueError:
            output = {}
        if done.returncode or not output.get("success", True) or not output:
            errors = (done.stderr.strip() or done.stdout.strip()).splitlines()
            reason = " ".join(errors[-3:]) or f"exit code {done.returncode}"
            raise RunFailed(f"flwr {words[0]} failed: {reason}")
        return output

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def end(self, name: str, how: int = signal.SIGTERM) -> None:
        """End a process and its children; daemons end with their owner."""
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
        """End all processes, the sites first."""
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
        end = time.monotonic() + START_TIMEOUT_S
        while self.processes[name].poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError):
                socket.create_connection((HOST, port), timeout=1).close()
                return
            time.sleep(0.2)
        raise RunFailed(f"{name} did not start: see its log {self.log(name)}")

    def _environment(self) -> dict[str, str]:
        programs = str(Path(find_program("flwr")).parent)  # Flower starts its own programs by name
        path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"
        return {
            **os.environ,
            **NO_TELEMETRY,
            "PATH": path,
            "FLWR_HOME": str(self.folder / "flwr"),
            **self.environment,
        }


def find_program(name: str) -> str:
    """A program of Flower, from the environment of this Python."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise InputError(
            f"{name} is not installed: a federation needs Flower, pip install"
            ' "remanence-fl[flower]"'
        )
    return found


def free_port() -> int:
    """A port that is not in use now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
