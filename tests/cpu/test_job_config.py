"""Job files: every error class by its message, precedence, components, and rendering."""

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_lifecycle.jobs import overlay
from titan_lifecycle.jobs import renamed_keys as moved
from titan_lifecycle.jobs import shipped as shipped_files
from titan_lifecycle.jobs.errors import JobError
from titan_lifecycle.jobs.job import load_job, read_header, render
from titan_lifecycle.jobs.render_toml import toml
from titan_lifecycle.jobs.shipped import resolve_job
from titan_lifecycle.run.load import plugin_config

HEADER = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n'
OVERRIDE = "torchtitan.overrides.fused_swiglu.fused_swiglu"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a job file into the current directory; the [job] table is its first three lines."""
    monkeypatch.chdir(tmp_path)

    def write(text, header=HEADER):
        path = Path("x.toml")
        path.write_text(header + text)
        return path

    return write


@pytest.fixture
def error_of(write):
    """The message a job file is refused with."""

    def error_of(text, *cli_args, header=HEADER):
        with pytest.raises(JobError) as caught:
            load_job(write(text, header), cli_args)
        return str(caught.value)

    return error_of


# Files and syntax


def test_missing_file(tmp_path):
    with pytest.raises(JobError, match=r"no/x\.toml: no such job file$"):
        load_job(tmp_path / "no/x.toml")


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (tmp_path, tmp_path / "pipe.toml", Path("/dev/stdin")):
        with pytest.raises(JobError, match="not a regular file; every rank reads the job file"):
            read_header(path)


def test_a_byte_order_mark_is_no_part_of_the_first_key(write):
    path = write("")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_header(path).module == "llama3"


def test_values_nested_too_deeply(write):
    path = write("x = " + "[" * 100_000 + "]" * 100_000)
    with pytest.raises(JobError, match=r"x\.toml: values are nested too deeply"):
        read_header(path)


def test_the_line_of_a_key_in_a_file_of_a_megabyte(write):
    """One statement is parsed at a time: by prefixes of the file this took minutes."""
    rows = "".join(f"key{i} = [{i}, # ]\n  {i}]\n" for i in range(40_000))
    file = read_header(write("[training]\n" + rows)).file
    assert file.where(("training", "key39999")) == "x.toml:80003"


def test_lines_of_keys_in_every_form_of_toml(write):
    text = """
[zero]
a.b = 1
c = [1, # ]
  2]
s = '''
[no.table]
x = 1
'''
[t]
"q.r" = { x = { y = 2 } }
[[arrays]]
n = 1
[arrays.sub]
m = 1
[[arrays.deep]]
p = 1
[[arrays]]
[[arrays.deep]]
p = 2 # last
"""
    file = read_header(write(text)).file
    lines = {
        ("zero", "a", "b"): 6,
        ("zero", "c"): 7,
        ("zero", "s"): 9,
        ("t", "q.r", "x", "y"): 14,
        ("arrays", 0, "n"): 16,
        ("arrays", 0, "sub", "m"): 18,
        ("arrays", 0, "deep", 0, "p"): 20,
        ("arrays", 1): 21,
        ("arrays", 1, "deep", 0, "p"): 23,
        ("arrays", 1, "missing"): 21,
    }
    assert {key: file.where(key) for key in lines} == {k: f"x.toml:{n}" for k, n in lines.items()}


def test_a_reader_of_the_output_that_has_enough(tmp_path):
    command = f"{sys.executable} -m titan_lifecycle config llama3_fsdp | head -n 1"
    run = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, cwd=tmp_path
    )
    assert "Traceback" not in run.stderr and "BrokenPipe" not in run.stderr
    assert run.returncode == 0


def test_not_utf8(write):
    path = write("")
    path.write_bytes(b"[job]\nmodule = '\xff'\n")
    with pytest.raises(JobError, match=r"x\.toml: a job file must be UTF-8"):
        read_header(path)


def test_syntax_error_has_line_and_column(error_of):
    message = error_of("[training]\nsteps = = 3\n")
    assert message == "x.toml:5:9: TOML syntax: Invalid value"


def test_duplicate_key(error_of):
    message = error_of("[training]\nsteps = 3\nsteps = 4\n")
    assert message.startswith("x.toml:6:")
    assert "Cannot overwrite a value" in message


# The [job] table


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("", "x.toml: a job file needs a [job] table with module and config"),
        ("job = 3", "x.toml:1: 'job' must be a table; write [job]"),
        ("[[job]]", "x.toml:1: 'job' must be a table; write [job]"),
        ('\n[job]\nmodule = "llama3"', "x.toml:2: [job] needs 'config', as torchtitan's --config"),
        ("[job]\nmodule = 3", "x.toml:2: 'job.module' must be a string; found 3"),
        (
            HEADER + "nproc_per_nod = 4",
            "x.toml:4: unknown key 'job.nproc_per_nod'; did you mean 'nproc_per_node'? "
            "Expected one of module, config, nproc_per_node, device",
        ),
        (
            HEADER + "nproc_per_node = 0",
            "x.toml:4: 'job.nproc_per_node' must be an integer of at least 1; found 0",
        ),
        (
            HEADER + "nproc_per_node = true",
            "x.toml:4: 'job.nproc_per_node' must be an integer of at least 1; found True",
        ),
        (
            HEADER + 'device = "gpu"',
            "x.toml:4: 'job.device' must be one of 'auto', 'cpu', 'cuda'; found 'gpu'",
        ),
        (
            HEADER + 'dump_folder = "out"',
            "x.toml:4: 'job.dump_folder' is a 0.2 name: it is now dump_folder, written at the top "
            "of the file before the first [section]",
        ),
    ],
)
def test_job_table_errors(error_of, header, message):
    assert error_of("", header=header) == message


def test_header_defaults(write):
    header = read_header(write(""))
    assert (header.module, header.config) == ("llama3", "llama3_debugmodel")
    assert (header.nproc_per_node, header.device) == (1, "auto")


def test_header_needs_no_torchtitan(write):
    code = (
        "import sys; from titan_lifecycle.jobs.job import read_header; read_header('x.toml'); "
        "assert not {'torch', 'torchtitan'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=write("").resolve().parent)


# Modules and config functions


def test_unknown_module(error_of):
    message = error_of("", header='[job]\nmodule = "lama3"\nconfig = "x"\n')
    assert message.startswith("x.toml:2: unknown module 'lama3'; did you mean 'llama3'? ")
    assert "deepseek_v3" in message and "torchft.llama3" in message


def test_unknown_config(error_of):
    message = error_of("", header='[job]\nmodule = "llama3"\nconfig = "llama3_debugmodl"\n')
    assert message.startswith(
        "x.toml:3: unknown config 'llama3_debugmodl' in module 'llama3'; "
        "did you mean 'llama3_debugmodel'? Config functions: "
    )
    assert "llama3_8b" in message
    # Helpers that torchtitan's own list includes are none.
    assert "decoder_vocab_size" not in message and "model_registry" not in message


def test_helper_is_no_config_function(error_of):
    message = error_of("", header='[job]\nmodule = "llama3"\nconfig = "model_registry"\n')
    assert message.startswith("x.toml:3: config function 'model_registry' failed: TypeError: ")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write an importable module for the length of a test."""
    monkeypatch.syspath_prepend(tmp_path)

    def module(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)
        return f'[job]\nmodule = "{name}"\nconfig = "make"\n'

    return module


def test_broken_module_shows_its_own_error(error_of, module):
    header = module("broken_registry", "\nimport no_such_dependency\n")
    message = error_of("", header=header)
    assert message.startswith(
        "x.toml:2: module 'broken_registry' exists but failed to import: "
        "ModuleNotFoundError: No module named 'no_such_dependency' (at "
    )
    assert message.endswith("broken_registry.py:2)")


def test_failing_config_function_shows_its_own_error(error_of, module):
    header = module("failing_registry", "def make():\n    raise ImportError('get torchao')\n")
    message = error_of("", header=header)
    assert message.startswith(
        "x.toml:3: config function 'make' failed: ImportError: get torchao (at "
    )


def test_config_function_of_another_kind(error_of, module):
    header = module("other_registry", "def make():\n    return {}\n")
    assert "'make' returned a dict; a config function returns a Trainer.Config" in error_of(
        "", header=header
    )


def test_full_module_path(write):
    header = '[job]\nmodule = "torchtitan.models.llama3"\nconfig = "llama3_debugmodel"\n'
    assert load_job(write("", header)).config.model_spec.name == "llama3"


# Unknown keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[trainin]\nsteps = 3\n",
            "x.toml:4: unknown section [trainin]; did you mean 'training'?",
        ),
        (
            "[training]\nstep = 3\n",
            "x.toml:5: unknown key 'training.step'; did you mean 'steps'?",
        ),
        (
            "[parallelism]\nlocal_batch_size = 3\n",
            "x.toml:5: unknown key 'parallelism.local_batch_size'. "
            "There is a 'local_batch_size' in [training]",
        ),
        (
            "[training]\ndump_folder = 'x'\n",
            "x.toml:5: unknown key 'training.dump_folder'. "
            "There is a 'dump_folder' at the top of the file",
        ),
        (
            "[compile]\nxyz = 3\n",
            "x.toml:5: unknown key 'compile.xyz'. Expected one of "
            "'enable', 'enable_async_tensor_parallel', 'components', 'backend'",
        ),
        (
            '[validator.dataloader]\n\ndatset = "x"\n',
            "x.toml:6: unknown key 'validator.dataloader.datset'; did you mean 'dataset'? "
            "There is a",
        ),
        (
            "[loss.loss_fn]\nvocab = 1\n",
            "x.toml:5: unknown key 'loss.loss_fn.vocab'. Expected one of 'global_vocab_size'",
        ),
        (
            "[optimizer]\nparam_groups = [{patern = '.*'}]\n",
            "x.toml:5: unknown key 'optimizer.param_groups.0.patern'; did you mean 'pattern'?",
        ),
    ],
)
def test_unknown_key(error_of, text, message):
    if message.endswith("There is a"):
        message = message.removesuffix(" There is a")
    assert error_of(text) == message


# Types


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[training]\nsteps = "3"\n',
            "x.toml:5: 'training.steps' must be an integer; found the string '3'",
        ),
        (
            "[training]\nsteps = true\n",
            "x.toml:5: 'training.steps' must be an integer; found the boolean true",
        ),
        (
            "[training]\nsteps = 3.0\n",
            "x.toml:5: 'training.steps' must be an integer; found the number 3.0",
        ),
        (
            "[training]\nmax_norm = false\n",
            "x.toml:5: 'training.max_norm' must be a number or an integer; found the boolean false",
        ),
        (
            "[training]\ndisable_cuda_graphs = 1\n",
            "x.toml:5: 'training.disable_cuda_graphs' must be true or false; found the integer 1",
        ),
        (
            '[training]\ndtype = "float16"\n',
            "x.toml:5: 'training.dtype' must be one of 'bfloat16', 'float32'; "
            "found the string 'float16'",
        ),
        (
            '[compile]\ncomponents = ["model", 1]\n',
            "x.toml:5: 'compile.components' must be an array whose entries are each a string; "
            "found the array ['model', 1]",
        ),
        (
            "[debug]\nseed = 1979-05-27\n",
            """x.toml:5: 'debug.seed' must be an integer or "none"; """
            "found the date datetime.date(1979, 5, 27)",
        ),
        ("training = 3\n", "x.toml:1: 'training' must be a table; found the integer 3"),
        (
            "[[training]]\nsteps = 3\n",
            "x.toml:4: 'training' must be a table; found the array [{'steps': 3}]",
        ),
        (
            "[training.steps]\na = 3\n",
            "x.toml:4: 'training.steps' must be an integer; found the table {'a': 3}",
        ),
        (
            "[optimizer]\nparam_groups = [3]\n",
            "x.toml:5: 'optimizer.param_groups.0' must be a table; found the integer 3",
        ),
        (
            '[training]\nsteps = "none"\n',
            "x.toml:5: 'training.steps' must be an integer; found the string 'none'",
        ),
        (
            '[[optimizer.param_groups]]\npattern = "a"\noptimizer_name = "b"\n'
            '[[optimizer.param_groups]]\npattern = "b"\noptimizer_name = 3\n',
            "x.toml:9: 'optimizer.param_groups.1.optimizer_name' must be a string; "
            "found the integer 3",
        ),
    ],
)
def test_wrong_type(error_of, text, message):
    # A bare key must come before the first table.
    header = "" if text.startswith("training =") else HEADER
    assert error_of(text + ("" if header else HEADER), header=header) == message


@pytest.mark.parametrize("text", ["[model_spec]\nname = 'x'\n", "model_spec = 'none'\n"])
def test_model_cannot_be_set(error_of, text):
    message = error_of(text + HEADER, header="")
    assert message == (
        "x.toml:1: 'model_spec' cannot be set from a job file; it is set by the config function"
    )


def test_callable_cannot_be_set(error_of):
    header = '[job]\nmodule = "llama3"\nconfig = "sft_debugmodel"\n'
    message = error_of("[dataloader]\nsample_processor = 'a.b'\n", header=header)
    assert message.startswith("x.toml:5: 'dataloader.sample_processor' cannot be set from a job")


def test_integer_for_number_and_array_for_tuple(write):
    config = load_job(
        write(
            "[training]\nmax_norm = 2\n[metrics]\nlog_freq = 3\n[lr_scheduler]\nmin_lr_factor = 1\n"
        )
    ).config
    assert config.training.max_norm == 2
    assert config.lr_scheduler.min_lr_factor == 1.0
    assert type(config.lr_scheduler.min_lr_factor) is float


# Lines


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[training]\n\n# a comment\n\nstep = 3\n", 8),
        ("training.step = 3\n", 4),
        ("[training]\nsteps = 1\n[compile]\ncomponents = [\n  'model',\n]\nbackend = 3\n", 10),
        ("[compile]\nbackend = 'x'\ncomponents = [\n  'model',\n  # why\n  3,\n]\n", 6),
        ("[compile]\nbackend = '''\n[training]\nstep = 3\n'''\nenabl = true\n", 9),
        ("[training]\nsteps = 1\n[validator]\ndataloader = { dataset = 3 }\n", 7),
        ("[training]\r\nsteps = 1\r\nstep = 3\r\n", 6),
    ],
)
def test_line_of_the_key(error_of, text, line):
    header = HEADER
    if text.startswith("training."):
        text, header, line = text + HEADER, "", 1
    assert error_of(text, header=header).startswith(f"x.toml:{line}: ")


# Names of torchtitan 0.2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[profiling]\nenable_profiling = true\n", "enable_profiling in [profiler]"),
        ("[profiling]\n", "it is now [profiler]"),
        ("[validation]\ndataset = 'c4'\n", "it is now dataset in [validator.dataloader]"),
        ("[validation]\nfreq = 3\n", "it is now freq in [validator]"),
        ("[model]\nflavor = '8B'\n", "x.toml:5: 'model.flavor' is a 0.2 name: it is now config in"),
        ("[model]\nname = 'llama3'\n", "it is now module in [job]"),
        ("[model]\nhf_assets_path = 'x'\n", "it is now hf_assets_path, written at the top"),
        ("[model]\nconverters = []\n", "model converters are part of the model"),
        ("[training]\ndataset = 'c4'\n", "x.toml:5: 'training.dataset' is a 0.2 name: it is now"),
        ("[optimizer]\nlr = 1e-3\n", "an array of tables [[optimizer.param_groups]]"),
        ("[activation_checkpoint]\nmode = 'full'\n", "it is now type in [activation_checkpoint]"),
        ("[quantize.linear.float8]\nx = 1\n", "'quantize.linear' is a 0.2 name: model converters"),
        ("[experimental]\ncustom_import = 'a.b'\n", "it is now imports in [override]"),
        ("[fault_tolerance]\nenable = true\n", "module = 'torchft.llama3'"),
    ],
)
def test_old_names(error_of, text, message):
    assert message in error_of(text)


def test_old_name_on_the_command_line(error_of):
    assert error_of("", "--job.dump_folder", "x").startswith(
        "'--job.dump_folder' is a 0.2 name: it is now dump_folder"
    )


def test_old_names_are_gone_and_new_names_exist(write):
    config = load_job(write("")).config
    known = {path for path, _ in overlay.leaves(config)} | {"activation_checkpoint.type"}
    known |= {"job.module", "job.config"}
    assert not (set(moved.MOVED) | set(moved.REPLACED)) & known
    assert set(moved.MOVED.values()) <= known


def test_type_is_no_field_of_any_config(write):
    """The key that swaps a component would hide a field of that name."""
    for header in REGISTRY:
        config = load_job(write("", header)).config
        assert not [path for path, _ in overlay.leaves(config) if path.endswith(".type")]


# The config's own validation


def test_validation_runs_after_the_overlay(error_of):
    message = error_of("[checkpoint]\ninterval = 0\n")
    assert message == "x.toml: [checkpoint] Checkpoint interval needs to be at least 1 step."


def test_validation_of_the_whole(error_of):
    message = error_of(
        "[training]\ndisable_cuda_graphs = false\n[parallelism]\npipeline_parallel_degree = 2\n"
    )
    assert message == (
        "x.toml: CUDA graphs do not support pipeline parallelism yet. "
        "Set --training.disable_cuda_graphs."
    )


def test_validation_by_assertion(error_of):
    message = error_of("[validator]\nsteps = 0\n")
    assert message == "x.toml: [validator] validation steps must be positive or -1"


def test_command_line_repairs_the_file(write):
    path = write(
        "[training]\ndisable_cuda_graphs = false\n[parallelism]\npipeline_parallel_degree = 2\n"
    )
    config = load_job(path, ["--training.disable_cuda_graphs"]).config
    assert config.parallelism.pipeline_parallel_degree == 2


# CUDA graphs, which nobody has to think of


@pytest.mark.parametrize(
    "text, header",
    [
        ("[parallelism]\npipeline_parallel_degree = 2\n", HEADER),
        ('[lifecycle]\ngradient_reduction = "last_microbatch"\n', HEADER),
        ("[lifecycle]\nretain_weights = true\n", HEADER),
        (
            "[parallelism]\nexpert_parallel_degree = 2\ndata_parallel_shard_degree = 2\n",
            HEADER.replace("llama3", "deepseek_v3"),
        ),
    ],
)
def test_cuda_graphs_are_disabled_where_a_job_cannot_be_captured(write, text, header):
    loaded = load_job(write(text, header), transform=plugin_config)
    assert loaded.config.training.disable_cuda_graphs
    assert loaded.sources["training.disable_cuda_graphs"] == "titan_lifecycle"
    # Written in the file, the other choice is refused with its remedy.
    with pytest.raises(JobError, match=r"[Ss]et (--)?training\.disable_cuda_graphs"):
        load_job(
            write(f"{text}[training]\ndisable_cuda_graphs = false\n", header),
            transform=plugin_config,
        )


def test_cuda_graphs_are_disabled_for_what_the_command_line_asks(write):
    path = write("")
    loaded = load_job(path, ["--lifecycle.retain-weights"], transform=plugin_config)
    assert loaded.config.training.disable_cuda_graphs
    with pytest.raises(SystemExit):
        load_job(
            path,
            ["--lifecycle.retain-weights", "--training.no-disable-cuda-graphs"],
            transform=plugin_config,
        )


def test_cuda_graphs_stay_where_a_job_can_be_captured(write):
    loaded = load_job(write("[training]\nsteps = 3\n"), transform=plugin_config)
    assert not loaded.config.training.disable_cuda_graphs
    assert loaded.sources["training.disable_cuda_graphs"] == "registry"


# Degrees


@pytest.mark.parametrize(
    ("degrees", "world_size", "message"),
    [
        (
            "tensor_parallel_degree = 3",
            4,
            "x.toml: the parallel degrees do not multiply to the 4 processes of this job: "
            "data_parallel_replicate_degree 1 x data_parallel_shard_degree -1 x "
            "context_parallel_degree 1 x tensor_parallel_degree 3 (x.toml:5) x "
            "pipeline_parallel_degree 1",
        ),
        (
            "data_parallel_shard_degree = 2\ncontext_parallel_degree = 3",
            4,
            "x.toml: the parallel degrees do not multiply to the 4 processes of this job: "
            "data_parallel_replicate_degree 1 x data_parallel_shard_degree 2 (x.toml:5) x "
            "context_parallel_degree 3 (x.toml:6) x tensor_parallel_degree 1 x "
            "pipeline_parallel_degree 1 = 6",
        ),
        (
            "data_parallel_replicate_degree = 8",
            4,
            "x.toml: the parallel degrees do not multiply to the 4 processes of this job: "
            "data_parallel_replicate_degree 8 (x.toml:5) x data_parallel_shard_degree -1 x "
            "context_parallel_degree 1 x tensor_parallel_degree 1 x pipeline_parallel_degree 1",
        ),
        (
            "tensor_parallel_degree = 0",
            4,
            "x.toml: tensor_parallel_degree 0 (x.toml:5) must be at least 1",
        ),
        (
            "data_parallel_shard_degree = -2",
            4,
            "x.toml: data_parallel_shard_degree -2 (x.toml:5) must be at least 1",
        ),
    ],
)
def test_degrees(write, degrees, world_size, message):
    with pytest.raises(JobError) as caught:
        load_job(write(f"[parallelism]\n{degrees}\n"), world_size=world_size)
    assert str(caught.value) == message


def test_expert_degree(write):
    text = "[training]\ndisable_cuda_graphs = true\n[parallelism]\nexpert_parallel_degree = 3\n"
    with pytest.raises(JobError) as caught:
        load_job(write(text), world_size=4)
    assert str(caught.value) == (
        "x.toml: expert_parallel_degree 3 (x.toml:7) must divide data_parallel_shard_degree 4 x "
        "context_parallel_degree 1 x tensor_parallel_degree 1 = 4"
    )


def test_degrees_that_fit(write):
    text = "data_parallel_replicate_degree = 2\ntensor_parallel_degree = 2\n"
    loaded = load_job(write(f"[parallelism]\n{text}"), world_size=8)
    assert (loaded.world_size, loaded.loss_rank, loaded.num_pipeline_stages) == (8, 0, 1)
    # The leftover degree stays -1 in the config: torchtitan resolves it in the worker.
    assert loaded.config.parallelism.data_parallel_shard_degree == -1


# Precedence and sources


def test_precedence(write):
    path = write("[training]\nlocal_batch_size = 3\nseq_len = 64\n")
    loaded = load_job(
        path,
        ["--training.seq-len", "32", "--metrics.no-enable-tensorboard", "--dump_folder=out"],
        device_defaults={"training.local_batch_size": 5, "training.gc_freq": 7},
    )
    training = loaded.config.training
    assert (training.steps, loaded.sources["training.steps"]) == (10, "registry")
    assert (training.gc_freq, loaded.sources["training.gc_freq"]) == (7, "cpu backend")
    assert (training.local_batch_size, loaded.sources["training.local_batch_size"]) == (
        3,
        "x.toml:5",
    )
    assert (training.seq_len, loaded.sources["training.seq_len"]) == (32, "command line")
    # Given, though it is the registry's value already.
    assert loaded.config.metrics.enable_tensorboard is False
    assert loaded.sources["metrics.enable_tensorboard"] == "command line"
    assert (loaded.config.dump_folder, loaded.sources["dump_folder"]) == ("out", "command line")


def test_every_field_has_a_source(write):
    loaded = load_job(write(""))
    assert set(loaded.sources) == {path for path, _ in overlay.leaves(loaded.config)}
    assert set(loaded.sources.values()) == {"registry"}


def test_command_line_swaps_what_the_file_swapped(write):
    path = write(
        "[activation_checkpoint]\ntype = 'full'\npreserve_rng_state = true\ndebug = true\n"
    )
    subcommand = ["activation-checkpoint:memory-budget"]
    subcommand += ["--activation-checkpoint.memory-budget", "0.25"]
    loaded = load_job(path, ["--compile.enable", *subcommand])
    assert loaded.config.activation_checkpoint.memory_budget == 0.25
    assert loaded.config.activation_checkpoint.debug is False
    assert loaded.sources["activation_checkpoint.debug"] == "command line"
    # The same value as in the file, but now the default of the class that the flag chose.
    assert loaded.sources["activation_checkpoint.preserve_rng_state"] == "command line"


@pytest.mark.parametrize("flag", ["--module", "--config", "--config=x", "--job.device"])
def test_header_is_not_for_the_command_line(error_of, flag):
    assert error_of("", flag, "llama3") == (
        f"{flag.partition('=')[0]} is not for the command line: x.toml sets it in its [job] table"
    )


def test_usage_error_on_the_command_line(write, capsys):
    with pytest.raises(SystemExit) as caught:
        load_job(write(""), ["--training.stps", "3"])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert "--training.stps" in captured.out + captured.err
    assert "(job file x.toml with the command line applied)" in captured.err


def test_transform_comes_first(write):
    """A section that a transform adds is one like any other."""
    from torchtitan.trainer import Trainer

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Extra:
        chunks: int = 1
        name: str = "a"

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        extra: Extra = dataclasses.field(default_factory=Extra)

        def __post_init__(self):
            Trainer.Config.__post_init__(self)
            if self.extra.chunks == 0:
                raise ValueError("chunks")

    def transform(config):
        fields = dataclasses.fields(config)
        return Config(**{field.name: getattr(config, field.name) for field in fields})

    loaded = load_job(write("[extra]\nchunks = 4\n"), transform=transform)
    assert loaded.config.extra == Extra(chunks=4)
    assert loaded.sources["extra.chunks"] == "x.toml:5"
    assert loaded.sources["extra.name"] == "titan_lifecycle"
    assert loaded.sources["training.steps"] == "registry"
    with pytest.raises(JobError, match=r"x\.toml: chunks"):
        load_job(write("[extra]\nchunks = 0\n"), transform=transform)


def test_registry_config_is_not_changed(write, module):
    """A registry may hand out one object again and again."""
    header = module(
        "sharing_registry",
        "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
        "shared = llama3_debugmodel()\n"
        "def make():\n    return shared\n",
    )
    text = "[training]\nsteps = 3\n[validator.dataloader]\ninfinite = true\n"
    assert load_job(write(text, header)).config.training.steps == 3
    assert load_job(write("", header)).config.training.steps == 10
    assert load_job(write("", header)).config.validator.dataloader.infinite is False


# Components


def load(write, text, **kwargs):
    return load_job(write(text), **kwargs).config


def test_union_by_subcommand_name(write):
    from torchtitan.distributed.activation_checkpoint import FullAC

    config = load(write, "[activation_checkpoint]\ntype = 'full'\ndebug = true\n")
    assert config.activation_checkpoint == FullAC.Config(debug=True)


def test_union_member_keeps_shared_fields(write, module):
    header = module(
        "ac_registry",
        "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
        "def make():\n"
        "    config = llama3_debugmodel()\n"
        "    config.activation_checkpoint.determinism_check = 'none'\n"
        "    return config\n",
    )
    config = load_job(write("[activation_checkpoint]\ntype = 'full'\n", header)).config
    assert config.activation_checkpoint.determinism_check == "none"


@pytest.mark.parametrize(
    "text",
    [
        "activation_checkpoint = 'none'\n" + HEADER,
        HEADER + "[activation_checkpoint]\ntype = 'none'\n",
    ],
)
def test_union_member_none(write, text):
    assert load_job(write(text, header="")).config.activation_checkpoint is None


def test_none_takes_no_keys(error_of):
    message = error_of("[activation_checkpoint]\ntype = 'none'\ndebug = true\n")
    assert message == (
        "x.toml:4: [activation_checkpoint] is none and takes no other key; found 'debug'"
    )


def test_section_of_none_needs_a_type(error_of, write, module):
    header = module(
        "no_ac_registry",
        "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
        "def make():\n"
        "    config = llama3_debugmodel()\n"
        "    config.activation_checkpoint = None\n"
        "    return config\n",
    )
    text = "[activation_checkpoint]\ndebug = true\n"
    assert error_of(text, header=header) == (
        "x.toml:4: [activation_checkpoint] is none in this config, so it needs a type: "
        "'selective', 'full', 'memory-budget', 'none', the import path of a Configurable"
    )
    config = load_job(write(text + "type = 'full'\n", header)).config
    assert config.activation_checkpoint.debug is True


def test_unknown_union_member(error_of):
    message = error_of("[activation_checkpoint]\ntype = 'ful'\n")
    assert message == (
        "x.toml:5: unknown type 'ful'; did you mean 'full'? Expected 'selective', 'full', "
        "'memory-budget', 'none', the import path of a Configurable"
    )


def test_component_by_import_path(write):
    from torchtitan.components.loss import CrossEntropyLoss

    loaded = load_job(
        write(
            '[loss]\ntype = "torchtitan.components.loss.CrossEntropyLoss"\nglobal_vocab_size = 9\n'
        )
    )
    assert loaded.config.loss == CrossEntropyLoss.Config(global_vocab_size=9)
    assert loaded.sources["loss"] == "x.toml:5"
    assert loaded.sources["loss.global_vocab_size"] == "x.toml:6"


def test_swapped_component_keeps_what_both_inherit(write, module):
    """num_workers comes from a common base; infinite is declared by both, each for itself."""
    module(
        "my_loader",
        "from dataclasses import dataclass\n"
        "from torchtitan.components.dataloader import ParallelAwareDataloader\n"
        "class Loader(ParallelAwareDataloader):\n"
        "    @dataclass(kw_only=True, slots=True)\n"
        "    class Config(ParallelAwareDataloader.Config):\n"
        "        infinite: bool = False\n",
    )
    defaults = {"dataloader.num_workers": 3, "dataloader.infinite": True}
    config = load(write, "[dataloader]\ntype = 'my_loader.Loader'\n", device_defaults=defaults)
    assert config.dataloader.num_workers == 3
    assert config.dataloader.infinite is False


def test_array_of_tables(write):
    from torchtitan.hf_datasets.text_datasets import InterleavedHuggingFaceTextDataLoader

    text = (
        "[dataloader]\n"
        'type = "torchtitan.hf_datasets.text_datasets.InterleavedHuggingFaceTextDataLoader"\n'
        "[[dataloader.sources]]\n"
        'dataset = "c4_test"\nweight = 2\n'
        "[[dataloader.sources]]\n"
        'dataset = "c4"\n'
    )
    config = load(write, text)
    assert isinstance(config.dataloader, InterleavedHuggingFaceTextDataLoader.Config)
    assert [(s.dataset, s.weight) for s in config.dataloader.sources] == [("c4_test", 2), ("c4", 1)]


def test_same_type_keeps_the_value(write):
    loaded = load_job(write('[loss]\ntype = "torchtitan.components.loss.ChunkedLossWrapper"\n'))
    assert loaded.config.loss == load(write, "").loss
    assert loaded.sources["loss.num_chunks"] == "registry"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("torchtitan.components.loss.MSELos", "torchtitan.components.loss has no 'MSELos'; did"),
        ("torchtitan.components.los.MSELoss", "torchtitan.components has no 'los.MSELoss'; did"),
        ("torchtitan.components.tokenizer.HuggingFaceTokenizer", "does not fit 'loss', which"),
        ("no_such_package.Loss", "unknown type 'no_such_package.Loss'. Expected the import path"),
    ],
)
def test_component_that_does_not_fit(error_of, kind, message):
    text = f'[loss]\ntype = "{kind}"\n'
    assert error_of(text).startswith("x.toml:5: ")
    assert message in error_of(text)


def test_component_in_a_broken_module(error_of, module):
    module("broken_loss", "import no_such_dependency\n")
    message = error_of("[loss]\ntype = 'broken_loss.Loss'\n")
    assert message.startswith(
        "x.toml:5: 'broken_loss' exists but failed to import: "
        "ModuleNotFoundError: No module named 'no_such_dependency' (at "
    )


def test_component_with_a_required_field(error_of):
    message = error_of(
        '[dataloader]\ntype = "torchtitan.hf_datasets.text_datasets.ChatDataLoader"\n'
    )
    assert message == (
        "x.toml:4: [dataloader] of type ChatDataLoader.Config needs a value for "
        "'sample_processor', which only Python code can set"
    )


def test_type_must_be_a_string(error_of):
    assert error_of("[loss]\ntype = 3\n") == (
        "x.toml:5: 'loss.type' must be the import path of a Configurable; found the integer 3"
    )


@pytest.mark.parametrize("spelling", ["none", "None"])
def test_none_for_an_optional_field(write, spelling):
    text = f'[parallelism]\ncontext_parallel_load_balancer = "{spelling}"\n'
    assert load(write, text).parallelism.context_parallel_load_balancer is None
    text = f'[lr_scheduler]\ndecay_ratio = "{spelling}"\n'
    assert load(write, text).lr_scheduler.decay_ratio is None


def test_empty_string_is_no_none(write):
    config = load(write, '[parallelism]\npipeline_parallel_schedule_csv = ""\n')
    assert config.parallelism.pipeline_parallel_schedule_csv == ""


@pytest.mark.parametrize(
    "entry", [f'["{OVERRIDE}", {{ a = 1 }}]', f'{{ target = "{OVERRIDE}", kwargs = {{ a = 1 }} }}']
)
def test_override_imports(write, entry):
    config = load(write, f'[override]\nimports = ["{OVERRIDE}", {entry}]\n')
    assert config.override.imports == [OVERRIDE, (OVERRIDE, {"a": 1})]
    config = load(write, f'[override]\nimports = [{{ target = "{OVERRIDE}" }}]\n')
    assert config.override.imports == [(OVERRIDE, {})]


def test_override_imports_wrong_entry(error_of):
    message = error_of("[override]\nimports = [{ name = 'a.b' }]\n")
    assert message.startswith(
        "x.toml:5: 'override.imports' must be an array whose entries are each a string or "
        "an array of (a string, a table); found the array"
    )


def test_override_imports_of_no_module(error_of):
    message = error_of("[override]\nimports = ['torchtitan.overrides.fused_swiglo.fused']\n")
    assert message == (
        "x.toml:5: override.imports 'torchtitan.overrides.fused_swiglo.fused': there is no module "
        "'torchtitan.overrides.fused_swiglo'; expected module.function of an @override"
    )


def test_param_groups(write):
    text = (
        "[[optimizer.param_groups]]\n"
        'pattern = ".*"\noptimizer_name = "AdamW"\n'
        "optimizer_kwargs = { lr = 1e-3, betas = [0.9, 0.99] }\n"
    )
    (group,) = load(write, text).optimizer.param_groups
    assert group.optimizer_kwargs == {"lr": 1e-3, "betas": [0.9, 0.99]}


def test_param_group_with_a_key_missing(error_of):
    message = error_of("[[optimizer.param_groups]]\noptimizer_kwargs = { lr = 1e-3 }\n")
    assert message.startswith("x.toml:4: [optimizer.param_groups.0] of type ParamGroupConfig needs")


def test_package_prefix(write):
    package = shipped_files.PACKAGE
    text = 'hf_assets_path = "{package}/assets/tokenizer"\n' + HEADER
    text += "[optimizer.optimizer_factory_kwargs_by_name.AdamW]\n"
    text += 'files = ["{package}/a", "{other}/b"]\n'
    config = load_job(write(text, header="")).config
    assert config.hf_assets_path == str(package / "assets/tokenizer")
    kwargs = config.optimizer.optimizer_factory_kwargs_by_name["AdamW"]
    assert kwargs == {"files": [str(package / "a"), "{other}/b"]}


def test_class_paths_of_earlier_releases_load(write):
    """What `titan-lifecycle config` has printed as `type`, before the modules were moved."""
    for old, new in moved.RENAMED_CLASSES.items():
        if old.endswith("MetricsProcessor"):
            config = load_job(write(f'[metrics]\ntype = "{old}"\n')).config.metrics
        else:
            text = f'[loss]\ntype = "{old}"\n'
            if old.endswith("MTPChunkedLoss"):
                text += '[loss.loss_fn]\ntype = "torchtitan.models.deepseek_v3.mtp.MTPLoss"\n'
            config = load_job(write(text)).config.loss
        module, _, name = new.rpartition(".")
        assert (type(config).__module__, type(config)._owner.__name__) == (module, name)


# Rendering


def _job(module, config):
    return f'[job]\nmodule = "{module}"\nconfig = "{config}"\n'


REGISTRY = [
    _job("llama3", "llama3_debugmodel"),
    _job("llama3", "llama3_debugmodel_ce_loss"),
    _job("llama3", "llama3_debugmodel_varlen_attn"),
    _job("llama3", "sft_debugmodel"),
    _job("llama3", "llama3_8b"),
    _job("qwen3", "qwen3_debugmodel"),
    _job("qwen3", "qwen3_debugmodel_moe_param_groups"),
    _job("qwen3", "qwen3_moe_debug"),
    _job("deepseek_v3", "deepseek_v3_debugmodel"),
    _job("deepseek_v3", "deepseek_v3_debugmodel_mtp"),
    _job("gpt_oss", "gpt_oss_debugmodel"),
    _job("gpt_oss", "gpt_oss_debugmodel_flex"),
    _job("muse_glimmer", "muse_glimmer_debugmodel"),
]


def plain(value):
    """Trees without the model, and with lists for tuples: under Any, TOML has but arrays."""
    if overlay.is_section(value):
        fields = [f.name for f in dataclasses.fields(value) if f.name != "model_spec"]
        return type(value), {name: plain(getattr(value, name)) for name in fields}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    # The functions of two calls of a config function are two.
    return value.__qualname__ if callable(value) else value


EVERYTHING = f"""
[training]
steps = 3
[activation_checkpoint]
type = "full"
[lr_scheduler]
decay_ratio = "none"
[checkpoint]
folder = 'a "quoted"\\ näme'
[override]
imports = ["{OVERRIDE}", ["{OVERRIDE}", {{ "a key" = [1, inf], b = {{ c = true }} }}]]
[[optimizer.param_groups]]
pattern = ".*"
optimizer_name = "Adam"
optimizer_kwargs = {{ lr = 1e-30 }}
[dataloader]
type = "torchtitan.hf_datasets.text_datasets.InterleavedHuggingFaceTextDataLoader"
[[dataloader.sources]]
weight = 2
"""


@pytest.mark.parametrize("header", REGISTRY, ids=lambda header: header.split('"')[3])
@pytest.mark.parametrize("text", ["", EVERYTHING], ids=["registry", "overlaid"])
def test_rendering_loads_to_the_same_config(write, header, text):
    first = load_job(write(text, header), device_defaults={"training.disable_cuda_graphs": True})
    text = render(first)
    second = load_job(write(text, header=""))
    assert plain(second.config) == plain(first.config)
    assert second.header.module == first.header.module
    # Everything is spelled out, but for what cannot be.
    assert {p for p, s in second.sources.items() if s == "registry"} <= {
        p for p, s in first.sources.items() if s == "registry"
    }


def test_rendering_shows_sources(write):
    path = write(
        "nproc_per_node = 2\n[training]\nsteps = 3\n[activation_checkpoint]\ntype='full'\n"
    )
    lines = render(load_job(path, ["--training.seq_len", "32"])).splitlines()
    for line in (
        'hf_assets_path = "./tests/assets/tokenizer"  # registry',
        'module = "llama3"  # x.toml:2',
        "nproc_per_node = 2  # x.toml:4",
        'device = "auto"  # default',
        "steps = 3  # x.toml:6",
        "seq_len = 32  # command line",
        'type = "full"  # x.toml:8',
        '# seed = "none"  # registry',
        "# model_spec is set by the config function",
    ):
        assert line in lines


def test_values_toml_cannot_express():
    assert toml({"a": None}) is None
    assert toml([print]) is None
    assert toml("\x7f\n") == '"\\u007f\\n"'


# Shipped jobs


def test_resolve_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = {"llama3_fsdp": tmp_path / "configs/llama3_fsdp.toml"}
    monkeypatch.setattr(shipped_files, "shipped_jobs", lambda: shipped)
    (tmp_path / "mine.toml").write_text(HEADER)
    assert resolve_job("mine.toml") == Path("mine.toml")
    assert resolve_job("llama3_fsdp") == shipped["llama3_fsdp"]
    with pytest.raises(JobError) as caught:
        resolve_job("llama3_fsd")
    assert str(caught.value) == (
        "llama3_fsd: no such job file; did you mean 'llama3_fsdp'? Shipped jobs: llama3_fsdp"
    )


def test_shipped_jobs_lie_beside_or_in_the_package(tmp_path, monkeypatch):
    package = tmp_path / "titan_lifecycle"
    for folder in (tmp_path / "configs", package / "configs"):
        folder.mkdir(parents=True)
        (folder / "a.toml").write_text(HEADER)
    monkeypatch.setattr(shipped_files, "PACKAGE", package)
    assert shipped_files.shipped_jobs() == {"a": package / "configs/a.toml"}
    (package / "configs/a.toml").unlink()
    (package / "configs").rmdir()
    assert shipped_files.shipped_jobs() == {"a": tmp_path / "configs/a.toml"}
