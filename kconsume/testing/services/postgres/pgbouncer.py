"""A real PgBouncer in front of a PostgreSQL, in transaction pooling mode: each transaction may use another connection.

For tests only: PgBouncer accepts every client, and connects to the server as the user of the given URL.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import server_account
from kconsume.testing.services.local_process import LocalProcess
from kconsume.testing.services.postgres import ready
from kconsume.testing.services.postgres.pgbouncer_program import (
    FIX,
    Program,
    find_pgbouncer,
    program_in,
    unpacked_folder,
)

SETTINGS = {
    "listen_addr": "127.0.0.1",
    "unix_socket_dir": "",
    "auth_type": "any",
    "pool_mode": "transaction",
    "max_client_conn": "200",
    "default_pool_size": "20",
    # Drivers set these parameters when they connect. PgBouncer refuses parameters that it does not know.
    "ignore_startup_parameters": "extra_float_digits,options,search_path",
    # PgBouncer connects at once to a server that comes back, because tests restart servers.
    "server_login_retry": "0",
}


class LocalPgBouncer(LocalProcess):
    """A PgBouncer at `bouncer.url`, started by `with LocalPgBouncer(postgres.url) as bouncer:`.

    Args:
        postgres_url: the server behind it, with the user for all connections. Every database of that server can be
            used.
        folder: where PgBouncer keeps its settings and its log. Without it a temporary folder, which `close` removes.
        port: the port on 127.0.0.1. Without it a free one is reserved.
        overrides: settings of PgBouncer that replace those of the tests, by name.
    """

    name = "PgBouncer"
    # PgBouncer has no data to lose. The effect of other signals differs between versions: some wait for the clients.
    stop_signal = signal.SIGKILL

    def __init__(
        self,
        postgres_url: str,
        *,
        folder: Path | None = None,
        port: int | None = None,
        overrides: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder=folder, port=port)
        self._behind = urlsplit(postgres_url)
        self._overrides = dict(overrides or {})

    @property
    def url(self) -> str:
        """`postgres_url` with the host and port of PgBouncer."""
        return f"postgresql://{self._behind.username or 'postgres'}@{self.address}{self._behind.path}"

    def _answers(self, url: str) -> str | None:
        return ready.answers(url)

    def _command(self) -> list[str]:
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = self.folder / "pgbouncer.ini"
        settings.write_text(self.settings())
        program, account = find_pgbouncer(), server_account.lesser_account()
        if account is None:
            return program.command(str(settings))
        account.own(settings)
        return account.command(self._reachable(program).command(str(settings)))

    def settings(self) -> str:
        """Return the text of `pgbouncer.ini`."""
        behind = {
            "host": self._behind.hostname or "127.0.0.1",
            "port": str(self._behind.port or 5432),
            "user": unquote(self._behind.username or "postgres"),
            "password": unquote(self._behind.password or ""),
        }
        database = " ".join(f"{name}={_quoted(value)}" for name, value in behind.items() if value)
        own = {**SETTINGS, "listen_port": str(self.port), **self._overrides}
        lines = [f"{name} = {value}" for name, value in own.items()]
        return "\n".join(["[databases]", f"* = {database}", "", "[pgbouncer]", *lines, ""])

    def _reachable(self, program: Program) -> Program:
        if server_account.can_reach(program.executable):
            return program
        unpacked = unpacked_folder(program.executable)
        if unpacked is None:
            raise ServiceUnavailable(f"The user that PgBouncer runs as cannot reach {program.executable}; {FIX}")
        copy = self.folder / "programs"
        if not copy.exists():
            server_account.copy_for_all({unpacked: Path()}, copy)
        return program_in(copy)


def prepare_pgbouncer() -> None:
    """Fetch PgBouncer if this machine has none."""
    find_pgbouncer()


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
