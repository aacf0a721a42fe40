"""The plugin's configs: ``[lifecycle]``, the override, and what is refused."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.experiments.graph_trainer.chunked_loss import ChunkedLossWrapperWithParamGrads
from torchtitan.models.deepseek_v3.mtp import MTPLoss
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from tests.cpu.conftest import CONFIGS, environment
from titan_lifecycle import LifecycleChunkedLoss, private_names
from titan_lifecycle.fsdp_lifecycle.private import FSDPState
from titan_lifecycle.jobs.errors import JobError
from titan_lifecycle.jobs.job import read_header, render
from titan_lifecycle.jobs.shipped import PACKAGE
from titan_lifecycle.losses.choice import choose_loss
from titan_lifecycle.losses.mtp import MTPChunkedLoss
from titan_lifecycle.overrides import chunked_loss
from titan_lifecycle.run.load import load
from titan_lifecycle.trainer import LifecycleConfig, LifecycleTrainer, lifecycle_config

OVERRIDE = "titan_lifecycle.overrides.chunked_loss"


def accumulating(**fields):
    config = llama3_debugmodel()
    config.training.disable_cuda_graphs = True
    return lifecycle_config(config, **fields)


def test_any_trainer_config_becomes_a_lifecycle_one():
    config = llama3_debugmodel()
    converted = lifecycle_config(config, head_reduction="coalesced")
    assert type(converted) is LifecycleTrainer.Config
    assert converted.lifecycle.head_reduction == "coalesced"
    assert type(converted.loss) is LifecycleChunkedLoss.Config
    assert converted.loss.loss_fn is config.loss.loss_fn
    assert (converted.optimizer, converted.model_spec) == (config.optimizer, config.model_spec)
    # Not changed, and another loss is left alone.
    assert type(config.loss) is ChunkedLossWrapper.Config
    config.loss = CrossEntropyLoss.Config()
    assert lifecycle_config(config).loss is config.loss


def test_another_trainer_is_refused_by_name():
    class Other(Trainer.Config):
        pass

    with pytest.raises(TypeError, match=r"takes torchtitan's Trainer\.Config, got .*Other"):
        lifecycle_config(Other())


@pytest.mark.parametrize("num_chunks, kept", [(8, None), (5, 5)])
def test_the_override_replaces_torchtitans_loss_only(num_chunks, kept):
    config = llama3_debugmodel()
    config.loss = ChunkedLossWrapper.Config(num_chunks=num_chunks)
    apply_overrides(OverrideConfig(imports=[(OVERRIDE, {"head_reduction": "coalesced"})]), config)
    assert type(config.loss) is LifecycleChunkedLoss.Config
    assert (config.loss.num_chunks, config.loss.head_reduction) == (kept, "coalesced")
    # GraphTrainer's subclass owns its parameter gradients.
    config.loss = ChunkedLossWrapperWithParamGrads.Config()
    apply_overrides(OverrideConfig(imports=[OVERRIDE]), config)
    assert type(config.loss) is ChunkedLossWrapperWithParamGrads.Config


def test_disabled_is_torchtitans_own_wrapper():
    config = lifecycle_config(llama3_debugmodel(), enabled=False)
    config.loss.num_chunks = 4
    loss, _ = choose_loss(config)
    assert type(loss) is ChunkedLossWrapper.Config
    assert loss.num_chunks == 4


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"gradient_reduction": "all_reduce_last"},
            "'all_reduce_last' needs HSDP: set parallelism.data_parallel_replicate_degree",
        ),
        ({"enabled": False, "head_reduction": "coalesced"}, "need lifecycle.enabled = true"),
        ({"enabled": False, "retain_weights": True}, "need lifecycle.enabled = true"),
        ({"enabled": False, "repeated_units": "retain"}, "need lifecycle.enabled = true"),
        (
            {"enabled": False, "gradient_reduction": "last_microbatch"},
            "need lifecycle.enabled = true",
        ),
    ],
)
def test_what_cannot_work_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        accumulating(**change)


def test_what_a_pipeline_or_a_graph_cannot_do_is_refused():
    for fields in ({"gradient_reduction": "last_microbatch"}, {"repeated_units": "retain"}):
        config = accumulating(**fields)
        config.training.disable_cuda_graphs = False
        with pytest.raises(ValueError, match=r"set training\.disable_cuda_graphs"):
            config.__post_init__()
    for fields, message in (
        ({"gradient_reduction": "all_reduce_last"}, "does not work with a pipeline"),
        ({"retain_weights": True}, "is for training without a pipeline"),
    ):
        config = llama3_debugmodel()
        config.training.disable_cuda_graphs = True
        config.parallelism.data_parallel_replicate_degree = 2
        config.parallelism.pipeline_parallel_degree = 2
        with pytest.raises(ValueError, match=message):
            lifecycle_config(config, **fields)
    config = lifecycle_config(llama3_debugmodel(), enabled=False)
    config.loss.chunk_tokens = 64
    with pytest.raises(ValueError, match=r"chunk_tokens needs lifecycle\.enabled = true"):
        config.__post_init__()


@pytest.mark.parametrize("job, num_bytes, groups", [("llama3_fsdp_accumulate", "24,654,848", 8)])
def test_config_states_what_deferring_costs(job, num_bytes, groups):
    run = subprocess.run(
        [sys.executable, "-m", "titan_lifecycle", "config", str(CONFIGS / f"{job}.toml")],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    last = run.stdout.splitlines()[-1]
    assert f"keeps {num_bytes} bytes of unsharded gradients in {groups} FSDP groups" in last


def test_a_torch_of_another_contract_is_named(monkeypatch):
    for part in private_names.PRIVATE_NAMES:
        assert private_names.missing(part) == []
    monkeypatch.delattr(FSDPState, "_post_forward")
    assert private_names.missing("FSDP2") == ["FSDPState._post_forward"]
    with pytest.raises(ImportError, match=r"lacks FSDPState\._post_forward\. Supported are torch"):
        private_names.check("FSDP2")


def test_every_private_name_that_is_read_is_declared():
    """Names that begin with an underscore and are not this package's own, wherever it reads one."""
    declared = {
        name.rpartition(".")[2]
        for owners in private_names.PRIVATE_NAMES.values()
        for path, names in owners.items()
        for name in (path, *names, path.partition(":")[2])
    }
    own, read = set(), {}
    sources = [(f, ast.parse(f.read_text())) for f in sorted(PACKAGE.rglob("*.py"))]
    for file, tree in sources:
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    own.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(attr=name):
                    read.setdefault(name, file.name)
                case ast.ImportFrom(module=str(module)) if module.startswith(("torch", "spmd")):
                    for alias in node.names:
                        if "._" in module:
                            read.setdefault(f"_.{alias.name}", file.name)
                        read.setdefault(alias.name, file.name)
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr"),
                    args=[_, ast.Constant(value=str(name)), *_],
                ):
                    read.setdefault(name, file.name)
    private = {
        name: file
        for name, file in read.items()
        if name.startswith("_") and not name.startswith("__") and name not in own
    }
    python = {"_exit", "_getframe", "_C", "_autograd"}  # of os and sys; the owners of others
    undeclared = {
        name: file for name, file in private.items() if name.removeprefix("_.") not in declared
    }
    assert undeclared.keys() <= python, undeclared


def loaded(text, *overrides, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(text)
    return load(read_header(path), list(overrides))


MTP_JOB = """
[job]
module = "deepseek_v3"
config = "deepseek_v3_debugmodel_mtp"
device = "cpu"
[loss]
mtp_scale = 0.7
[[override.imports]]
target = "titan_lifecycle.overrides.chunked_mtp_loss"
kwargs = { chunk_tokens = 16 }
"""


def test_config_shows_the_loss_that_runs(tmp_path):
    job = loaded(MTP_JOB, tmp_path=tmp_path)
    assert type(job.config.loss) is MTPChunkedLoss.Config
    assert (job.config.loss.chunk_tokens, job.config.loss.loss_fn.mtp_scale) == (16, 0.7)
    text = render(job)
    assert 'type = "titan_lifecycle.losses.mtp.MTPChunkedLoss"' in text
    # The setting has moved into the inner loss, and still says where it comes from.
    assert job.sources["loss.loss_fn.mtp_scale"].endswith("job.toml:7")
    assert loaded(text, tmp_path=tmp_path).config.loss == job.config.loss
    off = loaded(MTP_JOB, "--lifecycle.no-enabled", tmp_path=tmp_path)
    assert type(off.config.loss) is MTPLoss.Config
    assert off.config.override.imports == []


def test_arguments_of_the_override_hold_in_a_job(tmp_path):
    text = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\ndevice = "cpu"\n[override]\n'
    entry = '{ target = "titan_lifecycle.overrides.chunked_loss", kwargs = { chunk_tokens = 16 } }'
    assert loaded(f"{text}imports = [{entry}]\n", tmp_path=tmp_path).config.loss.chunk_tokens == 16


LLAMA_JOB = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\ndevice = "cpu"\n'


@pytest.mark.parametrize("section", ["lifecycle", "loss"])
def test_the_old_names_of_head_reduction_are_refused(section, tmp_path):
    text = f'{LLAMA_JOB}[{section}]\nreduction = "coalesced"\n'
    message = rf"'{section}\.reduction' is now lifecycle\.head_reduction"
    with pytest.raises(JobError, match=rf"job\.toml:6: {message}"):
        loaded(text, tmp_path=tmp_path)
    message = rf"'--{section}\.reduction' is now lifecycle\.head_reduction"
    for given in ((f"--{section}.reduction", "coalesced"), (f"--{section}.reduction=coalesced",)):
        with pytest.raises(JobError, match=message):
            loaded(LLAMA_JOB, *given, tmp_path=tmp_path)
    with pytest.raises(TypeError, match=r"got 'reduction', which is now .*lifecycle\.head_red"):
        {"lifecycle": LifecycleConfig, "loss": LifecycleChunkedLoss.Config}[section](
            reduction="compatible"
        )


def test_head_reduction_is_set_in_one_place(tmp_path):
    for call in (
        lambda: MTPChunkedLoss.Config(reduction="x"),
        lambda: lifecycle_config(llama3_debugmodel(), reduction="x"),
        lambda: chunked_loss(ChunkedLossWrapper.Config(), reduction="x"),
    ):
        with pytest.raises(TypeError, match=r"lifecycle\.head_reduction"):
            call()
    # For torchtitan's own trainer the loss has it; in a job that would be a second place.
    text = f'{LLAMA_JOB}[loss]\nhead_reduction = "compatible"\n'
    message = r"loss\.head_reduction = 'compatible' is for torchtitan's own trainer; here, set life"
    with pytest.raises(JobError, match=message):
        loaded(text, tmp_path=tmp_path)
    entry = '{ target = "titan_lifecycle.overrides.chunked_loss", '
    entry += 'kwargs = { head_reduction = "coalesced" } }'
    with pytest.raises(JobError, match=r"set lifecycle\.head_reduction = 'coalesced'"):
        loaded(f"{LLAMA_JOB}[override]\nimports = [{entry}]\n", tmp_path=tmp_path)
    assert LifecycleChunkedLoss.Config(head_reduction="coalesced").build().head_reduction == (
        "coalesced"
    )


ALL_OF_LIFECYCLE = """
[training]
seq_len = 64
global_batch_size = 32
[loss]
chunk_tokens = 12
[loss.loss_fn]
type = "titan_lifecycle.losses.from_weight.LinearCrossEntropyLoss"
[lifecycle]
head_reduction = "coalesced"
gradient_reduction = "last_microbatch"
retain_weights = true
repeated_units = "retain"
report_file = "cost.json"
"""


def test_stock_is_torchtitans_own_for_any_job(tmp_path):
    ours = loaded(LLAMA_JOB + ALL_OF_LIFECYCLE, tmp_path=tmp_path).config
    stock = loaded(LLAMA_JOB + ALL_OF_LIFECYCLE, "--stock", tmp_path=tmp_path).config
    assert ours.lifecycle.enabled and ours.loss.chunk_tokens == 12
    assert stock.lifecycle == LifecycleConfig(enabled=False, report_file="cost.json")
    # Six chunks of 12 tokens would leave a shorter one, which torchtitan's wrapper refuses.
    assert stock.loss == ChunkedLossWrapper.Config(num_chunks=4)
    assert stock.training == ours.training
    mtp = loaded(MTP_JOB, "--stock", tmp_path=tmp_path).config
    assert (type(mtp.loss), mtp.loss.mtp_scale) == (MTPLoss.Config, 0.7)
    assert mtp.override.imports == []


def test_a_loss_from_the_weight_needs_the_lifecycle(tmp_path):
    text = LLAMA_JOB + "[lifecycle]\nenabled = false\n[loss.loss_fn]\n"
    text += 'type = "titan_lifecycle.losses.from_weight.LinearCrossEntropyLoss"\n'
    with pytest.raises(JobError, match="takes the head's weight, which needs lifecycle"):
        loaded(text, tmp_path=tmp_path)


@pytest.mark.parametrize("arguments", [["--json", "x.json", "JOB"], ["JOB", "--json", "x.json"]])
def test_report_takes_its_option_on_either_side_of_the_job(arguments, monkeypatch):
    from titan_lifecycle import cli
    from titan_lifecycle.measure import report

    calls = []
    monkeypatch.setattr(report, "report", lambda *call: calls.append(call) or 0)
    arguments = [str(CONFIGS / "llama3_fsdp.toml") if a == "JOB" else a for a in arguments]
    assert cli.main(["report", *arguments, "--training.steps", "4"]) == 0
    ((_, overrides, file),) = calls
    assert (overrides, file) == (["--training.steps", "4"], Path("x.json"))


def test_a_checkpoint_at_sigterm_needs_checkpoints(tmp_path):
    text = f"{LLAMA_JOB}[lifecycle]\ncheckpoint_on_sigterm = true\n"
    with pytest.raises(JobError, match=r"checkpoint_on_sigterm needs checkpoint\.enable = true"):
        loaded(text, tmp_path=tmp_path)
    on = loaded(text, "--checkpoint.enable", "--stock", tmp_path=tmp_path).config.lifecycle
    assert on.checkpoint_on_sigterm and not on.enabled


def test_a_package_of_ones_own_that_is_not_found(tmp_path):
    text = '[job]\nmodule = "mine.registry"\nconfig = "x"\n'
    with pytest.raises(JobError, match=r"of your own must be installed, or .* named in PYTHONPATH"):
        loaded(text, tmp_path=tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(JobError, match=rf"There is a 'mine' in {tmp_path}.*PYTHONPATH={tmp_path}"):
        loaded(text, tmp_path=tmp_path)
