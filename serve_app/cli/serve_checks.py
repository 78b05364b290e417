"""What must hold on this machine before `serve` starts anything, each failure with its cause and one fix.

Owns: checks of the port, its certificate, the disk and the folder for logs. Must not know: Ray or MLX; memory is the
engine's own check.
"""

from __future__ import annotations

import errno
import shutil
import socket
import ssl
from pathlib import Path

import psutil

from engine.errors import ConfigError
from serve_app.cli.console import CommandFailedError
from serve_app.config import HttpsConfig

# Ray's session folder and logs; models are not counted, since they are fetched elsewhere.
MIN_FREE_DISK_BYTES = 500 * 2**20


def check_port(host: str, port: int) -> None:
    """Raise CommandFailedError naming the program that holds the port, where the system tells."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise _port_error(host, port, error) from error


def _port_error(host: str, port: int, error: OSError) -> CommandFailedError | ConfigError:
    if error.errno == errno.EADDRINUSE:
        return CommandFailedError(
            f"Port {port} on {host} is taken{_holder(port)}.",
            f"stop that program, or choose another port: metalslots serve --port {port + 1}",
        )
    if error.errno == errno.EACCES:
        return CommandFailedError(
            f"This user may not listen on port {port}.", "choose a port above 1023, for example --port 8000"
        )
    return ConfigError(f"{host} is no address of this machine ({error.strerror}).", "use --host 127.0.0.1")


def _holder(port: int) -> str:
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,) and connection.pid:
            try:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
            except psutil.Error:
                return f" by process {connection.pid}"
    return ""


def check_disk(folder: Path) -> None:
    """Raise CommandFailedError when logs and sockets would not fit."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < MIN_FREE_DISK_BYTES:
        raise CommandFailedError(
            f"{folder} has {free_bytes // 2**20} MiB free; at least {MIN_FREE_DISK_BYTES // 2**20} MiB are needed "
            "for logs and sockets.",
            "free some space there, or set TMPDIR to a folder on another disk",
        )


def check_log_folder(folder: str | None) -> None:
    """Make the folder for logs. Raises OSError: the app's processes would, one after the other."""
    if folder is not None:
        Path(folder).expanduser().mkdir(parents=True, exist_ok=True)


def check_https(https: HttpsConfig | None) -> None:
    """Raise ConfigError when the files of the port's certificate are missing, or are none. ``https`` None: no TLS."""
    if https is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(https.certificate, https.key)
    except OSError as error:  # ssl.SSLError is one
        reason = "they are no certificate and its key" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(
            f"`https` cannot be served with {https.certificate} and {https.key}: {reason}.",
            "name the PEM files of a certificate and of its key",
        ) from error
