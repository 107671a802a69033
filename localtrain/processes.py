"""The processes of one run: who they are, how they find each other, what they agree on.

A run of several processes is started once per process, on one host or many: by a launcher (SLURM's
srun, Open MPI's mpirun) whose environment says how many there are, or by hand with a coordinator's
address. `join` connects them through jax.distributed. After that jax.devices() are those of all.
Process 0 leads: it alone decides and writes, the others `agree`. Everything here is on the host,
through the store of keys and values that jax's coordinator keeps, so it may be called from any
thread and never mixes with what the devices exchange. heartbeat.py watches that all are alive.

With one process every function here is there and does the obvious thing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from localtrain import errors, heartbeat, rendezvous
from localtrain.errors import LocaltrainError
from localtrain.launcher import Place, find_place, split_address

_FOREVER_MS = 24 * 3600 * 1000  # who waits for a dead process is ended by the heartbeat
_ONCE = ("save",)  # of `any_of`: one late save is one save; "stop" stays true for good

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
_place: Place | None = None
_ballots: dict[str, _Ballot] = {}
_turn = 0  # of `agree` without a name


def count() -> int:
    """How many processes the run has."""
    return 1 if _place is None else _place.count


def index() -> int:
    """The number of this process, from 0 on."""
    return 0 if _place is None else _place.index


def lead() -> bool:
    """Whether this is the process that decides and writes (process 0)."""
    return index() == 0


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    auto: bool = False,
    local_devices: list[int] | None = None,
) -> str | None:
    """Connect with the other processes of the run; a line for the log, None when alone.

    auto: leave it to jax to find the others (TPU slices). local_devices: the numbers of the devices
    that this process takes, of those it sees. Must come before jax opens its devices. Raises
    ConfigError, and PeerError when not all are there within `rendezvous.JOIN_S` seconds.
    """
    global _place
    place = None if auto else find_place(coordinator, num_processes, process_id)
    if place is None and not auto:
        return None
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM over
    jax.config.update("jax_check_proxy_envs", False)  # `rendezvous.meet` sees to it
    with rendezvous.over_jax():
        if place is None:
            jax.distributed.initialize(heartbeat_timeout_seconds=rendezvous.HEARTBEAT_S)
            from jax._src.distributed import global_state as found

            place = Place(
                found.coordinator_address, found.num_processes, found.process_id, "the platform"
            )
        else:
            rendezvous.meet(place)
            rendezvous.connect(place, local_devices)
    _place = place
    if place.count > 1:
        host, _ = split_address(place.coordinator)
        heartbeat.start(host, place.index, place.count, _publish)
    return f"{place.count} processes (by {place.source}), coordinator {place.coordinator}"


def _client() -> Any:
    from jax._src.distributed import global_state  # jax has no public way to its store

    return global_state.client


def _publish(key: str, value: str | None) -> str:
    """Set a key once, or wait for it."""
    if value is not None:
        _client().key_value_set(f"localtrain/{key}", value)
        return value
    return _client().blocking_key_value_get(f"localtrain/{key}", _FOREVER_MS)


def agree(value: Any = None, name: str | None = None) -> Any:
    """The lead's JSON value, in every process. All call it, in the same order (or by `name`)."""
    global _turn
    if count() == 1:
        return value
    if name is None:
        _turn += 1
        name = f"agree/{_turn}"
    return json.loads(_publish(name, json.dumps(value) if lead() else None))


def by_lead(action: Callable[[], Any]) -> Any:
    """The JSON value of `action`, which only the lead calls; what it raises is raised in all."""
    if count() == 1:
        return action()
    try:
        outcome, error = {"value": action() if lead() else None}, None
    except LocaltrainError as raised:
        outcome, error = {"error": kind_of(raised), "message": str(raised)}, raised
    outcome = agree(outcome)
    if error is not None:
        raise in_all(error)
    if "error" in outcome:
        raise in_all(getattr(errors, outcome["error"])(outcome["message"]))
    return outcome["value"]


def kind_of(error: LocaltrainError) -> str:
    """The nearest class of an error that errors.py has, by name: the others raise that one."""
    return next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))


def lead_first(action: Callable[[], T]) -> T:
    """What `action` gives in each process; the lead calls it before the others, which then find
    what it has made. What it raises in the lead is raised in all."""
    made: list[T] = []
    by_lead(lambda: made.append(action()))
    return made[0] if made else action()


def gather(value: Any, name: str) -> list[Any]:
    """The JSON values of all processes in the lead, by their numbers; [] in the others."""
    if count() == 1:
        return [value]
    if not lead():
        _publish(f"{name}/{index()}", json.dumps(value))
        return []
    others = [json.loads(_publish(f"{name}/{i}", None)) for i in range(1, count())]
    _client().key_value_delete(f"localtrain/{name}/")
    return [value, *others]


def barrier(name: str) -> None:
    """Return when every process is here. `name` may be used once.

    Needed before the first exchange between devices: gloo waits 30 s there for the slowest.
    """
    if count() > 1:
        _client().wait_at_barrier(f"localtrain/{name}", _FOREVER_MS)


def any_of(flag: bool, name: str, now: bool = False) -> bool:
    """Whether `flag` was True in any process, the same answer in all: of the call before, which
    costs no waiting, or with `now` of this one.

    All call it at the same place of their program. It is one more exchange between the devices,
    so it cannot be answered differently for one and the same step.
    """
    if count() == 1:
        return flag
    if name not in _ballots:
        _ballots[name] = _Ballot(once=name in _ONCE)
    return _ballots[name].cast(flag, now)


class _Ballot:
    """A program that says whether any device has a 1. once: a yes also answers what was asked
    before it was read."""

    def __init__(self, once: bool) -> None:
        import jax
        import numpy as np
        from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

        # not jax.make_mesh: it refuses GPUs of several hosts
        mesh = Mesh(np.array(jax.devices()), ("all",), axis_types=(AxisType.Auto,))
        self._split = NamedSharding(mesh, PartitionSpec("all"))
        self._sum = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._once = once
        self._cast: list[Any] = []  # outcomes that were not looked at

    def cast(self, flag: bool, now: bool) -> bool:
        import jax
        import numpy as np

        vote, shape = np.full(1, flag, np.int32), (jax.device_count(),)
        with jax.transfer_guard_host_to_device("allow"):
            votes = jax.make_array_from_callback(shape, self._split, lambda _: vote)
        self._cast.append(self._sum(votes))
        ready, self._cast = (self._cast, []) if now else (self._cast[:-1], self._cast[-1:])
        found = any(int(jax.device_get(outcome)) for outcome in ready)
        if found and self._once:
            self._cast = []
        return found


def whole(tree: Any) -> Any:
    """Arrays that all processes hold together, as whole ones on one device of each. All call it."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    def gather(x: Any) -> Any:
        everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())
        return jax.jit(lambda x: x, out_shardings=everywhere)(x).addressable_data(0)

    return jax.tree.map(gather, tree)


def in_all(error: E) -> E:
    """Mark an error that every process raises, so that none takes another's for a failure."""
    error.in_all = True  # type: ignore[attr-defined]
    return error


@contextlib.contextmanager
def shared(last: bool = False) -> Iterator[None]:
    """What all processes do: an error in one is told to the others, which end with exit code 7.

    One that no user can have caused may be what a collective says about a dead peer: the heartbeat
    knows that within seconds, and ends this process with the cause. `last`: nothing comes after it.
    """
    if count() == 1:
        yield
        return
    try:
        yield
        if last:
            leave()
    except LocaltrainError as error:
        if getattr(error, "in_all", False):
            leave()
        else:
            heartbeat.tell(error.exit_code, str(error))
        raise
    except Exception as error:
        heartbeat.settle()
        first = " ".join(str(error).split())[:300]
        heartbeat.tell(1, f"{type(error).__name__}: {first}")
        raise


def leave() -> None:
    """The end of a run of several processes: wait for all, then nobody watches any more."""
    if count() > 1:
        barrier("end")
        heartbeat.close()
