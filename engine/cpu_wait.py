"""How torch's CPU threads wait for one another."""

from __future__ import annotations

from collections.abc import MutableMapping

#: Turns of a waiting loop before a thread sleeps; OpenMP's own 300,000 take milliseconds. Two threads
#: on two cores, 16 rows through sixteen 2048 x 2048 products: beside three busy processes 1,100 to
#: 1,560 ms with 300,000, 400 to 430 ms with 20,000. On free cores 300,000 took 29 ms, 10,000 took 31.
#: Fewer turns help more beside others (1,000: 55 to 136 ms), but then short products of free cores
#: begin with a thread to be woken: a step of the checkpoint that ships takes a third longer.
SPIN_TURNS = 20_000


def wait_briefly(environ: MutableMapping[str, str]) -> None:
    """Have threads that share a product sleep soon while they wait for the last of them.

    Where other processes want the cores, a thread that is done otherwise spins for its whole time
    slice, on the core that the last one needs, at the end of every product. The OpenMP that torch
    brings on Linux reads this when it is loaded, so it is said before torch is imported. What the
    user's environment says of waiting stays.

    Args:
        environ: the process's environment; changed.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", str(SPIN_TURNS))
