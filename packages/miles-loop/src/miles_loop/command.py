"""The command of a recipe: `miles-<family> train | eval | export`."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from miles_contracts import InvalidFieldError, MilesError
from miles_loop import toml
from miles_loop.arguments import Flag, Parsed, config_for, everything, parse
from miles_loop.config import RunConfig, RuntimeKind
from miles_loop.errors import DiskFullError, InterruptedRunError
from miles_loop.names import nearest
from miles_loop.options import build, merge
from miles_loop.recipe import Recipe

EXIT_GOOD, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130

HELP = Flag("help", "", "show this help and stop")
TRAIN_FLAGS = (
    Flag("config", "FILE", "TOML file with any of the options below, as tables"),
    Flag("resume", "RUN", "continue the run in this folder from its newest checkpoint"),
    Flag("dry-run", "", "print the effective configuration as TOML, and where everything would run, and stop"),
    Flag("plain", "", "print plain lines instead of the live display"),
    HELP,
)
EVAL_FLAGS = (
    Flag("config", "FILE", "TOML file with any of the options below, as tables"),
    Flag("run", "RUN", "evaluate this run's newest checkpoint, with its own configuration as the default"),
    Flag("json", "", "print one JSON object"),
    HELP,
)
EXPORT_FLAGS = (
    Flag("step", "N", "the checkpoint of this step (default: the newest)"),
    HELP,
)
SUMMARIES = {
    "train": "Train a model: sample answers, score them, update the weights, measure on held-out tasks.",
    "eval": "Measure a model, or the newest checkpoint of a run, on the held-out tasks.",
    "export": "Copy the model of a run's checkpoint into a Hugging Face folder: export RUN FOLDER.",
}
_FIXED = ("model", "seed", "task", "run_dir", "recipe", "hardware")
"""What a run cannot change any more: its data stream and model would not be its own, and what a hardware target
sets is stored option by option."""

Command = Callable[..., int]


def build_command(recipe: Recipe) -> Command:
    """The main function of the recipe's command: `main(argv=None) -> exit status`.

    The exit status is 0 when all went well, 1 when the run failed, 2 for bad input, 130 when it was interrupted.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        return run_command(recipe, list(sys.argv[1:] if argv is None else argv))

    return main


def run_command(recipe: Recipe, argv: Sequence[str]) -> int:
    """Run one command line of a recipe."""
    try:
        return _dispatch(recipe, argv)
    except InterruptedRunError as error:
        sys.stderr.write(f"{recipe.command}: {error}\n")
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except MilesError as error:
        sys.stderr.write(f"{recipe.command}: {error}\n")
        # Errors about values (a field, a line of a file) are ValueErrors too; the others are about the world.
        return EXIT_BAD_INPUT if isinstance(error, ValueError) else EXIT_FAILED
    except BrokenPipeError:
        return EXIT_GOOD
    except OSError as error:  # a folder that may not be written, say
        if error.filename is None:
            raise
        sys.stderr.write(f"{recipe.command}: {error.filename}: {error.strerror}\n")
        return EXIT_FAILED


def _dispatch(recipe: Recipe, argv: Sequence[str]) -> int:
    commands: dict[str, tuple[tuple[Flag, ...], Callable[[Recipe, Parsed], int], Callable[[str], bool]]] = {
        "train": (TRAIN_FLAGS, _train, everything),
        "eval": (EVAL_FLAGS, _eval, _measures),
        "export": (EXPORT_FLAGS, _export, lambda path: False),
    }
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(_overview(recipe))
        return EXIT_GOOD
    if argv[0] not in commands:
        raise InvalidFieldError("command", argv[0], f"{nearest(argv[0], commands)}use {', '.join(commands)}")
    flags, action, uses = commands[argv[0]]
    if "-h" in argv or "--help" in argv:
        from miles_loop.reference import help_text

        sys.stdout.write(help_text(recipe, argv[0], SUMMARIES[argv[0]], flags, uses))
        return EXIT_GOOD
    own = {flag.name for flag in flags}
    foreign = {
        flag.name: f"it is an option of {name}, not of {argv[0]}; see {recipe.command} {argv[0]} --help"
        for name, (others, *_) in commands.items()
        for flag in others
        if flag.name not in own
    }
    return action(recipe, parse(argv[1:], flags, uses, foreign))


def _measures(path: str) -> bool:
    from miles_loop.eval_options import uses  # with all that reads run folders, which --help of train need not wait for

    return uses(path)


def _overview(recipe: Recipe) -> str:
    lines = [f"usage: {recipe.command} COMMAND [options]", "", recipe.summary, ""]
    lines += [f"  {name:<8}{text}" for name, text in SUMMARIES.items()]
    lines += ["", f"{recipe.command} COMMAND --help explains a command and all its options."]
    for comment, line in recipe.examples:
        lines += ["", f"  # {comment}", f"  {line}"]
    return "\n".join(lines) + "\n"


def _no_words(parsed: Parsed) -> None:
    if parsed.words:
        raise InvalidFieldError("argument", parsed.words[0], "options start with --; a value follows its option")


# -- train ------------------------------------------------------------------------------------------------


def _train(recipe: Recipe, parsed: Parsed) -> int:
    _no_words(parsed)
    if "resume" in parsed.flags:
        return _resume(recipe, parsed)
    from miles_loop.preflight import check_run

    config = config_for(recipe, parsed)
    target = recipe.hardware_named(config.hardware)
    if not target.needs:  # what is for another machine may be looked at here
        check_run(recipe, config)
    if "dry-run" in parsed.flags:
        return _show(recipe, config, elsewhere=target.needs)
    if target.needs:
        raise InvalidFieldError("hardware", target.name, f"this target needs {target.needs}; --dry-run shows it")
    from miles_loop.machine import check_machine
    from miles_loop.run_folder import default_run_dir
    from miles_loop.run_session import open_new

    check_machine(config)
    if config.run_dir is None:
        config = config.model_copy(update={"run_dir": default_run_dir(recipe.family)})
    folder = open_new(config)
    return _run(recipe, config, folder, None, plain="plain" in parsed.flags)


def _show(recipe: Recipe, config: RunConfig, *, elsewhere: str = "", run: Path | None = None) -> int:
    """Print what a run would be: its configuration to standard output, so that it may go to a file, and where its
    processes would be to standard error."""
    from miles_loop.machine import this_machine
    from miles_loop.placement import table
    from miles_loop.sizes import size_of

    sys.stdout.write(toml.dumps(config))
    sys.stdout.flush()
    size = size_of(recipe, config, run)
    sys.stderr.write("\n" + table(config, size, this_machine(config), elsewhere=elsewhere))
    return EXIT_GOOD


def _resume(recipe: Recipe, parsed: Parsed) -> int:
    from miles_loop.machine import check_machine
    from miles_loop.options import read_toml
    from miles_loop.preflight import check_run
    from miles_loop.run_folder import RunFolder
    from miles_loop.run_session import open_resumed

    folder = RunFolder(Path(parsed.flags["resume"]))
    stored = folder.read_config()
    if stored.recipe != recipe.family:
        raise InvalidFieldError("--resume", str(folder.path), f"it is a run of miles-{stored.recipe}")
    file = read_toml(Path(parsed.flags["config"])) if "config" in parsed.flags else {}
    changes = merge(file, parsed.settings)
    fixed = [name for name in _FIXED if name in changes]
    if fixed:
        raise InvalidFieldError(fixed[0], changes[fixed[0]], "a resumed run keeps this; start a new run to change it")
    config = build(RunConfig, [read_toml(folder.config_file), changes])
    check_run(recipe, config)
    if "dry-run" in parsed.flags:
        return _show(recipe, config, run=folder.path)
    check_machine(config)
    state, restarted = open_resumed(folder, config)
    return _run(recipe, config, folder, state, plain="plain" in parsed.flags, said_first=restarted)


def _run(recipe: Recipe, config: RunConfig, folder: Any, state: Any, *, plain: bool, said_first: str = "") -> int:
    from miles_loop.display import make_display
    from miles_loop.run_session import RunSession

    logging.basicConfig(
        filename=folder.logs / "driver.log",
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        level=logging.INFO,
        force=True,
    )
    with make_display(plain=plain) as display:
        display.note(f"run folder: {folder.path}")
        if state is not None:
            display.note(f"continuing after step {state.step}")
        if said_first:
            logging.getLogger(__name__).warning("%s", said_first)
            display.note(said_first)
        session = RunSession(recipe, config, folder, display, state)
        try:
            asyncio.run(session.run())
            failure: BaseException | None = None
        except MilesError as error:
            failure = error
        except Exception as error:  # process main: told, logged, and an exit status
            logging.getLogger(__name__).exception("the driver failed")
            traceback.print_exc()
            failure = error
    _summarise(folder, config, shown=failure is None or session.progress.step > 0)
    if isinstance(failure, MilesError):
        raise failure
    return EXIT_GOOD if failure is None else EXIT_FAILED


def _summarise(folder: Any, config: RunConfig, *, shown: bool) -> None:
    """Write summary and plot; print the table where it is `shown`. A full disk costs the files, not the table."""
    from miles_loop import report
    from miles_loop.files import write_atomic
    from miles_loop.plot import plot_rewards

    found = report.make_report(folder.path)
    try:
        write_atomic(folder.path / "summary.json", msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        if config.record.plot:
            plot_rewards(folder)
    except DiskFullError as error:
        sys.stderr.write(f"{error}\n")
    if shown:
        sys.stdout.write(f"\n{report.text(msgspec.structs.replace(found, message=''))}")
    folder.unlock()


# -- eval -------------------------------------------------------------------------------------------------


def _eval(recipe: Recipe, parsed: Parsed) -> int:
    _no_words(parsed)
    from miles_loop.eval_options import eval_config
    from miles_loop.preflight import check_eval

    config = eval_config(recipe, parsed)
    check_eval(recipe, config)
    from miles_loop.evaluation_session import evaluate_model
    from miles_loop.machine import check_machine

    check_machine(config, training=False)
    # On a cluster the nodes write their logs there, so it has to be where runs are, not on this machine's own disk.
    where = Path.cwd() if config.runtime.kind is RuntimeKind.RAY else None
    before = signal.signal(signal.SIGTERM, _leave)  # so that engines are ended in order, and the folder goes
    try:
        with tempfile.TemporaryDirectory(prefix="miles-eval-", dir=where) as logs:
            metrics = asyncio.run(evaluate_model(recipe, config, Path(logs)))
    finally:
        signal.signal(signal.SIGTERM, before)
    if "json" in parsed.flags:
        sys.stdout.write(msgspec.json.encode({"model": config.model, **metrics}).decode() + "\n")
        return EXIT_GOOD
    width = max(map(len, metrics), default=0)
    sys.stdout.write(f"model: {config.model}\n")
    sys.stdout.writelines(f"  {name:<{width}}  {value:.4f}\n" for name, value in sorted(metrics.items()))
    return EXIT_GOOD


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


# -- export -----------------------------------------------------------------------------------------------


def _export(recipe: Recipe, parsed: Parsed) -> int:
    from miles_loop.export import export_model

    if len(parsed.words) != 2:
        raise InvalidFieldError("arguments", list(parsed.words), f"use {recipe.command} export RUN FOLDER")
    step = parsed.flags.get("step")
    if step is not None and not step.isdigit():
        raise InvalidFieldError("--step", step, "give the number of a step")
    run, target = map(Path, parsed.words)
    found = export_model(run, target, None if step is None else int(step))
    sys.stdout.write(f"exported step {found} of {run} to {target}\n")
    return EXIT_GOOD
