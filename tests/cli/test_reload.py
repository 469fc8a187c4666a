"""`kconsume run --reload`, as a person develops with it: edits, mistakes, Ctrl-C; real processes."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import textwrap
import threading
from pathlib import Path

import pytest

from kconsume.cli.reload import Reloader, differences, folders, snapshot
from tests.cli.conftest import APP, Running, Shop
from tests.waiting import eventually

TEN_TIMES = APP.replace("(order.id,)", "(10 * order.id,)")
BROKEN = APP.replace("tx.execute(", "tx.execute((")
FAILING = APP.replace("tx.execute(", 'raise ValueError("no more of it")\n        tx.execute(')
SLOW = APP.replace(
    "tx.execute(",
    'import pathlib, time\n        pathlib.Path("entered").touch()\n        '
    'while not pathlib.Path("go").exists(): time.sleep(0.01)\n        tx.execute(',
)


@pytest.fixture
def developing(shop: Shop) -> Shop:
    shop.write("shop")
    shop.broker(orders=1)
    shop.make_table()
    return shop


def order(shop: Shop, *numbers: int) -> None:
    shop.order(*(b'{"id": %d}' % number for number in numbers))


def await_reserved(shop: Shop, running: Running, *numbers: int) -> None:
    try:
        eventually(lambda: shop.reserved() == list(numbers), what=f"{numbers} reserved")
    except AssertionError as error:
        error.add_note(f"reserved are {shop.reserved()}, and it said: {running.err}")
        raise


def consumers(shop: Shop) -> list[str]:
    """The processes that consume: not the parent, not the broker."""
    return [command for command in shop.processes() if "--lifeline" in command]


# Edits


def test_a_changed_handler_takes_over_where_the_old_one_stopped(developing: Shop) -> None:
    running = developing.start("run", "shop:app", "--reload")
    order(developing, 1, 2)
    await_reserved(developing, running, 1, 2)
    developing.write("shop", TEN_TIMES)
    running.await_err("committed orders/0@2")
    order(developing, 3)
    await_reserved(developing, running, 1, 2, 30)

    assert running.err.count("kconsume.reload restarting app files=shop.py") == 1
    running.send(signal.SIGINT)
    assert running.end() == 0
    assert "committed orders/0@3" in running.err
    assert consumers(developing) == []


def test_the_handler_that_runs_is_finished_before_the_new_code_starts(developing: Shop) -> None:
    developing.write("shop", SLOW)
    running = developing.start("run", "shop:app", "--reload")
    order(developing, 1)
    eventually((developing.folder / "entered").exists, what="a handler that runs")
    developing.write("shop", TEN_TIMES)
    running.await_err("drain started")
    assert len(consumers(developing)) == 1
    (developing.folder / "go").touch()
    running.await_err("committed orders/0@1")
    order(developing, 2)
    await_reserved(developing, running, 1, 20)


def test_a_new_file_and_a_removed_one_are_changes_too(developing: Shop) -> None:
    running = developing.start("run", "shop:app", "--reload")
    running.await_err("assigned")
    (developing.folder / "more").mkdir()
    developing.write("more/extra", "")
    running.await_err("restarting app files=more/extra.py")
    eventually(lambda: running.err.count("assigned") == 2, what="a second start")
    (developing.folder / "more" / "extra.py").unlink()
    eventually(lambda: running.err.count("restarting app files=more/extra.py") == 2, what="the removal is noticed")


def test_other_files_are_no_reason_to_start_again(developing: Shop) -> None:
    running = developing.start("run", "shop:app", "--reload")
    running.await_err("assigned")
    for name in ("notes.txt", ".hidden/a.py", "__pycache__/b.py", "venv/pyvenv.cfg", "venv/lib/c.py"):
        (developing.folder / name).parent.mkdir(exist_ok=True, parents=True)
        (developing.folder / name).touch()
    developing.write("extra", "")  # a control: looking goes on, and sees all that came before
    running.await_err("restarting app files=extra.py")
    assert running.err.count("restarting app") == 1


def test_a_second_edit_in_the_same_second_is_not_taken_for_the_first(developing: Shop) -> None:
    """Python's cached bytecode knows a file by its size and by the second in which it was changed."""
    once, twice = (APP.replace("order.id,", f"{factor} * order.id,") for factor in (1, 2))
    developing.write("shop", once)
    os.utime(developing.folder / "shop.py", ns=(10**18, 10**18))
    running = developing.start("run", "shop:app", "--reload", PYTHONDONTWRITEBYTECODE="")
    order(developing, 1)
    await_reserved(developing, running, 1)
    edited = developing.folder / "shop.edited"
    edited.write_text(textwrap.dedent(twice))
    os.utime(edited, ns=(10**18 + 1, 10**18 + 1))
    edited.rename(developing.folder / "shop.py")
    running.await_err("committed orders/0@1")
    order(developing, 2)
    await_reserved(developing, running, 1, 4)


# Mistakes


def test_code_that_cannot_be_read_waits_for_the_next_change_and_is_not_tried_again_and_again(developing: Shop) -> None:
    running = developing.start("run", "shop:app", "--reload")
    running.await_err("assigned")
    developing.write("shop", BROKEN)
    running.await_err("app ended exit_code=2")
    assert consumers(developing) == []
    developing.write("shop", TEN_TIMES)
    order(developing, 1)
    await_reserved(developing, running, 10)
    assert running.err.count("error: shop cannot be imported: SyntaxError") == 1


def test_it_can_begin_with_a_module_that_is_not_there_yet(shop: Shop) -> None:
    shop.broker(orders=1)
    shop.make_table()
    running = shop.start("run", "shop:app", "--reload")
    running.await_err("there is no module 'shop'")
    running.await_err("app ended exit_code=2")
    shop.write("shop")
    order(shop, 1)
    await_reserved(shop, running, 1)


def test_a_handler_that_fails_is_repaired_and_the_record_is_handled_then(developing: Shop) -> None:
    developing.write("shop", FAILING)
    running = developing.start("run", "shop:app", "--reload")
    order(developing, 1)
    running.await_err("app ended exit_code=1")
    assert "kconsume try shop:app orders/0@0" in running.err
    developing.write("shop")
    await_reserved(developing, running, 1)


def test_without_an_app_it_ends_at_once(shop: Shop) -> None:
    refused = shop.run("run", "--reload")

    assert refused.returncode == 2
    assert refused.stderr.startswith("error: no app was named")


# The end


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_both_with_the_childs_exit_code(developing: Shop, number: signal.Signals) -> None:
    running = developing.start("run", "shop:app", "--reload")
    running.await_err("assigned")
    running.send(number)

    assert running.end() == 0
    assert running.err.count("drain started") == 1
    assert "kconsume stopped in" in running.err
    assert consumers(developing) == []


def test_a_signal_while_it_waits_for_a_change_ends_with_what_the_last_child_said(developing: Shop) -> None:
    developing.write("shop", FAILING)
    running = developing.start("run", "shop:app", "--reload")
    order(developing, 1)
    running.await_err("app ended exit_code=1")
    running.send(signal.SIGINT)

    assert running.end() == 1


def test_ctrl_c_in_a_terminal_reaches_the_child_once(developing: Shop) -> None:
    """A terminal sends it to all processes of its foreground; a second one would cut the drain short."""
    keyboard, terminal = pty.openpty()
    with (developing.folder / "err").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "kconsume", "run", "shop:app", "--reload"],
            cwd=developing.folder,
            env=developing._environment({}),
            stdin=terminal,
            stderr=err,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
    running = Running(process, developing.folder)
    try:
        running.await_err("assigned")
        os.write(keyboard, b"\x03")
        assert running.end() == 0
    finally:
        process.kill()
        os.close(keyboard)
        os.close(terminal)
    assert running.err.count("drain started") == 1
    assert consumers(developing) == []


def test_a_second_signal_leaves_at_once(developing: Shop) -> None:
    developing.write("shop", SLOW)
    running = developing.start("run", "shop:app", "--reload")
    order(developing, 1)
    eventually((developing.folder / "entered").exists, what="a handler that runs")
    running.send(signal.SIGINT)
    running.await_err("drain started")
    running.send(signal.SIGINT)

    assert running.end() == 128 + signal.SIGINT
    assert consumers(developing) == []


def test_a_signal_while_an_old_child_drains_lets_it_drain_and_starts_no_other(developing: Shop) -> None:
    developing.write("shop", SLOW)
    running = developing.start("run", "shop:app", "--reload")
    order(developing, 1)
    eventually((developing.folder / "entered").exists, what="a handler that runs")
    developing.write("shop", TEN_TIMES)
    running.await_err("drain started")
    running.send(signal.SIGINT)
    (developing.folder / "go").touch()

    assert running.end() == 0
    assert developing.reserved() == [1]
    assert running.err.count("exactly once") == 1, "one banner, so one start"


def test_a_parent_that_was_killed_leaves_no_consumer_behind(developing: Shop) -> None:
    running = developing.start("run", "shop:app", "--reload")
    running.await_err("assigned")
    assert len(consumers(developing)) == 1
    running.send(signal.SIGKILL)

    eventually(lambda: consumers(developing) == [], what="the consumer drains and ends")
    assert "kconsume stopped in" in running.err


def test_the_options_of_the_command_line_are_the_childs(developing: Shop) -> None:
    running = developing.start("run", "shop:app", "--reload", "--log-format", "json", "--log-level", "debug")
    running.await_err("assigned")
    developing.write("shop", TEN_TIMES)
    running.await_err('"message":"restarting app"')
    assert '"files":"shop.py"' in running.err
    running.send(signal.SIGINT)
    running.end()

    assert all(line.startswith("{") for line in running.err.splitlines())


# A child that does not end, in a moment instead of the 25 seconds it has

STUBBORN = "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {0}; time.sleep(600)"


def test_a_child_that_does_not_drain_in_time_is_killed_and_the_next_one_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note = "pathlib.Path(sys.argv[1], f'{time.time_ns()}.started').touch()"
    command = [sys.executable, "-c", STUBBORN.format(note), str(tmp_path)]
    reloader = Reloader(command, [tmp_path], budget=0.2)

    def starts() -> int:
        return len(list(tmp_path.glob("*.started")))

    def edit_then_leave() -> None:
        eventually(lambda: starts() == 1, what="a first start")
        (tmp_path / "edited.py").touch()
        eventually(lambda: starts() == 2, what="a second start")
        os.kill(os.getpid(), signal.SIGINT)

    person = threading.Thread(target=edit_then_leave)
    person.start()
    with caplog.at_level("INFO", "kconsume.reload"):
        assert reloader.run() == 128 + signal.SIGINT
    person.join()
    assert "app killed seconds=0.2" in caplog.text


# What is watched


def test_a_package_elsewhere_is_watched_besides_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, here = tmp_path / "src", tmp_path / "here"
    (elsewhere / "remote").mkdir(parents=True)
    (elsewhere / "remote" / "__init__.py").write_text("raise AssertionError('imported')")
    here.mkdir()
    (here / "near.py").touch()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(elsewhere), *sys.path])

    assert folders("remote.app") == [here, elsewhere / "remote"]
    assert folders("near") == [here]
    assert folders("nowhere") == [here]
    assert folders("msgspec") == [here], "what was installed does not change"


def test_a_file_that_is_written_again_with_the_same_size_is_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("x = 1")
    before = snapshot([tmp_path])
    assert differences(before, snapshot([tmp_path])) == []
    os.utime(tmp_path / "a.py", ns=(1, 1))
    assert differences(before, snapshot([tmp_path])) == ["a.py"]
