"""Commands."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from prized_gym.runsc import Sandbox


def test_result(shared: Sandbox) -> None:
    result = shared.exec("echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
    assert result.pid > 1 and not result.timed_out and not result.truncated


def test_words_are_not_a_shell_command(shared: Sandbox) -> None:
    assert shared.exec(["/bin/echo", "$HOME", "a b"]).stdout == b"$HOME a b\n"


def test_environment_home_and_user(shared: Sandbox) -> None:
    result = shared.exec("echo $A $HOME $(pwd) $(id -un)", env={"A": "1"})
    assert result.stdout == b"1 /home/user /home/user user\n"
    assert shared.exec("pwd", cwd="/usr").stdout == b"/usr\n"
    assert shared.exec("id -u", user="root").stdout == b"0\n"


def test_signal_is_an_exit_code(shared: Sandbox) -> None:
    assert shared.exec("kill -9 $$").exit_code == 137


@pytest.mark.parametrize(
    "arguments, error", [((["/no/such"], None), FileNotFoundError), ((["/bin/true"], "nowhere"), NotADirectoryError)]
)
def test_cannot_start(shared: Sandbox, arguments: tuple[list[str], str | None], error: type[Exception]) -> None:
    with pytest.raises(error, match="sandbox"):
        shared.exec(arguments[0], cwd=arguments[1])


def test_input_and_output_of_megabytes(shared: Sandbox) -> None:
    data = bytes(range(256)) * 20_000
    assert shared.exec(["/bin/cat"], stdin=data).stdout == data


def test_command_that_ignores_its_input(shared: Sandbox) -> None:
    assert shared.exec(["/bin/true"], stdin=b"x" * 3_000_000).exit_code == 0


def test_output_arrives_while_it_runs(shared: Sandbox) -> None:
    seen: list[tuple[str, bytes]] = []
    started = threading.Event()

    def hear(stream: str, data: bytes) -> None:
        seen.append((stream, data))
        started.set()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            shared.exec,
            "echo a; while [ ! -e heard ]; do sleep 0.02; done; echo b >&2",
            on_output=hear,
            timeout=30,
        )
        assert started.wait(20) and seen == [("stdout", b"a\n")]
        shared.files.write("heard", "")
        assert not running.result(30).timed_out
    assert seen == [("stdout", b"a\n"), ("stderr", b"b\n")]


def test_the_end_of_long_output_is_kept(shared: Sandbox) -> None:
    result = shared.exec("seq 100000; echo end", max_output=1000)
    assert result.truncated and len(result.stdout) == 1000 and result.stdout.endswith(b"100000\nend\n")


def test_timeout_kills_the_whole_group(shared: Sandbox) -> None:
    # One that was left would hold the pipe, and the command would take as long as it sleeps.
    result = shared.exec("sleep 321 & sleep 321; echo no", timeout=0.3)
    assert result.timed_out and result.exit_code == 137
    assert shared.exec("pgrep -f 'sleep 321' | wc -l").stdout.strip() in (b"0", b"1")  # the pgrep's own shell may match


def test_background(shared: Sandbox) -> None:
    start = time.monotonic()
    result = shared.exec("echo started > bg.txt; sleep 60; echo ended > bg.txt", background=True)
    assert time.monotonic() - start < 60 and result.pid > 1
    assert (
        shared.exec(f"while [ ! -s bg.txt ]; do sleep 0.02; done; cat bg.txt; kill -9 -{result.pid}", timeout=30).stdout
        == b"started\n"
    )


def test_child_that_keeps_the_pipe_does_not_hold_the_command(shared: Sandbox) -> None:
    child = "while [ ! -e on ]; do sleep 0.02; done; echo late; echo alive > late.txt"
    result = shared.exec(f"({child}) & echo now", timeout=30)
    assert result.stdout == b"now\n" and not result.timed_out
    shared.files.write("on", "")
    assert shared.exec("while [ ! -s late.txt ]; do sleep 0.05; done", timeout=20).exit_code == 0  # no SIGPIPE met it


def test_many_at_once(shared: Sandbox) -> None:
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda number: shared.exec(["/bin/echo", str(number)]).stdout, range(32)))
    assert results == [b"%d\n" % number for number in range(32)]


def test_orphans_are_reaped(shared: Sandbox) -> None:
    shared.exec("for i in 1 2 3 4 5; do (setsid sleep 0.1 &) ; done; sleep 0.4")
    states = shared.exec("cat /proc/[0-9]*/stat | cut -d' ' -f3 | sort | uniq -c").stdout
    assert b"Z" not in states


def test_goes_on_through_a_fork(shared: Sandbox) -> None:
    started = threading.Event()
    numbers = (
        "import sys, time\nfor i in range(40): print(i, flush=True); time.sleep(0.03)\n"
        "print(len(sys.stdin.buffer.read()))"
    )
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            shared.exec,
            ["python3", "-I", "-S", "-c", numbers],
            stdin=b"x" * 1_000_000,
            on_output=lambda *_: started.set(),
            timeout=60,
        )
        assert started.wait(20)
        for copy in shared.fork(2):
            assert copy.exec("echo copy").stdout == b"copy\n"
            copy.close()
        result = running.result(60)
    assert result.stdout.decode().split() == [str(number) for number in range(40)] + ["1000000"]


def test_forks_and_everything_else_at_once(shared: Sandbox) -> None:
    over = threading.Event()

    def use(number: int) -> int:
        rounds = 0
        while not over.is_set():
            assert shared.exec(["/bin/echo", str(number)], timeout=30).stdout == b"%d\n" % number
            shared.files.write(f"file-{number}", str(rounds))
            assert shared.files.read(f"file-{number}") == str(rounds).encode()
            rounds += 1
        return rounds

    with ThreadPoolExecutor(3) as pool:
        users = [pool.submit(use, number) for number in range(3)]
        try:
            for _ in range(4):
                [copy] = shared.fork()
                assert copy.exec("ls", timeout=30).exit_code == 0
                copy.close()
        finally:
            over.set()
        assert all(user.result() for user in users)


def test_too_long_a_command_is_refused(shared: Sandbox) -> None:
    with pytest.raises(ValueError, match="stdin"):
        shared.exec(["/bin/echo", "x" * 2_000_000])
    with pytest.raises(OSError):  # what the kernel inside refuses
        shared.exec(["/bin/echo", "x" * 500_000])
