"""Signals stop a process in any state, logs stay readable, and out-of-memory errors advise."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from localtrain import oom, runtime
from localtrain.errors import OutOfMemoryError
from localtrain.runtime import StopSignal

posix = pytest.mark.skipif(os.name != "posix", reason="signals as on POSIX")

START = """
import hashlib, os, signal, sys, threading, time
from localtrain.runtime import StopSignal, setup_logging
setup_logging()
def busy():  # inside C, without the interpreter lock: like a compile
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 400_000_000)
def ready():
    print("ready", flush=True)
"""
LOOP = """
stop = StopSignal.install(bound_s=60)
ready()
while not stop.requested:
    time.sleep(0.01)
time.sleep(0.3)
print("saved", stop.reason, flush=True)
sys.exit(75)
"""
IN_C = """
stop = StopSignal.install(bound_s=60)
stop.nothing_to_save({nothing})
ready()
busy()
"""


def start(code):
    process = subprocess.Popen(
        [sys.executable, "-c", START + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


def finish(process, within):
    out, err = process.communicate(timeout=within)
    return process.returncode, out, err


# ---- signals


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_the_loop_to_save_and_stop(number):
    process = start(LOOP)
    process.send_signal(number)
    code, out, err = finish(process, 10)
    assert (code, out) == (75, f"saved {number.name}\n")
    assert f"warning: {number.name}: stopping" in err
    assert "Traceback" not in err


@posix
def test_with_nothing_to_save_a_signal_ends_a_compile_at_once():
    process = start(IN_C.format(nothing=True))
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process, 5)
    assert code == 75
    assert "SIGTERM: nothing to save, stopping. Start the same command again to go on." in err


@posix
def test_a_second_signal_quits_at_once_even_inside_c():
    process = start(IN_C.format(nothing=False))
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, 5)
    assert code == 75
    assert "second signal, quitting without saving" in err


@posix
def test_a_signal_that_a_wrapper_delivers_twice_counts_once():
    process = start(LOOP)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    code, out, _ = finish(process, 10)
    assert code == 75
    assert out.startswith("saved SIG")


@posix
def test_a_stop_that_hangs_ends_within_the_bound():
    process = start("stop = StopSignal.install(bound_s=0.5)\nready()\nbusy()")
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process, 5)
    assert code == 75
    assert "stopping took longer than 0.5 s" in err


@posix
def test_a_signal_before_the_compile_ends_the_process_when_the_compile_would_start():
    code = "stop = StopSignal.install()\nready()\nstop.event.wait()\n"
    process = start(code + "stop.nothing_to_save(True)\nbusy()")
    process.send_signal(signal.SIGTERM)
    assert finish(process, 5)[0] == 75


@posix
def test_a_blocked_stderr_does_not_block_the_stop():
    code = "stop = StopSignal.install()\nready()\nwhile True: os.write(2, bytes(10**6))"
    process = start(code)
    time.sleep(0.2)  # the main thread now waits in a write that nobody reads
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=6) == 75
    process.communicate()


@posix
def test_another_owner_of_the_wake_up_descriptor_does_not_lose_a_signal():
    code = LOOP.replace("ready()", "signal.set_wakeup_fd(-1)\nready()")
    process = start(code)
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process, 10)
    assert (code, out) == (75, "saved SIGTERM\n")


@posix
def test_what_must_run_before_the_end_runs():
    code = "stop = StopSignal.install()\nstop.on_exit(lambda: print('restored', flush=True))\n"
    process = start(code + "stop.nothing_to_save(True)\nready()\nbusy()")
    process.send_signal(signal.SIGTERM)
    assert finish(process, 5)[:2] == (75, "restored\n")


@posix
def test_the_signal_arrives_after_jax_distributed_has_taken_it():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"""
import jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize("127.0.0.1:{port}", num_processes=1, process_id=0)
"""
    process = start(code + LOOP)
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process, 20)
    assert (code, out) == (75, "saved SIGTERM\n")


@posix
def test_a_real_compile_is_left_at_once():
    code = """
import jax, jax.numpy as jnp
def f(x):
    for i in range(6000):
        x = jnp.sin(x) @ (x + i)
    return x
lowered = jax.jit(f).lower(jnp.ones((8, 8)))
stop = StopSignal.install()
stop.nothing_to_save(True)
ready()
lowered.compile()
time.sleep(60)
"""
    process = start(code)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert finish(process, 5)[0] == 75


@posix
def test_uninstalling_puts_the_old_handlers_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopSignal.install() as stop:
        assert signal.getsignal(signal.SIGTERM) not in before
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.event.wait(5)
        assert stop.reason == "SIGTERM"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "stop-signal"]


def test_outside_the_main_thread_signals_are_left_to_the_application():
    found = []
    thread = threading.Thread(target=lambda: found.append(StopSignal.install()))
    thread.start()
    thread.join()
    assert not found[0].requested
    found[0].uninstall()


# ---- logging


@pytest.fixture
def logger():
    yield logging.getLogger("localtrain.test")
    runtime.close_logging()


def test_lines_go_to_stderr_plain_and_to_the_log_with_a_date(tmp_path, logger, capsys):
    runtime.setup_logging(tmp_path)
    logger.info("step 1")
    logger.warning("careful")
    logger.info("only for the file", extra={"console": False})
    assert capsys.readouterr().err == "step 1\nwarning: careful\n"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[24:] for line in lines] == [
        "INFO step 1",
        "WARNING careful",
        "INFO only for the file",
    ]


def test_a_second_run_in_the_same_process_has_its_own_log(tmp_path, logger, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        runtime.setup_logging(tmp_path / name)
        logger.info("in %s", name)
    assert capsys.readouterr().err == "in a\nin b\n"
    assert (tmp_path / "a" / "log.txt").read_text().endswith("in a\n")
    assert (tmp_path / "b" / "log.txt").read_text().count("\n") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_turn_log_lines_into_tracebacks(tmp_path, logger, capsys):
    os.symlink("/dev/full", tmp_path / "log.txt")
    runtime.setup_logging(tmp_path)
    logger.info("step 1")
    runtime.close_logging()
    assert capsys.readouterr().err == "step 1\n"


def test_starting_jax_and_orbax_prints_nothing():
    code = START + "import jax, orbax.checkpoint\nfrom localtrain import runtime\n"
    code += "setup_logging()\nprint(runtime.describe_host())\nprint(runtime.processes.lead())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    line, lead = done.stdout.splitlines()
    assert line.startswith("localtrain ") and "(cpu)" in line
    assert lead == "True"


def test_host_facts_are_json():
    facts = json.loads(json.dumps(runtime.host_facts()))
    assert facts["platform"] == "cpu"
    assert facts["jax"] == jax.__version__
    assert facts["devices"] >= 1


def test_the_module_does_not_import_jax():
    code = (
        "import sys, localtrain.runtime, localtrain.oom, localtrain.metrics, localtrain.progress;"
    )
    code += "sys.exit('jax' in sys.modules or 'tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- out of memory


def run_of(
    micro_batch=None, remat="none", state_dtype="float32", batch_size=24, param_dtype="float32"
):
    return SimpleNamespace(
        train=SimpleNamespace(
            batch_size=batch_size,
            micro_batch=micro_batch,
            remat=remat,
            param_dtype=param_dtype,
        ),
        optim=SimpleNamespace(state_dtype=state_dtype, name="adamw"),
        data=SimpleNamespace(seq_len=1024),
    )


def test_an_allocation_that_is_too_big_becomes_advice():
    memory = {"parameters": 2**30, "optimizer": 2**31, "temporaries": 2**40, "available": 2**33}
    with pytest.raises(OutOfMemoryError) as raised, oom.memory_advice(run_of(), memory):
        jnp.zeros((2**45,), jnp.int8).block_until_ready()
    message = str(raised.value)
    assert raised.value.exit_code == 5
    for part in (
        "allocating 32768.00 GiB on a device with 8.00 GiB",
        "parameters 1.00 GiB, optimizer 2.00 GiB, temporaries 1024.00 GiB",
        "train.micro_batch=12 (now 24",
        "train.remat=full",
        "optim.state_dtype=bfloat16",
        "train.param_dtype=bfloat16",
        "train.batch_size=12",
        "data.seq_len=512",
    ):
        assert part in message, message
    assert "\n" not in message


def test_advice_leaves_out_what_is_already_done():
    run = run_of(1, remat="full", state_dtype="bfloat16", param_dtype="bfloat16")
    with pytest.raises(OutOfMemoryError) as raised, oom.memory_advice(run):
        raise MemoryError
    message = str(raised.value)
    for part in ("micro_batch", "batch_size", "remat", "state_dtype", "param_dtype"):
        assert part not in message
    assert "data.seq_len=512" in message


def test_the_suggested_micro_batch_divides_the_batch():
    assert "train.micro_batch=5 " in oom.explain(MemoryError(), run_of(batch_size=15), {})


def test_other_errors_pass_untouched():
    with pytest.raises(ValueError, match="RESOURCE_EXHAUSTED"), oom.memory_advice(run_of()):
        raise ValueError("RESOURCE_EXHAUSTED")


@pytest.mark.parametrize(
    ("message", "count"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes.", 2**30),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB.", 3 * 2**29),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 512 bytes.", 512),
        ("RESOURCE_EXHAUSTED: Attempting to allocate 24.0G. That was not possible.", 24 * 2**30),
        ("RESOURCE_EXHAUSTED: something else", None),
    ],
)
def test_the_size_of_the_allocation_is_read_from_each_spelling(message, count):
    assert oom._asked(message) == count
