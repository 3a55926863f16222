"""The command line: ``bench`` measures (``bench run`` in full), ``bench report`` renders again."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from sglang_spec_ext.ops.bench.chart import ChartError, draw_chart
from sglang_spec_ext.ops.bench.crossover import Recommendation, recommend
from sglang_spec_ext.ops.bench.progress import Reporter
from sglang_spec_ext.ops.bench.prompts import (
    FilePrompts,
    PromptsError,
    PromptSource,
    load_prompts,
)
from sglang_spec_ext.ops.bench.render import print_report
from sglang_spec_ext.ops.bench.report import measured_variants
from sglang_spec_ext.ops.bench.results import (
    Load,
    Plan,
    Results,
    ResultsError,
    environment_warnings,
    load_results,
    merge,
)
from sglang_spec_ext.ops.bench.server import is_healthy, server_info
from sglang_spec_ext.ops.bench.variants import (
    Variant,
    VariantError,
    check_base_command,
    command_for,
    option_value,
    parse_variants,
    redacted,
    warnings_for,
)

RESULT_NAME, CHART_NAME, LOGS_NAME = "bench.json", "chart.png", "logs"

EXIT_NOTHING_MEASURED = 1
EXIT_PARTLY_MEASURED = 3
_EXIT_SIGNAL = 128


class _DefaultToRun(click.Group):
    """``bench --out X`` means ``bench run --out X``: measuring is what the command is for."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {*self.commands, *self.get_help_option_names(ctx)}
        return super().parse_args(ctx, args if args and args[0] in known else ["run", *args])


@click.group(cls=_DefaultToRun, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure where speculation stops paying, and recommend the threshold N.

    \b
    Own servers, one after another, from one base command line:
      bench --variants off,on,threshold=16,adaptive --out DIR -- \\
          python -m sglang.launch_server --model-path M --speculative-algorithm EAGLE3 ...
    A running server:
      bench --url http://127.0.0.1:30000 --log server.log --out DIR
    Tables and chart again, also of several results together:
      bench report DIR/bench.json --chart chart.png

    `bench` alone is `bench run`: see `bench run --help` for its options.

    \b
    Exit codes: 0 everything was measured; 1 nothing was; 2 wrong usage;
    3 some variants or levels failed; 130 interrupted (143 by SIGTERM), with
    every finished level kept in DIR/bench.json: --resume continues.
    """


def _concurrency(ctx: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    try:
        levels = sorted({int(word) for word in value.split(",") if word.strip()})
    except ValueError:
        levels = []
    if not levels or levels[0] < 1:
        raise click.BadParameter(f"{value!r} is no list of numbers from 1 on, e.g. 1,2,4,8")
    return levels


@bench.command("run")
@click.option("--url", help="Measure this running server instead of launching any.")
@click.option("--label", help="With --url: its name in the results.  [default: by its settings]")
@click.option(
    "--log",
    "log_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --url: the server's log file, for its own throughput and graph use.",
)
@click.option(
    "--api-key",
    envvar="SGLANG_SPEC_EXT_BENCH_API_KEY",
    show_envvar=True,
    help="Sent as bearer token.  [default: --api-key of the base command]",
)
@click.option(
    "--variants",
    help="off: no speculation; on: static speculation; threshold=N: our switch; "
    "adaptive: SGLang's own adaptive mode.  [default: off,on]",
)
@click.option(
    "--boots",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Boots of each variant: their spread is the noise.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="How often each boot walks all levels, with other prompts each time: where steps wait for "
    "the CPU, speed differs from minute to minute, and more rounds cost less than more boots.",
)
@click.option(
    "--together",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Variants that boot at once, to save time; they take turns level by level, one under load "
    "while the others idle. All of them must fit into the GPU's memory: limit theirs, e.g. by "
    "--max-total-tokens.",
)
@click.option(
    "--concurrency",
    default="1,2,4,8,16,32,64,128",
    show_default=True,
    callback=_concurrency,
    help="Levels: requests in flight.",
)
@click.option(
    "--requests-per-level",
    type=click.IntRange(1),
    default=None,
    help="Never below 2 per concurrent request.  [default: 3 of them, at least 8]",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(2),
    default=256,
    show_default=True,
    help="Per request, fixed (ignore_eos).",
)
@click.option(
    "--warmup-tokens",
    type=click.IntRange(0),
    default=32,
    show_default=True,
    help="Output tokens of the unmeasured requests before each level; 0: none.",
)
@click.option(
    "--prompts",
    "prompts_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of prompts: one per line, or .jsonl with `text` or `input_ids`.",
)
@click.option(
    "--input-ids-random",
    type=click.IntRange(1),
    metavar="LEN",
    help="Random prompts of LEN token ids; needs no tokenizer.  [default: 128 without --prompts]",
)
@click.option(
    "--vocab-size",
    type=click.IntRange(2),
    help="For random ids.  [default: from the model's config.json]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and their order.")
@click.option(
    "--stream-interval",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Output tokens per streamed chunk. 1 shows each step's latency, but at high "
    "concurrency measures SGLang's HTTP process instead of its decoding.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1),
    default=0.02,
    show_default=True,
    help="Relative difference that counts as noise even where boots agree better.",
)
@click.option(
    "--boot-timeout", type=click.FloatRange(1), default=1800, show_default=True, help="Seconds."
)
@click.option(
    "--request-timeout",
    type=click.FloatRange(1),
    default=600,
    show_default=True,
    help="Longest silence of a request, in seconds.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for bench.json, chart.png and logs/.  [default: bench-DATE-TIME]",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Continue DIR/bench.json: measure what it lacks, boot again what failed.",
)
@click.option("--dry-run", is_flag=True, help="Print the command lines and the plan; run nothing.")
@click.argument("base_command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def run(
    url: str | None,
    label: str | None,
    log_path: Path | None,
    api_key: str | None,
    variants: str,
    boots: int,
    rounds: int,
    together: int,
    concurrency: list[int],
    requests_per_level: int | None,
    output_tokens: int,
    warmup_tokens: int,
    prompts_path: Path | None,
    input_ids_random: int | None,
    vocab_size: int | None,
    seed: int,
    stream_interval: int,
    tolerance: float,
    boot_timeout: float,
    request_timeout: float,
    out: Path | None,
    resume: bool,
    dry_run: bool,
    base_command: tuple[str, ...],
) -> None:
    """Measure, and write DIR/bench.json after every level."""
    if bool(url) == bool(base_command):
        raise click.UsageError(
            "give either --url of a running server, or a command line after -- that starts one"
        )
    if url and variants:
        raise click.UsageError("--variants needs a base command: a running server is what it is")
    if base_command and (label or log_path):
        raise click.UsageError("--label and --log belong to --url")
    if prompts_path and input_ids_random:
        raise click.UsageError("give either --prompts or --input-ids-random, not both")
    if resume and out is None:
        raise click.UsageError("--resume needs the --out folder to continue")
    source = PromptSource(_read_prompts(prompts_path), input_ids_random or 128, vocab_size)
    load = Load(
        prompts=source.description,
        output_tokens=output_tokens,
        requests_per_level=requests_per_level,
        warmup_tokens=warmup_tokens,
        stream_interval=stream_interval,
        seed=seed,
    )
    _warn_of_repeats(source, load, concurrency)
    if url:
        chosen: list[Variant] = []
        url = url.rstrip("/")
        plan = Plan([label or "SERVER"], 1, concurrency, load, rounds=rounds)
    else:
        chosen = _variants(variants or "off,on", base_command, concurrency)
        _check_prompts(source, base_command)
        labels = [v.label for v in chosen]
        plan = Plan(labels, boots, concurrency, load, redacted(base_command), rounds)
        api_key = api_key or option_value(base_command, "--api-key")
    if dry_run:
        _print_plan(plan, chosen, base_command, url)
        return

    # Only measuring needs the client's library; other commands must work without it.
    try:
        from sglang_spec_ext.ops.bench.sweep import (
            Launch,
            Session,
            infer_label,
            sweep_running,
            sweep_variants,
        )
    except ImportError as error:
        _fail(str(error))
    if url:
        if not is_healthy(url, timeout_s=30):
            _fail(f"no healthy server answers at {url}/health; start it, or check --url")
        label = label or infer_label(server_info(url, api_key), log_path)
        if label is None:
            _fail("the server speculates; give its --log, or say by --label on or threshold=N")
        plan.variants = [label]
    folder = out or Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}")
    results = _open_results(folder, plan, resume)
    path = folder / RESULT_NAME
    results.save(path)
    session = Session(
        results=results,
        save=lambda: results.save(path),
        prompts_for=source.for_server,
        reporter=Reporter(_levels_to_measure(results)),
        api_key=api_key,
        request_timeout_s=request_timeout,
    )
    interrupted = False
    try:
        with _stopped_like_ctrl_c() as stopped_by, session.reporter:
            if url:
                sweep_running(session, plan.variants[0], url, log_path)
            else:
                logs = folder / LOGS_NAME
                launch = Launch(base_command, os.environ, logs, boot_timeout, together)
                sweep_variants(session, chosen, launch)
    except KeyboardInterrupt:
        interrupted = True
    except PromptsError as error:
        _fail(str(error))
    recommendation = _show(results, environment_warnings(results.runs), tolerance, markdown=False)
    click.echo(f"results: {path}", err=True)
    if measured_variants(results):
        _try_chart(results, folder / CHART_NAME, recommendation, path)
    if interrupted:
        click.echo(
            f"interrupted; the same command with --out {folder} --resume continues", err=True
        )
        sys.exit(_EXIT_SIGNAL + (stopped_by[0] if stopped_by else signal.SIGINT))
    sys.exit(_exit_code(results))


@bench.command("report")
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--chart",
    "chart_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the chart here (.png, .svg, .pdf).",
)
@click.option("--markdown", is_flag=True, help="Tables as Markdown.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1),
    default=0.02,
    show_default=True,
    help="Relative difference that counts as noise even where boots agree better.",
)
def report(
    files: tuple[Path, ...], chart_path: Path | None, markdown: bool, tolerance: float
) -> None:
    """Tables, chart and recommendation from one or more bench.json.

    Several files count as one sweep: the boots of a variant add up, and `off` and `on` may come
    from different files.
    """
    if len({path.resolve() for path in files}) < len(files):
        raise click.UsageError("a file is given twice; its boots would count twice")
    try:
        results, warnings = merge([load_results(path) for path in files])
    except ResultsError as error:
        _fail(str(error))
    recommendation = _show(results, warnings, tolerance, markdown)
    if chart_path is not None:
        try:
            draw_chart(results, chart_path, recommendation.threshold)
        except (ChartError, OSError, ValueError) as error:
            _fail(f"no chart: {error}")
        click.echo(f"chart: {chart_path}", err=True)


def _read_prompts(path: Path | None) -> FilePrompts | None:
    try:
        return load_prompts(path) if path else None
    except PromptsError as error:
        raise click.BadParameter(str(error), param_hint="--prompts") from error


def _variants(text: str, base: Sequence[str], concurrency: Sequence[int]) -> list[Variant]:
    try:
        variants = parse_variants(text)
        check_base_command(base, variants)
    except VariantError as error:
        raise click.UsageError(str(error)) from error
    if shutil.which(base[0]) is None:
        raise click.UsageError(f"the base command starts with {base[0]!r}, which is not executable")
    for warning in warnings_for(base, variants, concurrency):
        click.echo(f"WARNING {warning}", err=True)
    return variants


def _check_prompts(source: PromptSource, base: Sequence[str]) -> None:
    """What the first server would refuse after minutes of booting is refused at once."""
    info = {
        "model_path": option_value(base, "--model-path") or option_value(base, "--model"),
        "skip_tokenizer_init": "--skip-tokenizer-init" in base,
    }
    try:
        source.for_server(info)
    except PromptsError as error:
        raise click.UsageError(str(error)) from error


def _warn_of_repeats(source: PromptSource, load: Load, concurrency: Sequence[int]) -> None:
    most = load.requests_at(max(concurrency))
    if source.file and len(source.file.prompts) < most:
        click.echo(
            f"WARNING {len(source.file.prompts)} prompts for up to {most} requests: repeated ones "
            "hit the prefix cache, so TTFT comes out too good",
            err=True,
        )


def _open_results(folder: Path, plan: Plan, resume: bool) -> Results:
    path = folder / RESULT_NAME
    if not path.exists():
        if resume:
            _fail(f"nothing to resume: {path} does not exist")
        try:
            (folder / LOGS_NAME).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _fail(f"cannot write to {folder}: {error.strerror}; give another --out")
        return Results(plan)
    if not resume:
        _fail(f"{path} exists; continue it with --resume, or give another --out")
    try:
        results = load_results(path)
    except ResultsError as error:
        _fail(str(error))
    for what, before, asked in (
        ("load", results.plan.load, plan.load),
        ("base command", results.plan.base_command, plan.base_command),
    ):
        if before != asked:
            _fail(
                f"{path} was measured with another {what}; resume with the same one, or give "
                f"another --out\n  before: {before}\n  now:    {asked}"
            )
    results.plan = plan
    # What failed or was cut off before its first level is tried again.
    results.runs = [run for run in results.runs if run.levels]
    return results


def _levels_to_measure(results: Results) -> int:
    plan = results.plan
    return sum(
        len(results.missing_levels(variant, boot))
        for variant in plan.variants
        for boot in range(1, plan.boots + 1)
    )


def _print_plan(
    plan: Plan, variants: Sequence[Variant], base: Sequence[str], url: str | None
) -> None:
    for variant in variants:
        command = redacted(command_for(variant, base, port=0))
        # The port is chosen when the server boots.
        click.echo(f"{variant.label}: {shlex.join([*command[:-1], 'PORT'])}")
    if url:
        click.echo(f"server: {url}")
    load = plan.load
    click.echo(f"boots of each: {plan.boots}, rounds of each boot: {plan.rounds}")
    for concurrency in plan.concurrency:
        requests = load.requests_at(concurrency)
        click.echo(
            f"C={concurrency}: {concurrency} warm-up requests of {load.warmup_tokens} tokens, then "
            f"{requests} of {load.output_tokens} ({load.prompts})"
        )


@contextlib.contextmanager
def _stopped_like_ctrl_c() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP stop the block as Ctrl-C does; the list names the one that came."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.raise_signal(signal.SIGINT)

    # A shell starts background jobs with SIGINT ignored, which would swallow every stop; nohup
    # ignores SIGHUP, and that is what the user asked for.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: handle}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = handle
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(
    results: Results, warnings: list[str], tolerance: float, markdown: bool
) -> Recommendation:
    recommendation = recommend(results.runs, tolerance)
    print_report(results, recommendation, warnings, markdown)
    return recommendation


def _try_chart(results: Results, path: Path, recommendation: Recommendation, source: Path) -> None:
    """The figures are safe by now: a chart that cannot be drawn is a remark, no failure."""
    try:
        draw_chart(results, path, recommendation.threshold)
    except ChartError as error:
        click.echo(
            f"no chart: {error}; then `sglang-spec-ext bench report {source} --chart {path}` "
            "draws it",
            err=True,
        )
    else:
        click.echo(f"chart: {path}", err=True)


def _exit_code(results: Results) -> int:
    if not any(run.levels for run in results.runs):
        return EXIT_NOTHING_MEASURED
    return EXIT_PARTLY_MEASURED if _levels_to_measure(results) else 0


def _fail(message: str) -> NoReturn:
    click.echo(f"Error: {message}", err=True)
    sys.exit(EXIT_NOTHING_MEASURED)
