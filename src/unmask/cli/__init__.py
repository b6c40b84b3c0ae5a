"""The command line. Commands import what they need when they run, so that `--help` answers at once.

Whoever reads the output may stop, as `head` does: a command ends with its own exit code all the same.

Exit codes: 0 done · 1 a gate of a plan crossed, or a regression · 2 bad input or tool error · 3 inconclusive · 4 usage.
"""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from unmask.cli.audit import audit_command
from unmask.cli.compare import compare_command
from unmask.cli.init import init_command
from unmask.cli.observe import observe
from unmask.cli.options import EXIT_DONE, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_USAGE, JsonOption, UsageError
from unmask.cli.recover import recover
from unmask.cli.report import report_command
from unmask.cli.streams import patient_output, warnings_as_notes
from unmask.cli.verify import verify_command
from unmask.cli.words import explain_usage, say_as_options
from unmask.cli.wrap import wrap
from unmask.errors import UnmaskError

# Newer typers carry a click of their own, whose exceptions are not click's.
click = import_module("typer._click" if find_spec("typer._click") else "click")

app = typer.Typer(
    name="unmask",
    help="Shows exactly what a transformer gives away. For auditing your own models and systems, with consent.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(observe, name="observe")
app.add_typer(wrap, name="wrap")
app.add_typer(recover, name="recover")
app.command("verify")(verify_command)
app.command("init")(init_command)
app.command("audit")(audit_command)
app.command("report")(report_command)
app.command("compare")(compare_command)


def _print_version(asked: bool) -> None:
    if asked:
        from unmask import __version__

        typer.echo(f"unmask {__version__}")
        raise typer.Exit(EXIT_DONE)


@app.callback()
def options_of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


@app.command()
def models(
    check: Annotated[
        str | None,
        typer.Option(
            "--check",
            metavar="NAME_OR_FOLDER",
            help="Load a model, list its layers and what each attack can recover.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the real weights that install without a model hub, or check any model.

    Example: [bold]unmask models[/bold] or [bold]unmask models --check ./my-model[/bold]
    """
    if check is not None:
        from unmask.terminal.models import check_models

        check_models(check, json)
        return
    from unmask.models.catalog import list_models
    from unmask.terminal import print_models

    print_models(list_models(), json)


@app.command()
def attacks(json: JsonOption = False) -> None:
    """List the attacks: what each needs, what it claims, and where it comes from.

    Example: [bold]unmask attacks[/bold]
    """
    from unmask.terminal.tables import print_attacks

    print_attacks(json)


@app.command()
def defences(json: JsonOption = False) -> None:
    """List the defences of updates, hidden states, vectors and services, with their settings.

    Example: [bold]unmask defences --json[/bold]
    """
    from unmask.terminal.tables import print_defences

    print_defences(json)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for findings and report.")] = Path("runs/demo"),
) -> None:
    """Show every channel on real weights, with defences, controls and a report. Takes about five minutes.

    Example: [bold]unmask demo --out runs/demo[/bold]
    """
    from unmask.terminal import working

    with working("loading torch and transformers"):
        from unmask.demo import run_demo
    raise typer.Exit(EXIT_DONE if run_demo(out) else EXIT_ERROR)


def main() -> None:
    """Entry point: callers' mistakes become one paragraph and an exit code, never a traceback."""
    with patient_output(), warnings_as_notes():
        code = _run()
    sys.exit(code)


def _run() -> int:
    """Run the command that was asked for; its exit code."""
    try:
        code = app(prog_name="unmask", standalone_mode=False)  # also where Python runs the module
    except UnmaskError as error:
        code = _complain(say_as_options(str(error)), EXIT_USAGE if isinstance(error, UsageError) else EXIT_ERROR)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = EXIT_USAGE
    except click.ClickException as error:
        message = explain_usage(error.format_message())
        error.format_message = lambda: message
        error.show()
        code = EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except MemoryError:
        code = _complain("out of memory; use fewer texts or a smaller model", EXIT_ERROR)
    except OSError as error:
        code = _complain(f"the system refused: {error}", EXIT_ERROR)
    except Exception:  # Python's own exit code, 1, would say that a gate is crossed
        traceback.print_exc()
        code = _complain("this is a bug in unmask; please report it with the lines above", EXIT_ERROR)
    if code == EXIT_INTERRUPTED:
        _complain("stopped; everything written so far is kept", code)
    return code if isinstance(code, int) else EXIT_DONE


def _complain(message: str, code: int) -> int:
    from rich.console import Console
    from rich.text import Text

    from unmask.terminal import printable

    Console(stderr=True).print(Text.assemble(("unmask: ", "bold red"), printable(message, longest=4000)))
    return code
