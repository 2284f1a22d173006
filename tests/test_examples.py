"""Every example runs as a user would run it, and prints what its docstring promises."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ALL, has_compiler

EXAMPLES = Path(__file__).parent.parent / "examples"

QUICK = not ALL
"""Examples train for a few epochs; `make test-all` has them train in full."""
ACCURATE = r"(8[6-9]|9\d)\.\d%" if QUICK else r"9\d\.\d%"
"""The examples themselves fail below what they expect; an untrained model has some 10 %."""

# What a reader of the output should find, as regular expressions, in any order.
TELLING = {
    "hello": [
        r"Hello, here, from process \d+!",
        r"greeting there",
        r"Hello, there, from process \d+!",
        r"Hello, anywhere, from process \d+!",
    ],
    "parallel": [
        r"& +: 168 primes below 1,000, longest word 'horizon'",
        r"gather : \[303, 247, 233, 224, 222\], 1229 primes below 10,000",
        r"stream : 1229 primes",
        r"map +: \[303, 247, 233, 224, 222\]",
        r"futures: 5 done, 1229 primes",
    ],
    "broadcast": [
        # Once: what the other nodes print is dropped.
        r"(?s)\A(?!.*nodes are up.*nodes are up).*3 nodes are up, the head is node 0",
        r"rank 0 of 3 is a head named ada\n"
        r"rank 1 of 3 is a member named grace\n"
        r"rank 2 of 3 is a member named edsger\n",
        r"asked for node 2, ran on node 2",
        r"asked for the head, ran on node 0",
    ],
    "sharding": [
        r"points per node: \[3334, 3333, 3333\]",
        r"fitted y = 3\.00 x \+ 0\.50",
    ],
    "streaming": [
        r"out +: \[0, 1, 4, 9, 16, 25\]",
        r"squares: closed by the caller",
        r"in +: 4\.5",
        r"through: \[0\.0, 7\.0, 7\.0, 7\.0, 8\.0, 8\.0\]",
    ],
    "state": [
        r"5 documents, 15 words, 10 different",
        r"sky: 2, cloud: 2, wind: 1",
        r"first : 8",
        r"all   : \[8, 3, 8, 1, 7\]",
        r"asked : 6 times, loaded once",
        r"copies: 2, which say \[4, 4\]",
    ],
    "async_pool": [
        r"one +: 49",
        r"many +: \[0, 1, 4, 9\]",
        r"loop +: kept running meanwhile",
        r"timeout: gave up",
        r"sync +: 9",
    ],
    "model_roundtrip": [
        r"Model: 235,146 parameters",
        r"test samples : 1,000",
        r"epoch +1/\d+: loss=",
        rf"Round trip: \d+\.\d% -> {ACCURATE} \(MNISTClassifier\)",
    ],
    "device_mnist": [
        r"The model is on sky:0, 4,000 digits with it",
        r"epoch +1/\d+: loss=",
        r"epoch +(\d+)/\1: loss=0\.",
        rf"Held-out accuracy: {ACCURATE}",
        r"The trained model is on cpu",
    ],
    "device_function": [
        r"Made on the node, and left there: the model and 1,797 digits, on sky:0",
        r"Untrained: [ 12]?\d\.\d%",
        r"One epoch, operation by operation: loss=\d\.\d+ in \d+ ms",
        r"\d+ epochs, as one call: loss=0\.\d+ in \d+ ms",
        r"Bytes of tensors sent from here meanwhile: 0\n",
        r"This program's model, still on sky:0, recognises (8[89]|9\d)\.\d% of new digits",
    ],
    "profile_training": [
        r"\.item\(\) every step:\nsky:0 \(cpu of node 0\): \d+\.\d+ m?s, 204 operations",
        r"%  reads .* waits: 13\n",
        r"\.item\(\) at the end:\nsky:0 .*, 204 operations",
        r"%  reads .* waits: 1\n",
        r"36 x  aten::mm: ",
        r"the trace is in .*trace-at-the-end\.json",
    ],
    "replay_training": [
        r"operation by operation: loss 2\.\d+ -> 0\.\d+, \d+\.\d+ ms a step\n  0 of 300 steps",
        r"replayed: loss 2\.\d+ -> 0\.\d+, \d+\.\d+ ms a step\n  29\d of 300 steps were one",
        r"The same weights, bit for bit: True",
    ],
    "generate_text": [
        r"qrstuvwxyzabcdef.*\na cache that grows: \d+\.\d ms a token, \d{3} waits",
        r"qrstuvwxyzabcdef.*\na static cache: \d+\.\d ms a token, \d waits for the device",
        r"The alphabet, each time: True",
    ],
    "compile_gpt": [
        r"Operation by operation:\n  first step: loss=(\d+\.\d+), ",
        r"Compiled by the worker:\n  first step: loss=\d+\.\d+, ",
        r"Operations a step: \d\d plain, \d+ compiled",
    ],
    "model_store": [
        r"saved digits 1: 340,008 bytes, 340,008 of them new",
        r"saved digits 2: 340,008 bytes, 10,280 of them new",
        r"digits 1 of __main__\.Digits: \{'accuracy': 9\d\.\d, 'loss': 0\.",
        r"digits 2 of __main__\.Digits: .*'tuned': 'the head', 'parent': 1\}",
        r"Loaded by a function on a worker: 9[2-9]\.\d% of held-out digits",
        r"Loaded on sky:0 by its worker: 0 bytes sent from here",
        r"The model there recognises 9[2-9]\.\d%, as before: True",
        r"'digits' version 2 does not fit Digits: 2 of another shape",
        r"head\.weight  stored \[10, 256\] float32, model \[26, 256\] float32",
        r"nothing was loaded; pass strict=False to load what fits",
    ],
    "ddp_mnist": [
        r"epoch (\d+)/\1: loss=0\.",
        r"rank 0: 2000 digits an epoch\nrank 1: 2000 digits an epoch\n",
        rf"Held-out accuracy: {ACCURATE}, the same weights on both nodes",
    ],
    "mesh_fsdp": [
        r"A weight of \(192, 64\) is \(96, 64\) on each rank of sky:0",
        r"epoch +(\d+)/\1: loss=0\.",
        r"The gradient's norm, rank by rank: \d\.\d+, \d\.\d+\n",
        r"The last loss: tensor\(.*, rank=0\)\ntensor\(.*, rank=1\)",
        r"Saved, and loaded here: (8[89]|9\d)\.\d% of the held-out digits",
    ],
    "skytorch_mnist": [
        r"skytorch: no kubeconfig, so computes are processes on this machine",
        r"epoch (\d)/\1 on sky:0: loss=0\.",
        rf"Held-out accuracy: {ACCURATE}",
    ],
    "skytorch_cluster": [
        r"from node to node: sky:0 -> sky:1",
        r"step 3: the judge's copy is off by 0\.0",
    ],
    "grpo_sync": [
        r"[\d,]+ parameters learn on sky:0, their copy samples on sky:1",
        r"step (\d+)/\1: reward 0\.[5-9]",
        r"\d+ MB went from sky:0 to sky:1",
    ],
    "grid_search": [
        r"2 places, 2 processes, none of them this one",
        r"9\d\.\d%  \{'C': 1\.0, 'gamma': 0\.001\}",
        r"27 fits in \d+\.\d s",
        r"Held-out accuracy: 9[5-9]\.\d% of 450 digits",
    ],
    "jax_psum": [
        r"process 0 of 2 devices: the sum of 1 \+ rank is 3\n"
        r"process 1 of 2 devices: the sum of 1 \+ rank is 3\n",
        r"\[node 0\] step 200/200: loss=0\.0",
        r"Trained on 213 \+ 213 rows; the nodes agree to the last bit: yes",
        r"Held-out accuracy: 9\d\.\d% of 143 tumours",
    ],
    "keras_digits": [
        r"\[node 0\] Keras on jax: 2 replicas, 673 digits each",
        r"\[node 0\] epoch  (\d)/\1: loss=0\.",
        r"The nodes' models are the same",
        r"Held-out accuracy: 9[2-9]\.\d%",
    ],
    "hf_trainer": [
        r"3,000 lines, such as",
        r"\[node 0\] \{'loss': ",
        r"rank 0 of 2: (38|76) steps\nrank 1 of 2: \1 steps\n",
        rf"Held-out accuracy: {ACCURATE}, the same weights on both nodes",
    ],
}

# These need other machines: tests/providers has them.
ELSEWHERE = {
    "aws_ddp",
    "aws_training",
    "container_roundtrip",
    "kubernetes_ddp",
    "slurm_ddp",
    "ray_pool",
    "ssh_ddp",
}

# What an example needs that is not everywhere; without it the test is skipped, and says so.
NEEDS = {
    "grid_search": ["sklearn", "joblib"],
    "model_store": ["torch", "sklearn"],
    "device_function": ["torch", "sklearn"],
    "jax_psum": ["jax", "sklearn"],
    "mesh_fsdp": ["torch", "sklearn"],
    "keras_digits": ["keras", "jax", "sklearn"],
    "generate_text": ["torch", "transformers"],
    "hf_trainer": ["torch", "transformers", "datasets", "accelerate"],
}

# The torch device is compiled the first time that it is used.
NEEDS_COMPILER = {
    "device_mnist",
    "device_function",
    "generate_text",
    "grpo_sync",
    "mesh_fsdp",
    "model_store",
    "profile_training",
    "replay_training",
    "skytorch_mnist",
    "skytorch_cluster",
}

LONG = {
    "async_pool",
    "compile_gpt",
    "ddp_mnist",
    "device_function",
    "device_mnist",
    "generate_text",
    "grid_search",
    "grpo_sync",
    "hf_trainer",
    "jax_psum",
    "keras_digits",
    "mesh_fsdp",
    "model_roundtrip",
    "model_store",
    "parallel",
    "profile_training",
    "replay_training",
    "sharding",
    "skytorch_cluster",
    "skytorch_mnist",
    "state",
    "streaming",
}
"""Examples of what other tests cover, and which take long: `make test-all` runs them."""


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    # A developer's cluster is not what the examples are about.
    env = {**os.environ, "KUBECONFIG": os.devnull, "SKYWARD_EXAMPLE_QUICK": "1" if QUICK else ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({p.stem for p in EXAMPLES.glob("*.py")} - ELSEWHERE))
def test_example_runs_and_shows_what_it_promises(name: str) -> None:
    """Slow: starts a pool in a new process; those that train a model take some seconds more."""
    if name in LONG and QUICK:
        pytest.skip(f"{name}.py takes long, and other tests cover what it shows: make test-all")
    if name in NEEDS_COMPILER and not has_compiler():
        pytest.skip(f"{name}.py needs a C++ compiler, once; there is none")
    for module in NEEDS.get(name, []):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{name}.py needs {module}, which is not installed")
    done = run(EXAMPLES / f"{name}.py")

    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout + done.stderr
    missing = [line for line in TELLING[name] if not re.search(line, shown)]
    assert not missing, f"not in the output of {name}.py: {missing}\n{shown}"
    assert "Traceback" not in done.stderr


def test_every_example_is_expected_to_show_something() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TELLING.keys() | ELSEWHERE


def test_the_readme_runs(tmp_path: Path) -> None:
    """Each block as a program of its own, and fit.py as the text runs it."""
    readme = (EXAMPLES.parent / "README.md").read_text()
    found = re.findall(r"(<!-- needs: [^\n]* -->\n)?```python\n(.*?)```", readme, flags=re.DOTALL)
    programs = [code for needs, code in found if not needs]
    script = tmp_path / "readme.py"
    each = 'exec(compile({!r}, "README.md", "exec"), {{"__name__": "__main__"}})'
    script.write_text("\n".join(map(each.format, programs)))
    (fit,) = [code for _, code in found if code.startswith("# fit.py")]
    (tmp_path / "fit.py").write_text(fit)

    done = run(script)
    fitted = run("-m", "skyward", "run", tmp_path / "fit.py")

    assert len(programs) >= 3
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 2 [2, 1] [2.0, 4.0]" in done.stdout
    assert "[node 1] 2 of 4 values" in done.stdout
    assert fitted.returncode == 0, fitted.stderr
    assert "best of 3: 0.000003" in fitted.stdout
