"""Every TOML, shell and Python block of README and docs/ runs, in a part that takes seconds."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.cpu.conftest import environment
from titan_lifecycle.cli import _parser
from titan_lifecycle.jobs.job import read_header
from titan_lifecycle.jobs.shipped import resolve_job
from titan_lifecycle.run.load import load

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += [ROOT / "goldens/README.md", ROOT / "tests/gpu/README.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language):
    for document in DOCUMENTS:
        for i, (found, text) in enumerate(BLOCK.findall(document.read_text())):
            if found == language:
                yield pytest.param(text, id=f"{document.relative_to(ROOT)}-{i}")


def commands():
    """The lines of the blocks without a language, which are all shell."""
    lines = {}
    for block in blocks(""):
        text = block.values[0].replace("\\\n", " ")
        for line in text.splitlines():
            if words := shlex.split(line, comments=True):
                lines[" ".join(words)] = words
    return [pytest.param(words, id=line) for line, words in lines.items()]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A directory with the shipped files, where x.toml is the README's first job."""
    for name in ("configs", "scripts", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "x.toml").write_text(next(blocks("toml")).values[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*command, cwd):
    done = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_titan_lifecycle(words, directory):
    """The command parses, and its job loads: training itself is for other tests."""
    args = _parser().parse_args(words)
    if hasattr(args, "job"):
        load(read_header(resolve_job(args.job)), args.overrides)


def check_make(words, directory):
    run("make", "-n", *words, cwd=ROOT)


def check_script(words, directory):
    """The script knows every option; the figures take minutes."""
    text = run(sys.executable, words[0], "--help", cwd=ROOT)
    assert [w for w in words[1:] if w.startswith("--") and w not in text] == []


def check_python(words, directory):
    if words[:2] == ["-m", "pytest"]:
        run(sys.executable, "-m", "pytest", "--collect-only", "-q", *words[2:], cwd=ROOT)
    else:
        check_script(words, directory)


def check_torchrun(words, directory):
    """What runs on two CPU ranks runs. Jobs for 8 GPUs, and tests on GPUs, are loaded."""
    if words[-1].endswith(".py"):
        assert "step 5" in run(
            sys.executable, "-m", "torch.distributed.run", "--standalone", *words, cwd=directory
        )
        return
    module, args = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
    if module == "titan_lifecycle":
        check_titan_lifecycle(args, directory)
    elif module == "torchtitan.train":
        from torchtitan.config import ConfigManager

        ConfigManager().parse_args(args)
    else:
        assert module == "pytest"
        check_python(["-m", "pytest", *args], directory)


def check_sbatch(words, directory):
    run("bash", "-n", words[0], cwd=directory)
    check_titan_lifecycle(["config", *words[1:]], directory)


def check_hf(words, directory):
    """It needs a network: the options are checked."""
    text = run(str(Path(sys.executable).with_name("hf")), "download", "--help", cwd=directory)
    assert [w for w in words if w.startswith("--") and w not in text] == []


CHECKS = {
    "titan-lifecycle": check_titan_lifecycle,
    "make": check_make,
    "python": check_python,
    "torchrun": check_torchrun,
    "sbatch": check_sbatch,
    "hf": check_hf,
    "scripts/regenerate_goldens.py": lambda words, directory: check_script(
        ["scripts/regenerate_goldens.py", *words], directory
    ),
}


@pytest.mark.parametrize("words", commands())
def test_a_command_is_one(words, directory):
    CHECKS[words[0]](words[1:], directory)


@pytest.mark.parametrize("text", [*blocks("toml")])
def test_a_job_loads(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text(text)
    load(read_header("x.toml"), [])


@pytest.mark.parametrize("name", ["README.md", "configs/examples/first_job.toml"])
def test_the_first_job_trains(name, run_job, tmp_path):
    """On two ranks instead of four."""
    text = (ROOT / name).read_text()
    if name.endswith(".md"):
        text = next(blocks("toml")).values[0]
    text = text.replace("nproc_per_node = 4", "nproc_per_node = 2")
    (tmp_path / "job.toml").write_text(text.replace("size = 16", "size = 8"))
    job_run = run_job(
        "job.toml", "--training.steps", "2", "--training.seq_len", "64", "--debug.seed", "1"
    )
    assert job_run.status == 0, job_run.output
    assert re.search(r"reduce-scatters a step +8 ", job_run.stdout)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder, self.lm_head = nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, x):
        return self.decoder(x)


@pytest.fixture
def namespace():
    """What the Python blocks name without defining it."""
    from torch.distributed.pipelining import PipelineStage

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = Model()
        fully_shard(model.lm_head)
        fully_shard(model)
        hidden = model(torch.randn(2, 4, 8))
        yield {
            "model": model,
            "hidden": hidden,
            "chunks": [chunk.detach().requires_grad_() for chunk in hidden.chunk(2, dim=1)],
            "loss": torch.mean,
            "assembled_gradient": lambda chunks: torch.cat([c.grad for c in chunks], dim=1),
            "schedule": PipelineStage(model, 0, 2, torch.device("cpu")),
        }
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("text", [*blocks("python")])
def test_python_runs(text, namespace):
    exec(text, namespace)
    if "my_config" in namespace:
        config = namespace["my_config"]()
        assert config.lifecycle.gradient_reduction == "last_microbatch"


def test_links_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), (document, target)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


@pytest.mark.parametrize("name", ["plain_fsdp2.py", "pipeline.py"])
def test_an_example_trains(name, tmp_path):
    example = ROOT / "configs/examples" / name
    out = run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "2", str(example)),
        cwd=tmp_path,
    )
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 1
