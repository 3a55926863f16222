"""`sglang-spec-ext wait`: wait until a server really serves, or tell why it never will."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import click
import psutil
from rich.console import Console

from sglang_spec_ext.ops.usage import INTERRUPTED
from sglang_spec_ext.ops.wait.boot import BootState, Outcome
from sglang_spec_ext.ops.wait.follow import LogFile, LogPipe
from sglang_spec_ext.ops.wait.history import BootHistory, history_file
from sglang_spec_ext.ops.wait.launch import Launched, LaunchError, launch, url_of
from sglang_spec_ext.ops.wait.probe import ServerProbe
from sglang_spec_ext.ops.wait.render import LiveView, PlainView, as_json, print_verdict
from sglang_spec_ext.ops.wait.runner import Waiter
from sglang_spec_ext.ops.wait.vitals import ProcessWatch

EXIT_CODES = {
    Outcome.READY: 0,
    Outcome.CRASHED: 1,
    Outcome.HUNG: 3,
    Outcome.TIMED_OUT: 4,
    Outcome.STOPPED: 5,
}
DEFAULT_LOG = Path("sglang-server.log")


@click.command(
    short_help="Wait until a server really serves, or tell why it never will.",
)
@click.option(
    "--url", help="The server; by default what the launched command says, or port 30000 here."
)
@click.option(
    "--log",
    "log_path",
    help="The server's output. '-' reads a pipe: docker logs -f NAME 2>&1 | ... --log -",
)
@click.option("--pid", type=click.IntRange(min=1), help="The server's main process on this box.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=3600.0,
    show_default=True,
    help="Seconds until the answer is 'timed out'; 0 waits for ever.",
)
@click.option(
    "--patience",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Factor on the time that a silent phase may take before it counts as hung.",
)
@click.option("--no-probe", is_flag=True, help="Do not ask for a token: health and log must do.")
@click.option(
    "--api-key", envvar="SGLANG_API_KEY", default="", help="For a server started with --api-key."
)
@click.option("--json", "as_json_", is_flag=True, help="One JSON object on stdout at the end.")
@click.option(
    "--launch",
    "launch_",
    is_flag=True,
    help=f"Start COMMAND detached (log: --log or ./{DEFAULT_LOG}, pid beside it), then wait.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def wait(
    context: click.Context,
    url: str | None,
    log_path: str | None,
    pid: int | None,
    timeout: float,
    patience: float,
    no_probe: bool,
    api_key: str,
    as_json_: bool,
    launch_: bool,
    command: tuple[str, ...],
) -> None:
    """Wait until an SGLang server really serves: it is healthy and a generated token comes back.

    \b
      sglang-spec-ext wait --url http://127.0.0.1:30000 --log server.log --pid 4711
      sglang-spec-ext wait --launch -- python -m sglang.launch_server --model-path ...

    Ctrl-C stops the waiting, never the server.

    \b
    Exit codes: 0 ready, 1 crashed, 2 bad arguments, 3 hung, 4 timed out,
                5 somebody stopped the server, 130 interrupted
    """
    started = time.monotonic()
    if launch_ != bool(command):
        raise click.UsageError(
            "--launch needs the server's command: --launch -- python -m sglang.launch_server ..."
            if launch_
            else f"unexpected words {' '.join(command)!r}: to start a server, use --launch -- ..."
        )
    if launch_ and pid is not None:
        raise click.UsageError("--launch starts a new server: leave --pid out")
    if not (url or log_path or pid or launch_):
        raise click.UsageError("say what to wait for: --url, --log, --pid or --launch -- COMMAND")

    try:
        probe = ServerProbe(url or url_of(command), api_key)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    launched: Launched | None = None
    if launch_:
        if log_path == "-":
            raise click.UsageError("--launch writes the log: give a file with --log")
        try:
            launched = launch(command, Path(log_path) if log_path else DEFAULT_LOG)
        except LaunchError as error:
            raise click.UsageError(str(error)) from error
        pid, log_path = launched.popen.pid, str(launched.log)

    processes = None
    if pid is not None:
        processes = ProcessWatch(pid, launched.popen if launched else None)
    boot = BootState(
        started, has_log=log_path is not None, wants_probe=not no_probe, patience=patience
    )
    waiter = Waiter(
        boot,
        probe,
        log=_log_source(log_path, pid, launched),
        processes=processes,
        history=BootHistory(history_file()),
        started=started,
    )
    # With --json the only thing on stdout is the object.
    console = Console(stderr=as_json_)
    view = LiveView(console, boot) if console.is_terminal else PlainView(console, boot)
    if launched is not None:
        console.print(
            f"started pid {launched.popen.pid}, log {launched.log}, pid file {launched.pid_file}",
            highlight=False,
            soft_wrap=True,
        )
    try:
        with view:
            verdict = waiter.wait(timeout or None, view.show)
    except KeyboardInterrupt:
        again = f" --log {log_path}" if log_path else ""
        again += f" --pid {pid}" if pid else ""
        again += f" --url {url}" if url else ""
        console.print(
            f"the server was left alone; to wait again: sglang-spec-ext wait{again}",
            highlight=False,
            soft_wrap=True,
        )
        if as_json_:
            told = {"outcome": "interrupted", "exit_code": INTERRUPTED, "phase": boot.phase.value}
            click.echo(json.dumps(told))
        context.exit(INTERRUPTED)
    now = time.monotonic()
    code = EXIT_CODES[verdict.outcome]
    print_verdict(console, verdict, now - boot.begin)
    if as_json_:
        click.echo(json.dumps(as_json(boot, verdict, code, now), ensure_ascii=False))
    context.exit(code)


def _log_source(
    log_path: str | None, pid: int | None, launched: Launched | None
) -> LogFile | LogPipe | None:
    if log_path is None:
        return None
    if log_path == "-":
        if sys.stdin.isatty():
            raise click.UsageError("--log - reads a pipe, but stdin is a terminal")
        return LogPipe(sys.stdin.fileno())
    path = Path(log_path)
    if path.is_dir():
        raise click.UsageError(f"--log {path} is a folder: give the file")
    if path.exists() and not os.access(path, os.R_OK):
        raise click.UsageError(f"--log {path} may not be read by this user: use sudo, or its owner")
    if launched is None and path.is_fifo():  # as the shell makes of <(docker logs -f NAME 2>&1)
        return LogPipe(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    if launched is not None:
        return LogFile(path, launched.offset)
    return LogFile(path, _end_of_earlier_boots(path, pid))


def _end_of_earlier_boots(path: Path, pid: int | None) -> int:
    """Where to start: a log last written before the process began is all about earlier boots."""
    if pid is None:
        return 0
    try:
        status, began = path.stat(), psutil.Process(pid).create_time()
    except (OSError, psutil.Error):
        return 0
    return status.st_size if status.st_mtime < began - 1 else 0
