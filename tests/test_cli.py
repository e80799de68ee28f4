"""The command line: help needs no device, and each mistake is reported in one line."""

import contextlib
import io
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autoshard.ckpt import Checkpointer
from autoshard.cli import COMMANDS, main
from autoshard.commands.absent_accelerators import skip_absent_accelerators
from autoshard.commands.arguments import check_writable
from autoshard.commands.plan import show
from autoshard.commands.plan_options.verification import verification
from autoshard.errors import AutoshardWarning, ConfigError
from autoshard.sharding.audit import aot_compile
from autoshard.train.config.run_directory import CHECKPOINTS, write_config

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-m", "autoshard.cli", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_help_imports_no_heavy_package_and_needs_no_device(run_python) -> None:
    found = run_python(
        "import sys; from autoshard.cli import main; assert main(['--help']) == 0\n"
        "assert not {'jax', 'flax', 'numpy'} & set(sys.modules), 'help imported a heavy package'"
    )
    assert found.returncode == 0, found.stderr
    assert all(command in found.stdout for command in COMMANDS) and "example:" in found.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"example: autoshard {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'? The commands are: train, launch, plan"),
        (["--presett"], "unknown option '--presett'. The commands are: train, launch, plan"),
        (["train", "--preset", "quik"], "did you mean quick"),
        (
            ["train", "--stps", "3"],
            "error: unknown option --stps: did you mean --steps? `autoshard train --help` lists the options",
        ),
        (["train", "-x"], "error: unknown option -x; `autoshard train --help` lists the options"),
        (["train", "stray"], "error: unexpected argument 'stray'; `autoshard train --help` shows the usage"),
        (["train", "--steps"], "error: --steps has no value; `autoshard train --help` says what it takes"),
        (["train", "--gpt.norm", "rms"], "error: --gpt.norm is 'rms'; it must be 'rmsnorm' or 'layernorm'"),
        (["plan", "gpt-tiny", "--traget=cpu:8"], "unknown option --traget: did you mean --target? `autoshard plan --h"),
        (
            ["plan", "gpt-tiny", "--target", "v6e:2x4", "--verify", "0", "--compiler-options", "fastest"],
            "compiler_options: there is no option set 'fastest'; the sets of v6e are no-collective-matmul",
        ),
        (
            ["plan", "gpt-tiny", "--target", "cpu:8", "--offload", "residual@2"],
            "offload has 'residual@2'; write a name and a slice over layers, such as 'residual@::2' for every",
        ),
        (["plan", "--overlap", "wq"], "overlap has 'wq'; write PATH:KIND=on or off, such as 'experts/*:gather=off'"),
        (
            ["plan", "gpt-tiny", "--target", "cpu:8", "--remat", "none", "--overlap", "experts/*:gather=off"],
            "overlap 'experts/*' names no parameter. The parameters are state/params/",
        ),
        (["plan", "gpt-tiny", "stray"], "error: unexpected argument 'stray'; `autoshard plan --help` shows the usage"),
        (["plan", "gpt-tiny", "--target"], "error: --target has no value; `autoshard plan --help` says what it takes"),
        (
            ["plan", "gpt-tiny", "--target", "cpu:8", "--plan", "dp:7"],
            "plan 'dp:7' takes 7 devices, but cpu:8 has 8; request 'dp:8', or plan for a target of 7 devices",
        ),
        (["plan", "time:time"], "plan 'time:time': 'time' returns float; it should return (fn, args)"),
        (
            ["plan", "json:loads"],
            "missing 1 required positional argument: 's'. Name a function that returns (fn, args)",
        ),
        (["train", "--data", "nowhere.txt"], "'nowhere.txt' does not exist"),
        (["train", "--freeze", "nothing"], "--freeze nothing: no parameter matches"),
        (["plan", "--mesh", "data"], "such as data=4,model=2"),
        (["rules", "no_such_operator"], "'no_such_operator'"),
        (["rules", "--operators", "dot_general"], "'dot_general'"),
        (["rules", "--json", "--markdown"], "--markdown cannot be combined with --json; leave one of them out"),
        (["rules", "--coverage", "example"], "write module:function, such as train:example"),
        (["rules", "--coverage", "json:no_such"], "module 'json' has no function 'no_such'"),
        (
            ["rules", "--coverage", "no_such_module:f"],
            "cannot be imported: ModuleNotFoundError",
        ),
        (["rules", "--coverage", "json:loads"], "'loads' cannot be called without arguments: TypeError"),
        (["rules", "--coverage", "time:time"], "'time' returns float; it should return (fn, args)"),
        (["rules", "--coverage", "time:time", "exp"], "--coverage cannot be combined with a name"),
        (["generate", "org/model"], "pretrained model. For a model of the Hub, run `hf download org/model --local-dir"),
        (["ckpt", "ls", "nowhere"], "'nowhere' does not exist: give the folder of a run or of checkpoints"),
        (["ckpt"], "ACTION is missing; `autoshard ckpt --help` shows an example"),
        (["ckpt", "lst"], "ACTION is 'lst'; it must be 'ls' or 'describe' or"),
        (["ckpt", "lst"], "; did you mean 'ls'?"),
        (["ckpt", "ls", "nowhere", "--jsn"], "unknown option --jsn: did you mean --json? `autoshard ckpt ls --help`"),
        (["ckpt", "diff"], "A[@STEP], B[@STEP] are missing; `autoshard ckpt diff --help` shows an example"),
        (["generate"], "FOLDER is missing; `autoshard generate --help` shows an example"),
        (["generate", "nowhere", "--tokens", "x"], "--tokens is 'x'; it must be a whole number"),
        (["generate", "nowhere", "--tokens", "-5"], "--tokens is -5; it must not be negative"),
        (
            ["generate", "nowhere", "--temperature", "-1", "--top-k", "0"],
            "--temperature is -1.0; it must be at least 0",
        ),
        (["generate", "nowhere", "--temperature", "nan"], "--temperature is nan"),
        (["generate", "nowhere", "--top-k", "0"], "--top-k is 0; it must be at least 1"),
        (
            ["train", "--data", __file__, "--run-dir", "/proc/no/such/folder"],
            "'/proc/no/such/folder' cannot be written to",
        ),
        (["plan", "--batch-size", "0"], "error: batch_size is 0; it must be at least 1"),
        (["plan", "--gpt.dropout", "nan"], "error: GPTConfig: dropout is nan"),
        (["plan", "--optimizer.learning-rate", "nan"], "learning_rate is nan; it must be at least 0 and finite"),
        (["plan", "--json", "no/such/plan.json"], "--json 'no/such/plan.json' cannot be written: No such file"),
        (["plan", "gpt-tiny", "--html", "."], "--html '.' cannot be written: Is a directory"),
        (["plan", "gpt-tiny", "--html", "-"], "a page cannot be printed. Name a file, such as plan.html"),
        (["plan", "gpt-tiny", "--batch-size", "-4"], "error: gpt-tiny: batch_size is -4; it must be at least 1"),
        (["plan", "gpt-tiny", "--set", "layers=abc"], "error: gpt-tiny: layers is 'abc'; it must be a whole number"),
        (["plan", "gpt-tiny", "--set", "layers=true"], "layers is True; it must be a whole number"),
        (["plan", "gpt-tiny", "--set", "layers=False"], "layers is False; it must be a whole number"),
        (
            ["plan", "gpt-tiny", "--set", "bias=5", "--set", "remat=5"],
            "bias is 5; it must be true or false; remat is 5",
        ),
        (["plan", "gpt-tiny", "--offload", "residul"], "error: offload is 'residul'; 'residul' is not a named value"),
        (["plan", "gpt-tiny", "--offload", "qkv", "--remat", "full"], "offload is 'qkv' and remat is 'full'; both say"),
        (["plan", "wide-resnet-tiny", "--offload", "qkv"], "the layers of wide-resnet-tiny have no named values"),
        (
            ["plan", "gpt-tiny", "--offload", "auto+optimizer"],
            "'auto' must stand alone. 'auto' may move the optimizer's",
        ),
        (["plan", "gpt-tiny", "--offload", "residual@1:"], "or write the layers out with --set scan_layers=False"),
        (["plan", "gpt-tiny", "--plan", "pp:2", "--offload", "qkw"], "'qkw' is not a named value"),
        (["plan", "gpt-tiny", "--kernels", "on"], "--kernels is 'on'; it must be 'off' or 'auto' or 'require'"),
        (["plan", "--offload", "residul"], "'residul' is not a named value. Give none, auto, optimizer, or names"),
        (["plan", "gpt-tiny", "--set", "norm_eps=NaN"], "norm_eps is nan; it must be a finite number above 0"),
        (["plan", "gpt-tiny", "--set", "bogus=1"], "error: gpt-tiny: GPTConfig has no field 'bogus'"),
        (["plan", "gpt-tiny", "--set", "layers=2", "--set", "layers=4"], "--set names 'layers' twice"),
        (["plan", "moe-tiny", "--set", 'gpt={"layer": 3}'], "gpt: there is no 'layer'; there are vocab, layers"),
        (["plan", "wide-resnet-tiny", "--set", 'stages=[1, "a"]'], "stages[1] is 'a'; it must be a whole number"),
        (["plan", "gpt-tiny", "--fixed", "x=-,tp", "--fixed", "x=tp,-"], "--fixed names 'x' twice: give it once"),
        (["bench", "--calibrate", "no/such/here.toml"], "--calibrate 'no/such/here.toml' cannot be written"),
        (["plan", "--batch-size", "7", "--plan", "dp:8"], "batch 7 is not divisible by dp 8. Pad batch to 8"),
        (["bench", "--rounds", "0"], "--rounds is 0"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("autoshard") and message in error and len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_mistake_is_one_line_where_output_is_not_utf8(capsys: pytest.CaptureFixture) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["plan", "--gpt.layers", "abc"]) == 2
    assert capsys.readouterr().err == "autoshard plan: error: --gpt.layers is 'abc'; it must be a whole number\n"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--explain 0/params/embd", "no input or result is called '0/params/embd'. Similar paths: "),
        ("--explain 1/loss=tp", "'1/loss' is a result, which cannot be fixed"),
        (
            "--explain params/embed=-,model",
            "no plan has a mesh axis 'model'; without --mesh, axes are named pp, dp, zero1, fsdp, cp, ",
        ),
        (
            "--plan model=tp:8 --explain params/embed=-,modle",
            "no plan has a mesh axis 'modle'; without --mesh, axes are named pp, dp, ",
        ),
        (
            "--mesh data=8 --explain params/embed=-,tp",
            "'params/embed=-,tp': no plan has a mesh axis 'tp'; --mesh has data",
        ),
    ],
)
def test_what_cannot_be_explained_is_reported_before_the_search(
    options: str, message: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoshard.plan", None)
    assert main(["plan", "gpt-tiny", "--target", "cpu:8", *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_checking_that_a_file_can_be_written_does_not_change_it(tmp_path: Path) -> None:
    present, absent = tmp_path / "present", tmp_path / "absent"
    present.write_text("kept")
    check_writable("--json", present)
    check_writable("--json", absent)
    assert present.read_text() == "kept" and not absent.exists()


def test_no_command_prints_the_usage(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 2
    assert "usage: autoshard" in capsys.readouterr().out


def test_rules_are_a_table(capsys: pytest.CaptureFixture) -> None:
    assert main(["rules", "dot_general"]) == 0
    assert "dot_general" in capsys.readouterr().out


def test_rules_of_named_operators(capsys: pytest.CaptureFixture) -> None:
    assert main(["rules", "--operators", "rms_norm"]) == 0
    output = capsys.readouterr().out
    assert "rms_norm_grad" in output and "gradients" in output and "dot_general" not in output
    assert main(["rules", "--json", "rms_norm"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["operators"]}
    assert rows["rms_norm"]["rule"] == "a b c, c -> a b c; inside c" and rows["rms_norm"]["gradient"] == "rms_norm_grad"
    factors = {factor["name"]: factor for factor in rows["rms_norm_grad"]["factors"]}
    assert (factors["a"]["kind"], factors["a"]["partial"]) == ("reduce", [None, "sum"])
    assert (factors["c"]["kind"], factors["c"]["inside"]) == ("inside", ["sum"])


def test_rules_as_json_and_markdown(capsys: pytest.CaptureFixture) -> None:
    assert main(["rules", "--json", "dot_general"]) == 0
    (row,) = (r for r in json.loads(capsys.readouterr().out)["primitives"] if r["name"] == "dot_general")
    assert row["checked"] is True and row["rule"].startswith("b m k, b k n -> b m n; reduce k")
    assert main(["rules", "--markdown", "pure_callback"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("# Rules") and "| `pure_callback` | runs Python on the host of one device" in page


COVERED = """
import jax, jax.numpy as jnp, numpy as np

def step(w, x):
    return jax.pure_callback(np.sin, x, x) @ w

def covered():
    return jnp.matmul, (jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.float32))

def uncovered():
    return step, (jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32))

def untraceable():
    return step, (jnp.ones((3, 4)), jnp.ones((4, 8)))
"""


def test_rules_coverage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "covered_example.py").write_text(COVERED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["rules", "--coverage", "covered_example:covered"]) == 0
    assert "each with a rule" in capsys.readouterr().out
    assert main(["rules", "--coverage", "covered_example:uncovered"]) == 1
    output = capsys.readouterr().out
    assert "1 without a rule" in output and "pure_callback: runs Python" in output and "covered_example.py:5" in output
    assert main(["rules", "--coverage", "covered_example:untraceable"]) == 2
    assert "cannot be traced: TypeError" in capsys.readouterr().err


OWN_STEP = """
import jax, jax.numpy as jnp

def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - x) ** 2))(w)

def example():
    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    return jax.jit(step, donate_argnums=0), shapes
"""


def test_plan_of_an_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "own_step.py").write_text(OWN_STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    options = ["--target", "cpu:4", "--plan", "fsdp:4", "--explain", "w", "--json", "plan.json"]
    assert main(["plan", "own_step:example", *options]) == 0
    output = capsys.readouterr().out
    assert "step on cpu:4: fsdp 4 = 4 devices" in output and "own_step.py:5 (step" in output and "w\n  param" in output
    plan = json.loads(Path("plan.json").read_text())
    assert plan["chosen"] == "fsdp:4"
    assert main(["plan", "own_step:example", "--target", "cpu:4", "--microbatches", "2", "--plan", "fsdp:4"]) == 0
    assert "microbatches" in capsys.readouterr().out
    assert main(["plan", "own_step:example", "--target", "cpu:4", "--show", "program"]) == 0
    assert "dot_general" in capsys.readouterr().out
    assert main(["plan", "own_step:example", "--target", "cpu:4", "--kernels", "require"]) == 2
    assert "kernels='require', but" in capsys.readouterr().err
    assert main(["plan", "own_step:example", "--target", "cpu:4", "--plan", "fsdp:4", "--offload", "hiden"]) == 2
    assert "offload names 'hiden', which the step does not have" in capsys.readouterr().err
    for option, value in {"--batch-size": "8", "--context": "8", "--remat": "full", "--set": "layers=2"}.items():
        assert main(["plan", "own_step:example", option, value]) == 2
        assert f"plan 'own_step:example': {option} is for named models" in capsys.readouterr().err


@pytest.mark.parametrize(
    "model", [["gpt-tiny", "--set", "attention=plain"], ["--preset", "quick", "--gpt.attention", "plain"]]
)
def test_plan_puts_kernels_in_place_of_attention(model: list[str], capsys: pytest.CaptureFixture) -> None:
    options = ["--target", "cpu:8", "--plan", "dp:8", "--batch-size", "8"]
    assert main(["plan", *model, *options, "--kernels", "require"]) == 0
    assert "kernels: attention at kernels/" in (output := capsys.readouterr().out) and "takes its place" in output
    assert main(["plan", *model, *options]) == 0
    assert "takes its place" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("offload", "plan", "moved"),
    [
        ("optimizer", "fsdp:8", "optimizer 592 KiB"),
        ("residual, optimizer", "pp:2 dp:4", "residual 256 KiB, optimizer 592 KiB"),
        ("mlp_*", "pp:2 dp:4", "mlp_* "),
    ],
)
def test_plan_of_a_named_model_moves_what_is_requested(
    offload: str, plan: str, moved: str, capsys: pytest.CaptureFixture
) -> None:
    options = ["--target", "v5e:2x4", "--batch-size", "16", "--plan", plan, "--verify", "0"]
    assert main(["plan", "gpt-tiny", *options, "--offload", offload]) == 0
    assert f"note: moved to host memory in each step, before sharding: {moved}" in capsys.readouterr().out


def test_warnings_are_one_line_and_shown_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def run(arguments: Any) -> int:
        for _ in range(2):
            warnings.warn("nothing is sharded", AutoshardWarning, stacklevel=2)
        warnings.warn("old", FutureWarning, stacklevel=2)
        return 0

    monkeypatch.setattr("autoshard.commands.rules.run", run)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["rules"]) == 0
        assert main(["rules"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["autoshard: warning: nothing is sharded", "autoshard: warning: old"] * 2


def test_ctrl_c_ends_a_command_with_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoshard.commands.rules.run", interrupted)
    assert main(["rules"]) == 130 and capsys.readouterr().err == "autoshard rules: interrupted\n"


def test_damage_is_reported_by_leaf_and_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_config(tmp_path, {})
    with Checkpointer(tmp_path / CHECKPOINTS) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": np.arange(5000.0), "b": np.zeros(2)}, config={"step": step}, block=True)
    file = max((tmp_path / CHECKPOINTS / "step_00000002").rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert main(["ckpt", "verify", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "step 1  intact\nstep 2  damaged: w\n"
    assert main(["ckpt", "verify", f"{tmp_path}@1"]) == 0
    assert capsys.readouterr().out == "step 1  intact\n"


@pytest.mark.slow
def test_a_run_of_truncated_checkpoints_is_one_line(tmp_path: Path) -> None:
    write_config(tmp_path, {"gpt": {"layers": 1, "width": 8, "heads": 2, "context": 8, "vocab": 256}})
    with Checkpointer(tmp_path / CHECKPOINTS) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": np.arange(5000.0)}, config={"step": step}, block=True)
    for file in (tmp_path / CHECKPOINTS).rglob("*"):
        if file.is_file() and file.stat().st_size > 200:
            os.truncate(file, 100)
    # In a child process, so that what libraries log is in its standard error.
    found = run("ckpt", "describe", str(tmp_path))
    assert found.returncode == 2 and len(found.stderr.splitlines()) == 1, found.stderr
    assert "step 2 in" in found.stderr and "is damaged" in found.stderr


def test_every_option_of_generate_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    received: dict[str, Any] = {}

    def generate(prompt: str, tokens: int, **options: Any) -> tuple[str, str]:
        received.update(prompt=prompt, tokens=tokens, **options)
        return "once upon", "the plan"

    def open_generator(folder: Path, step: int | None, *, use_ema: bool | None, factory: Any) -> Any:
        received.update(folder=folder, step=step, use_ema=use_ema, factory=factory)
        return SimpleNamespace(generate=generate)

    monkeypatch.setattr("autoshard.train.inference.exported_model.open_generator", open_generator)
    options = "--prompt once --tokens 3 --temperature 0.5 --top-k 4 --seed 5 --step 6 --no-use-ema --show-plan".split()
    assert main(["generate", str(tmp_path), *options]) == 0 and capsys.readouterr().out == "the plan\nonce upon\n"
    assert received == dict(
        folder=tmp_path, step=6, prompt="once", tokens=3, temperature=0.5, top_k=4, seed=5, use_ema=False, factory=None
    )


@pytest.mark.slow
def test_a_run_from_the_command_line(tmp_path: Path) -> None:
    """Train on virtual devices, resume on fewer, verify the checkpoints and generate text."""
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 100)
    folder = str(tmp_path / "run")
    sizes = (
        "--gpt.layers 1 --gpt.width 16 --gpt.heads 2 --gpt.context 16 --batch-size 8 --optimizer.warmup-steps 2".split()
    )
    options = ["--data", str(text), "--run-dir", folder, "--sample-tokens", "4", "--eval-every", "0", *sizes]
    trained = run("train", *options, "--steps", "4", "--virtual-devices", "4", XLA_FLAGS="")
    assert trained.returncode == 0, trained.stderr
    assert "on 4 cpu devices" in trained.stdout and "finished at step 4/4" in trained.stdout

    again = run("train", *options, "--steps", "4")
    assert again.returncode == 2 and "--resume" in again.stderr and len(again.stderr.splitlines()) == 1

    resumed = run("train", "--run-dir", folder, "--resume", "--steps", "6", "--virtual-devices", "2", XLA_FLAGS="")
    assert resumed.returncode == 0, resumed.stderr
    assert "on 2 cpu devices; the run continues from step 4" in resumed.stdout

    listed = run("ckpt", "verify", folder)
    assert (listed.returncode, listed.stdout) == (0, "step 4  intact\nstep 6  intact\n")
    written = run("generate", folder, "--prompt", "to ", "--tokens", "5", "--temperature", "0")
    assert written.returncode == 0 and written.stdout.startswith("to ")


def test_a_plan_for_a_machine_that_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = "--gpt.layers 2 --gpt.width 96 --target v5e:4x4 --verify 0 --json".split()
    assert main(["plan", "--preset", "gpt2-small", *options, str(tmp_path / "plan.json")]) == 0
    assert "v5e:4x4" in capsys.readouterr().out and (tmp_path / "plan.json").read_text().startswith("{")


@pytest.mark.slow
def test_the_plan_of_a_named_model(tmp_path: Path) -> None:
    options = (
        "--target h100:2x8 --verify 0 --batch-size 32 --context 64 --set layers=3 --explain 0/params/embed".split()
    )
    planned = run("plan", "llama-tiny", *options, "--html", str(tmp_path / "plan.html"))
    assert planned.returncode == 0, planned.stderr
    assert "h100:2x8" in planned.stdout and "layers 3" in planned.stdout
    assert planned.stdout.count("state/params/embed") == 1  # explained
    assert "<html" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("lama-tiny", "Did you mean llama-tiny"),
        ("gpt-tiny --target v5pp:4x4x4", "Did you mean 'v5p:4x4x4'?"),
        ("gpt-tiny --set layer=3", "GPTConfig has no field 'layer'. Did you mean layers"),
        ("gpt-tiny --set layers", "such as layers=4"),
        ("gpt-tiny --microbatches 3", "a batch of 16 does not divide into 3 microbatches"),
        ("gpt-tiny --microbatches some", "--microbatches: 'some' is neither auto nor a number"),
        ("gpt-tiny --verify -1", "verify is -1"),
        ("gpt-tiny --verify all", "--verify: 'all' is neither auto, nor schedule, nor a number"),
        ("gpt-tiny --verify 2 --verify-timeout-s 60", "it applies only to verify='auto'"),
    ],
)
def test_a_named_model_that_cannot_be_planned(arguments: str, message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


COMPILES = "autoshard plan: {} the fastest plans to compare them, for up to {} s; --verify 0 skips this\n"


@pytest.mark.parametrize(
    ("verify", "timeout_s", "target", "missing", "found", "said"),
    [
        (None, None, "v5e:2x4", None, {"verify": "schedule"}, COMPILES.format("schedules", 600)),
        (None, None, "h100:8", None, {"verify": "auto"}, COMPILES.format("compiles", 600)),
        (
            None,
            60.0,
            "v5e:2x4",
            None,
            {"verify": "schedule", "verify_timeout_s": 60.0},
            COMPILES.format("schedules", 60),
        ),
        (None, None, "h100:8", "pip install it", {}, "autoshard plan: plans are not compiled: pip install it\n"),
        (None, None, "cpu:8", None, {}, ""),
        (None, 60.0, "cpu:8", None, {"verify": "auto", "verify_timeout_s": 60.0}, ""),
        (0, None, "v5e:2x4", None, {"verify": 0}, ""),
        (2, None, "h100:8", "pip install it", {"verify": 2}, ""),
    ],
)
def test_what_a_plan_compiles_by_default(verify, timeout_s, target, missing, found, said, capsys, monkeypatch) -> None:
    monkeypatch.setattr(aot_compile, "missing_compiler", lambda platform: missing)
    assert verification(verify, timeout_s, {"target": target}) == found
    assert capsys.readouterr().err == said


@pytest.mark.tpu_compile
def test_libtpu_is_not_started_where_no_tpu_is_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python
) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    loaded = sys.modules.pop("jax")  # the choice is made before JAX is imported
    try:
        for file, text in (("dev/nvidia0", ""), ("sys/bus/pci/devices/0/vendor", "0x1ae0\n")):
            path = tmp_path / file.replace("/", "-") / file
            path.parent.mkdir(parents=True)
            path.write_text(text)
            skip_absent_accelerators(path.parents[len(Path(file).parts) - 1])
            assert "JAX_PLATFORMS" not in os.environ
        skip_absent_accelerators(tmp_path / "empty")
        assert os.environ.pop("JAX_PLATFORMS") == "cpu"
    finally:
        sys.modules["jax"] = loaded
    # Without the choice, JAX starts libtpu here, which writes to standard error.
    code = "from autoshard.cli import main; main(['rules', 'dot_general']); import jax; print(jax.devices())"
    done = run_python(code)
    assert done.returncode == 0 and done.stderr == ""


def test_plan_shows_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt-tiny", "--target", "cpu:8", "--batch-size", "8", "--show", "program"]) == 0
    text = capsys.readouterr().out
    assert "residuals: " in text
    assert "iterations in reverse" in text


class _ShownPlan:
    """A plan without a program, to be shown."""

    audits = ()

    def to_json(self) -> str:
        return "{}"

    def explain(self, path: str, wish: Any = None) -> str:
        return f"explained {path}"

    def to_html(self, path: Path) -> None:
        path.write_text("<html>")

    def __str__(self) -> str:
        return "the plan"


def test_a_plan_is_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(_ShownPlan(), Path("-"), tmp_path / "plan.html") == 0
    assert capsys.readouterr().out == "{}\n" and (tmp_path / "plan.html").read_text() == "<html>"
    assert show(_ShownPlan(), tmp_path / "plan.json", None, ["wq"]) == 0
    assert capsys.readouterr().out == "the plan\n\nexplained wq\n" and (tmp_path / "plan.json").read_text() == "{}"
    with pytest.raises(ConfigError, match="--html .*missing.* cannot be written"):
        show(_ShownPlan(), None, tmp_path / "missing" / "plan.html")
