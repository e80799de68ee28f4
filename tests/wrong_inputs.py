"""Wrong inputs of users, each with its message: `python -m tests.wrong_inputs` prints the table.

A row is what a user writes, and a function that does it. `test_wrong_inputs` checks that each gives an error or a
warning of autoshard, not longer than a paragraph, with the words that the row expects.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from autoshard import Plan, auto_shard, operator, plan, propagate, replace_kernels
from autoshard.ckpt import Checkpointer
from autoshard.cli import main as command
from autoshard.errors import AutoshardError, AutoshardWarning

S = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class WrongInput:
    """What a user writes, what does it, and words that the message must have."""

    text: str
    run: Callable[[], Any]
    words: tuple[str, ...]


ROWS: list[WrongInput] = []


def row(text: str, *words: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Adds a row to the table."""

    def add(run: Callable[[], Any]) -> Callable[[], Any]:
        ROWS.append(WrongInput(text, run, words))
        return run

    return add


def step(state: Any, batch: Any) -> Any:
    """One step of a small MLP."""

    def loss(params: Any) -> jax.Array:
        return jnp.mean((jax.nn.gelu(batch @ params["up"]) @ params["down"] - batch) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def state(width: int = 64) -> dict[str, jax.Array]:
    return {"up": jnp.ones((width, 4 * width)), "down": jnp.ones((4 * width, width))}


def batch(rows: int = 32, width: int = 64) -> jax.Array:
    return jnp.ones((rows, width))


def planned(**options: Any) -> Any:
    return plan(step, state(), batch(), **options)


def message_of(wrong: WrongInput) -> str:
    """What a user sees: an error's class and text, a warning, or the last lines on stderr of a command."""
    err, out = io.StringIO(), io.StringIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AutoshardWarning)
        try:
            with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
                code = wrong.run()
        except AutoshardError as error:
            return f"{type(error).__name__}: {error}"
        except Exception as error:  # of any other type: the test of this row fails with it, and the table prints it
            return f"not ours: {type(error).__name__}: {error}"
    told = [f"{type(w.message).__name__}: {w.message}" for w in caught if isinstance(w.message, AutoshardWarning)]
    if told:
        return "\n".join(told)
    return f"exit {code}: {err.getvalue().strip()}" if isinstance(code, int) and code else "nothing"


# Requested plans


@row('plan="fdsp:8"', "Did you mean 'fsdp:8'?")
def _() -> Any:
    return planned(plan="fdsp:8")


@row('plan="zero3:8"', "Did you mean 'fsdp:8'?")
def _() -> Any:
    return planned(plan="zero3:8")


@row('plan="fsdp"', "fsdp:8")
def _() -> Any:
    return planned(plan="fsdp")


@row('plan=""', "fsdp:8")
def _() -> Any:
    return planned(plan="")


@row('plan="fsdp:16" on 8 devices', "16", "8")
def _() -> Any:
    return planned(plan="fsdp:16")


@row('plan="dp:2 dp:4"', "twice")
def _() -> Any:
    return planned(plan="dp:2 dp:4")


@row('plan="ep:8" without experts', "ep")
def _() -> Any:
    return planned(plan="ep:8")


@row('plan="dp:8 seq" on an MLP', "seq", "tp")
def _() -> Any:
    return planned(plan="dp:8 seq")


@row('plan="dp:8" with a batch of 7', "7", "8")
def _() -> Any:
    return plan(step, state(), batch(7), plan="dp:8")


@row('plan="dp:8" with a batch of 12', "12")
def _() -> Any:
    return plan(step, state(), batch(12), plan="dp:8")


@row('plan={"tp": ["ffm"]} with mesh={"tp": 8}', "ffm", "Did you mean 'ffn'?")
def _() -> Any:
    return planned(plan={"tp": ["ffm"]}, mesh={"tp": 8})


@row('plan={} with mesh={"tp": 8}', "tp")
def _() -> Any:
    return planned(plan={}, mesh={"tp": 8})


@row('plan="tp:8 tp-fnn"', "fnn")
def _() -> Any:
    return planned(plan="tp:8 tp-fnn")


@row('plan="fsdp:4 tp:2" with mesh={"data": 8}', "data")
def _() -> Any:
    return planned(plan="fsdp:4 tp:2", mesh={"data": 8})


@row('plan=planned, a plan of tp:8, with mesh={"data": 8}', "'tp': 8", "'data': 8")
def _() -> Any:
    return auto_shard(step, plan=planned(plan="tp:8"), mesh={"data": 8})


@row('plan=planned, a plan for cpu:8, with target="v5e:2x4"', "cpu:8", "v5e:2x4")
def _() -> Any:
    return planned(plan=planned(plan="tp:8"), target="v5e:2x4")


@row("plan=planned with memory_limit_bytes=1000 and verify=2", "memory_limit_bytes=1000", "verify=2", "plan='tp:8'")
def _() -> Any:
    return planned(plan=planned(plan="tp:8"), memory_limit_bytes=1000, verify=2)


@row("planned.bind(step, state, batch, measure=2)", "measure=2")
def _() -> Any:
    return planned(plan="tp:8").bind(step, state(), batch(), measure=2)


@row("plan=planned.to_json(), a text", "Plan.from_json")
def _() -> Any:
    return planned(plan=planned(plan="tp:8").to_json())


@row("variants=[1, 2]", "variants is [1, 2]")
def _() -> Any:
    numbers: Any = [1, 2]
    return auto_shard(step, variants=numbers)


@row('variants={"remat": True}', "variants", "[True]")
def _() -> Any:
    return planned(variants={"remat": True})


@row('variants={"remat": [True, False]} of a step without remat', "variants", "'remat'", "state, batch")
def _() -> Any:
    return planned(variants={"remat": [True, False]})


# Habits from `jax.jit`


def sharded(*args: Any, **options: Any) -> Any:
    return auto_shard(*args, **options)


@row('auto_shard(step, "fsdp:8")', "plan='fsdp:8'")
def _() -> Any:
    return sharded(step, "fsdp:8")


@row('auto_shard(step, {"data": 8})', "mesh=")
def _() -> Any:
    return sharded(step, {"data": 8})


@row("auto_shard(step, state, batch)", "auto_shard(step)(state, batch)")
def _() -> Any:
    return sharded(step, state(), batch())


@row('auto_shard(step, static_argnames="train")', "static_argnums")
def _() -> Any:
    return sharded(step, static_argnames="train")


@row('@auto_shard(donate_argnames="state")', "donate_argnums")
def _() -> Any:
    return sharded(donate_argnames="state")


@row('auto_shard(step, in_shardings=P("data"))', "fixed=", "plan=")
def _() -> Any:
    return sharded(step, in_shardings=P("data"))


@row("plan(step, state, batch, out_shardings=None)", "fixed=", "plan=")
def _() -> Any:
    return planned(out_shardings=None)


@row("plan(state, batch), without the function", "Pass the function first")
def _() -> Any:
    forgotten: Any = state()
    return plan(forgotten, batch())


@row("auto_shard(step, example=state)", "as a tuple, such as (state, batch)")
def _() -> Any:
    return sharded(step, example=state())


@row("a step that is async", "asynchronous", "`def`")
def _() -> Any:
    async def later(state: Any, batch: Any) -> Any:
        return step(state, batch)

    return auto_shard(later)(state(), batch())


@row("replace_kernels(3)", "takes a function, got int 3")
def _() -> Any:
    number: Any = 3
    return replace_kernels(number)


# Machines


@row('target="v5pp:4x4x4"', "v5p")
def _() -> Any:
    return planned(target="v5pp:4x4x4")


@row('target="h100:x"', "shape", "x")
def _() -> Any:
    return planned(target="h100:x")


@row('target="v5e"', "v5e:")
def _() -> Any:
    return planned(target="v5e")


@row('target="v5e:3x5" with a batch of 32', "15")
def _() -> Any:
    return planned(target="v5e:3x5")


@row('target="h100:8", called on CPU devices', "h100", "cpu")
def _() -> Any:
    return auto_shard(step, target="h100:8")(state(), batch())


@row('mesh={"data": 16} on 8 devices', "16", "8")
def _() -> Any:
    return auto_shard(step, mesh={"data": 16})(state(), batch())


@row('mesh={"data": 4} on 8 devices', "4", "8")
def _() -> Any:
    return auto_shard(step, mesh={"data": 4})(state(), batch())


@row('mesh={"data": 0}', "0")
def _() -> Any:
    return planned(mesh={"data": 0})


@row('mesh="data:8"', "mesh")
def _() -> Any:
    return planned(mesh="data:8")


@row("memory_limit_bytes=1000 of a step that needs more", "1_000 bytes", "activations")
def _() -> Any:
    return planned(memory_limit_bytes=1000)


@row("memory_limit_bytes=-1", "-1")
def _() -> Any:
    return planned(memory_limit_bytes=-1)


@row('memory_limit_bytes="16GB"', "16GB")
def _() -> Any:
    return planned(memory_limit_bytes="16GB")


# Fixed shardings and explanations


@row('fixed={"0/upp": P("tp")} of an input 0/up', "upp", "up")
def _() -> Any:
    return planned(fixed={"0/upp": P("tp")}, plan="tp:8")


@row('fixed={"state.up": P("tp")} of an input state/up', "Similar paths: state/up")
def _() -> Any:
    return planned(fixed={"state.up": P("tp")})


@row("""fixed={"['up']": P("tp")} of an input state/up""", "Similar paths: state/up")
def _() -> Any:
    return planned(fixed={"['up']": P("tp")})


@row('fixed={"0/up": P("model")} under plan="tp:8"', "model", "tp")
def _() -> Any:
    return planned(fixed={"0/up": P("model")}, plan="tp:8")


@row('fixed={"0/up": P("tp", None, None)} of a matrix', "0/up", "2")
def _() -> Any:
    return planned(fixed={"0/up": P("tp", None, None)}, plan="tp:8")


@row('fixed={"0/up": P("tp", "tp")}, one axis twice', "twice")
def _() -> Any:
    return planned(fixed={"0/up": P("tp", "tp")}, plan="tp:8")


@row('fixed={"0/up": P("tp")} of 65 rows on 8 devices', "65")
def _() -> Any:
    wide = {"up": jnp.ones((65, 256)), "down": jnp.ones((256, 65))}
    return plan(step, wide, batch(32, 65), fixed={"0/up": P("tp")}, plan="tp:8")


@row('planned.explain("upp") of an input state/up', "upp", "up")
def _() -> Any:
    return planned(plan="tp:8").explain("upp")


@row('planned.to_html("missing/plan.html")', "missing/plan.html", "a folder that exists")
def _() -> Any:
    return planned(plan="tp:8").to_html("missing/plan.html")


@row('propagate(..., in_specs=(P("dat"),), mesh={"data": 8})', "argument 0", "'dat'", "'data'")
def _() -> Any:
    return propagate(jnp.sum, batch(), in_specs=(P("dat"),), mesh={"data": 8})


@row('propagate(..., in_specs=("data",), mesh={"data": 8})', "P('data')")
def _() -> Any:
    return propagate(jnp.sum, batch(), in_specs=("data",), mesh={"data": 8})


# Arguments and results


@row("a step that returns its state with another dtype, donated", "up", "bfloat16")
def _() -> Any:
    def cast(s: Any, b: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), step(s, b)[0]), 0.0

    return auto_shard(cast, donate_argnums=0)(state(), batch())


@row("a step that drops a leaf of its state, donated", "down")
def _() -> Any:
    return auto_shard(lambda s, b: ({"up": step(s, b)[0]["up"]}, 0.0), donate_argnums=0)(state(), batch())


@row("donate_argnums=5 of two arguments", "5", "0 (state), 1 (batch)")
def _() -> Any:
    return auto_shard(step, donate_argnums=5)(state(), batch())


@row('donate_argnums="state"', "'state'", "0 (state), 1 (batch)")
def _() -> Any:
    name: Any = "state"
    return auto_shard(step, donate_argnums=name)


@row("a generator as an argument", "'batches'", "generator", "list")
def _() -> Any:
    return auto_shard(lambda s, batches: s)(state(), (batch() for _ in range(3)))


@row("static_argnums=1 with an array", "hash")
def _() -> Any:
    return auto_shard(step, static_argnums=1)(state(), batch())


@row("a donated state used again", "donat")
def _() -> Any:
    train, first = auto_shard(step, donate_argnums=0, plan="fsdp:8"), None
    first = train.init(state) if train.plan(state(), batch()) else None
    train(first, batch())
    return train(first, batch())


@row("None in place of a batch", "None")
def _() -> Any:
    train = auto_shard(step, plan="fsdp:8")
    train(state(), batch())
    return train(state(), None)


@row("an argument of strings", "array of text (<U1)", "a tuple of its items")
def _() -> Any:
    return auto_shard(step)(state(), np.array(["a", "b"]))


@row("arrays in host memory and on the device, added", "host")
def _() -> Any:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return auto_shard(lambda s, b: s + b)(jax.device_put(batch(), place), batch())


@row("if batch.sum() > 0: inside a step", "argument batch", "wrong_inputs.py")
def _() -> Any:
    def positive(state: Any, batch: Any) -> Any:
        return state if batch.sum() > 0 else batch

    try:
        return auto_shard(positive)(batch(), batch())
    except jax.errors.TracerBoolConversionError as error:  # it is JAX's own, with the names of the user's function
        raise AutoshardError(" ".join(str(error).split())) from error


@row("auto_shard(step).init(create) before a plan", "plan")
def _() -> Any:
    return auto_shard(step).init(state)


@row("auto_shard(step).init(create) of another state than was planned", "up")
def _() -> Any:
    train = auto_shard(step)
    train.plan(state(), batch())
    return train.init(lambda: {"up": jnp.ones(3)})


def planned_step() -> Any:
    train = auto_shard(step, plan="dp:8")
    train.plan(state(), batch())
    return train


@row(
    "auto_shard(step).init(state), a state in place of a function",
    "function that creates the state",
    "init(create_state",
)
def _() -> Any:
    return planned_step().init(state())


@row("auto_shard(step).init(create) that returns a state and a number", "'1' is none")
def _() -> Any:
    return planned_step().init(lambda: (state(), jnp.zeros(())))


@row("auto_shard(step).shard_batch(lists of numbers)", "'batch' is one array", "np.asarray")
def _() -> Any:
    return planned_step().shard_batch([[1.0] * 64] * 32)


@row("Plan.jit()(batch, state), in the wrong order", "'state/up'", "pass those that were planned")
def _() -> Any:
    return planned(plan="tp:8").jit()(batch(), state())


@row("an operator without a rule, strict=True", "no rule", "unknown")
def _() -> Any:
    from jax.extend.core import Primitive  # noqa: PLC0415

    unknown = Primitive("unknown")
    unknown.def_abstract_eval(lambda x: x)
    unknown.def_impl(np.asarray)  # which cannot be traced
    return plan(lambda x: unknown.bind(x) * 2, batch(), strict=True)


@row('@operator("b s -> b") of a function of a matrix that returns a matrix', "b s")
def _() -> Any:
    return plan(operator("b s -> b")(lambda x: x * 2), batch())


@row("plan(..., verify=-1)", "-1")
def _() -> Any:
    return planned(verify=-1)


@row("a plan from JSON for another program", "another program")
def _() -> Any:
    return Plan.from_json(planned(plan="fsdp:8").to_json()).bind(step, state(32), batch(32, 32))


@row("Plan.from_json of JSON that is no plan", "not a plan")
def _() -> Any:
    return Plan.from_json(json.dumps({"mesh": 3}))


@row('Plan.from_json("plan.json"), the name of a file', "read_text()")
def _() -> Any:
    return Plan.from_json("plan.json")


@row("Plan.from_json({...}), a dict", "dict", "Plan.to_json()")
def _() -> Any:
    table: Any = {"mesh": 3}
    return Plan.from_json(table)


@row("Plan.from_json(...).jit()", "bind")
def _() -> Any:
    return Plan.from_json(planned(plan="fsdp:8").to_json()).jit()


# Checkpoints


def saved(folder: str) -> Checkpointer:
    checkpoints = Checkpointer(Path(folder) / "run")
    checkpoints.save(3, {"w": jnp.ones((4, 8)), "b": jnp.zeros(8)}, block=True)
    return checkpoints


@row("restore(step=7) where there is step 3", "7", "3")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return saved(folder).restore(7, like={"w": jnp.ones((4, 8)), "b": jnp.zeros(8)})


@row("restore into another shape", "w", "4")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return saved(folder).restore(like={"w": jnp.ones((4, 16)), "b": jnp.zeros(8)})


@row("restore into another structure", "bias")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return saved(folder).restore(like={"w": jnp.ones((4, 8)), "bias": jnp.zeros(8)})


@row("restore(state), without like=", "like=state")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        like: Any = {"w": jnp.ones((4, 8)), "b": jnp.zeros(8)}
        return saved(folder).restore(like)


@row('restore(like=..., shardings={"w": ...}) of a state with w and b', "'b' has no sharding")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        like = {"w": jnp.ones((4, 8)), "b": jnp.zeros(8)}
        return saved(folder).restore(like=like, shardings={"w": jax.devices()[0]})


@row("Checkpointer.prune(2)", "RetentionPolicy(last=2)")
def _() -> Any:
    number: Any = 2
    with tempfile.TemporaryDirectory() as folder:
        return saved(folder).prune(number)


@row('Checkpointer("s3://bucket/run")', "s3://", "gs://")
def _() -> Any:
    return Checkpointer("s3://bucket/run")


@row("restore(like=..., shardings=plan)", "plan.in_shardings()[0]")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        like = {"w": jnp.ones((4, 8)), "b": jnp.zeros(8)}
        return saved(folder).restore(like=like, shardings=planned(plan="fsdp:8"))


@row("restore(like=..., shardings=step), a function under auto_shard", "step.plan(state, batch).in_shardings()[0]")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return saved(folder).restore(like={"w": jnp.ones((4, 8)), "b": jnp.zeros(8)}, shardings=auto_shard(step))


@row("restore from an empty folder", "no checkpoint")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return Checkpointer(folder).restore(like={"w": jnp.ones(2)})


@row("save of a step 3 that exists", "3")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return saved(folder).save(3, {"w": jnp.ones(2)}, block=True)


# The command


def run(*arguments: str) -> int:
    return command(list(arguments))


@row("autoshard tarin", "train")
def _() -> Any:
    return run("tarin")


@row("autoshard train --presett quick", "--preset")
def _() -> Any:
    return run("train", "--presett", "quick")


@row("autoshard train --data missing.txt", "missing.txt")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return run("train", "--data", f"{folder}/missing.txt", "--run-dir", f"{folder}/run")


@row("autoshard train --plan fsdp:3 on 8 devices", "3", "8")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return run("train", "--preset", "quick", "--plan", "fsdp:3", "--run-dir", f"{folder}/run")


@row("autoshard train --target h100:8 on a CPU", "--target", "cpu")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return run("train", "--preset", "quick", "--target", "h100:8", "--run-dir", f"{folder}/run")


@row("autoshard train --model json:loads, which needs a text", "json:loads", "s", "rngs, vocab, context")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return run("train", "--model", "json:loads", "--run-dir", f"{folder}/run")


@row("autoshard train --resume of a folder without a run", "run")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return run("train", "--resume", "--run-dir", f"{folder}/run")


@row("autoshard plan lama-7b", "Did you mean llama-7b", "--model package.module:factory")
def _() -> Any:
    return run("plan", "lama-7b")


@row("autoshard plan llama-tiny --target v5e:2x4 --explain wqq", "wqq")
def _() -> Any:
    return run("plan", "llama-tiny", "--target", "v5e:2x4", "--explain", "wqq")


@row("autoshard ckpt ls nowhere", "nowhere")
def _() -> Any:
    return run("ckpt", "ls", "/tmp/nowhere-at-all")


@row("autoshard generate of a folder without checkpoints", "inference.json")
def _() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return run("generate", folder, "--prompt", "a")


@row('offload="optimizer@::2"', "moves as a whole", "Write 'optimizer'")
def _() -> Any:
    return planned(offload="optimizer@::2")


@row('offload="mlpwo" in a step without that value', "MaxText's name of mlp_out", "does not have")
def _() -> Any:
    return planned(offload="mlpwo")


@row('offload="optimizer" of SGD', "moves nothing to the host", "without moments, as in SGD, there is none")
def _() -> Any:
    return planned(offload="optimizer")


@row('compiler_options={"xla_own": None}', "compiler_options['xla_own'] is None", "leave the option out")
def _() -> Any:
    return planned(compiler_options={"xla_own": None})


@row("autoshard plan gpt-tiny --offload optimizer, with a comma at the end", "it has an empty word")
def _() -> Any:
    return run("plan", "gpt-tiny", "--target", "cpu:8", "--offload", "optimizer,")


@row("autoshard rules --coverage nomodule:f", "nomodule")
def _() -> Any:
    return run("rules", "--coverage", "nomodule:f")


@row("autoshard rules --coverage tests/wrong_inputs.py:step, a file", "tests.wrong_inputs:step")
def _() -> Any:
    return run("rules", "--coverage", "tests/wrong_inputs.py:step")


@row("autoshard rules dot_genral", "did you mean 'dot_general'")
def _() -> Any:
    return run("rules", "dot_genral")


def main() -> None:
    """Print the table, as on 8 virtual CPU devices."""
    jax.config.update("jax_platforms", "cpu")
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}=8".strip()
    for number, wrong in enumerate(ROWS, 1):
        print(f"{number:3}  {wrong.text}\n     {message_of(wrong)}\n")


if __name__ == "__main__":
    main()
