"""What all commands share: help, errors, and finding the app."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from kconsume.cli import commands
from tests.cli.conftest import APP, ROOT, Shop

COMMANDS = ["demo", "new", "run", "check", "send", "try", "failed", "dlq", "outbox", "schema", "plan", "broker"]


def test_the_help_lists_the_commands_in_the_order_a_person_meets_them(shop: Shop) -> None:
    shown = shop.run("--help")
    listed = shown.stdout.partition("Commands:")[2].splitlines()

    assert shown.returncode == 0
    assert [line.split()[0] for line in listed if line.strip()] == COMMANDS
    assert "kconsume try shop:app orders/3@1042" in shown.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_help_with_an_example(shop: Shop, command: str) -> None:
    shown = shop.run(command, "--help")

    assert shown.returncode == 0
    assert f"\n    kconsume {command}" in shown.stdout


def test_the_version_is_told(shop: Shop) -> None:
    import kconsume

    assert shop.run("--version").stdout == f"kconsume {kconsume.__version__}\n"


def test_a_command_that_is_none_is_refused(shop: Shop) -> None:
    shown = shop.run("rnu")

    assert shown.returncode == 2
    assert "No such command 'rnu'. Did you mean 'run'?" in shown.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("dlq", "lits"), "No such command 'lits'. Did you mean 'list'?"),
        (("outbox", "dorp"), "Did you mean 'drop'?"),
        (("schema", "migrat"), "Did you mean 'migrate'?"),
        (("plan", "asignment"), "Did you mean 'assignment'?"),
        (("dlq", "xyzzy"), "The commands are: list, show, redrive, purge."),
        (("send", "--jsno"), "Did you mean"),
        (("--vresion",), "Did you mean"),
    ],
)
def test_a_mistyped_word_is_answered_with_what_was_meant(shop: Shop, words: tuple[str, ...], told: str) -> None:
    shown = shop.run(*words)

    assert shown.returncode == 2
    assert told in shown.stderr


def every_command(command: click.Command, *names: str) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(names), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from every_command(found, *names, name)


EVERY = dict(every_command(commands, "kconsume"))


@pytest.mark.parametrize("name", EVERY)
def test_the_help_of_each_option_shows_its_default(name: str) -> None:
    """A flag has none: it is off."""
    command = EVERY[name]
    context = click.Context(command, show_default=True)
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden and not option.is_flag:
            shown = option.get_help_record(context)
            assert shown is not None
            assert "[default: " in shown[1], f"{name} {option.opts[0]}"
        if isinstance(option, click.Option):
            assert "said otherwise" not in (option.help or "")


@pytest.mark.parametrize(
    ("statement", "spared"),
    [
        ("import kconsume", {"click", "rich"}),
        ("import kconsume.testing", {"click", "rich"}),
        ("import kconsume.cli.run", {"rich"}),
        ("import kconsume.cli.demo.app", {"rich"}),
    ],
)
def test_a_consumer_does_not_load_what_only_a_terminal_needs(statement: str, spared: set[str]) -> None:
    code = f"{statement}\nimport sys\nassert not {spared} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, check=True)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("shpo:app", "there is no module 'shpo'"),
        ("shpo:app", "did you mean 'shop'?"),
        ("shop.py:app", "write shop:app"),
        ("./shop.py", "write shop:app"),
        ("shop:ap", "has no 'ap': write shop:app or shop:second"),
        ("shop:Order", "not an App"),
        ("shop:Order", "write shop:app or shop:second"),
        ("needy", "needy was found, but it imports 'not_there'"),
        ("needy", "needy.py, line 2"),
        ("broken", "broken cannot be imported: ZeroDivisionError"),
        ("broken", "    1 / 0"),
        ("unreadable", "unreadable cannot be imported: SyntaxError"),
        ("anonymous", "App needs a group"),
        ("anonymous", "anonymous.py, line 3"),
        ("empty", "make one there"),
        ("", "no app was named"),
    ],
)
def test_an_app_that_cannot_be_had_is_an_error_that_says_why(shop: Shop, asked: str, told: str) -> None:
    shop.write("shop", APP + "\n    second = app\n")
    shop.write("needy", "\nimport not_there\n")
    shop.write("broken", "def f():\n    1 / 0\nf()\n")
    shop.write("unreadable", "def f(:\n")
    shop.write("anonymous", "from kconsume import App\n\napp = App('localhost:9092', group='')\n")
    shop.write("empty", "")
    refused = shop.run("run", asked)

    assert refused.returncode == 2
    assert told in refused.stderr
    assert refused.stderr.startswith("error: ")
    assert "kconsume/cli" not in refused.stderr


def test_the_attribute_is_app_unless_said_otherwise(shop: Shop) -> None:
    shop.write("shop")

    assert shop.run("check", "shop").stdout.startswith("shop:app ")


def test_the_app_can_come_from_the_environment(shop: Shop) -> None:
    shop.write("shop")

    assert shop.run("check", KCONSUME_APP="shop").stdout.startswith("shop:app ")


def test_each_example_of_a_help_page_has_a_line_of_its_own() -> None:
    """Reflowed text would put two commands on one line."""
    pages = {name: command.get_help(click.Context(command)) for name, command in EVERY.items()}
    crowded = [
        f"{name}: {line.strip()}"
        for name, page in pages.items()
        for line in page.splitlines()
        if line.startswith("    kconsume ") and line.partition("|")[0].count("kconsume ") > 1
    ]
    assert crowded == []
    assert any(line.startswith("    kconsume ") for page in pages.values() for line in page.splitlines())
