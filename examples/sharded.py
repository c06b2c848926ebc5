"""Trains a language model on a mesh of eight devices, and goes on on another mesh.

In one process, and then in two:

```bash
python -m examples.sharded RUN --data 2 --steps 20
python -m examples.sharded RUN --data 4 --steps 40 --processes 2
```

The devices are virtual, so that all of it runs on any CPU. The second command starts
both processes itself. A cluster would start one on each machine, with `--coordinator`
and `--process`.
"""

import argparse
import socket
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array

import eqx_ckpt

from .language import init, learn, load_text, take_batch, Training


device_count = 8
# Where weights go, by their names, and Adam's averages of them; the rest is replicated.
rules = {
    "(query_proj|key_proj|value_proj|widen)/weight$": P("model", None),
    "(output_proj|narrow)/weight$": P(None, "model"),
    "": P(),
}


def make_mesh(data: int) -> Mesh:
    """All devices: the batch is cut into `data` parts, and the weights for the rest."""
    shape = (data, device_count // data)
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def make_like(mesh: Mesh) -> Training:
    """A skeleton whose leaves say where on the mesh they go. It takes no memory."""
    skeleton = eqx.filter_eval_shape(init, jax.random.key(0))
    return eqx_ckpt.shard_like(skeleton, rules, mesh)


def put(training: Training, like: Training) -> Training:
    """The same, with every array where the skeleton says."""
    arrays, others = eqx.partition(training, eqx.is_array)
    shardings = jtu.tree_map(lambda leaf: getattr(leaf, "sharding", None), like)
    return eqx.combine(eqx.filter_shard(arrays, shardings), others)


@eqx.filter_jit
def start(like: Training) -> Training:
    return put(init(jax.random.key(0)), like)


@eqx.filter_jit(donate="all")
def train_step(training: Training, like: Training) -> tuple[Training, Array]:
    batch = take_batch(training, jnp.asarray(load_text()))
    mesh = like["step"].sharding.mesh
    batch = eqx.filter_shard(batch, NamedSharding(mesh, P("data")))
    training, loss = learn(training, batch)
    return put(training, like), loss


def train(run: Path, data: int, steps: int, save_every: int) -> None:
    """Trains until `steps` are done, from the newest checkpoint in `run` if it has one.

    Every process calls this, with the same arguments. So all of them call `latest`,
    `restore`, `should_save` and `save`, where they wait for each other.

    **Arguments:**

    - `run`: a directory for the checkpoints, which all processes share.
    - `data`: the size of the mesh's axis `data`.
    - `steps`: how many steps the training has in all.
    - `save_every`: how many steps to take from one save to the next.
    """
    like = make_like(make_mesh(data))
    with eqx_ckpt.CheckpointManager(run) as manager:
        if manager.latest() is None:
            training = start(like)
        else:
            training = manager.restore(like)
            say(f"goes on from step {int(training['step'])}")

        for step in range(int(training["step"]) + 1, steps + 1):
            training, loss = train_step(training, like)
            loss = float(loss)  # This waits for the step.
            ends = step == steps or manager.should_save(step)
            if ends or step % save_every == 0:
                # Each process writes its part, in the background.
                manager.save(step, training, metadata={"loss": loss})
                say(f"step {step}: loss {loss:.4f}")
            if ends:
                break

        # Any mesh will do: with all devices on one axis, or on the other.
        for other in (1, device_count):
            again = manager.restore(make_like(make_mesh(other)))
            same = eqx.filter_jit(eqx.tree_equal)(training, again)
            say(f"restored with data={other}: the same to the bit: {bool(same)}")


def say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def start_processes(count: int) -> int:
    """Runs this command in `count` processes; 0 if all of them succeed."""
    with socket.socket() as reserved:
        # Nobody else is given this port, and process 0 may listen there.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{reserved.getsockname()[1]}"
        command = [sys.executable, "-m", "examples.sharded", *sys.argv[1:]]
        command += ["--coordinator", coordinator, "--process"]
        processes = [subprocess.Popen([*command, str(i)]) for i in range(count)]
        return max([abs(process.wait()) for process in processes])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.sharded")
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, help="which of them this is")
    parser.add_argument("--coordinator", help="host:port of process 0")
    args = parser.parse_args()
    if args.processes > 1 and args.process is None:
        sys.exit(start_processes(args.processes))
    # Before anything else that JAX does.
    jax.config.update("jax_num_cpu_devices", device_count // args.processes)
    if args.processes > 1:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    train(args.run, args.data, args.steps, args.save_every)


if __name__ == "__main__":
    main()
