"""Scripts run without the compiler and give the numbers of the pipeline they were written from."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fxpipe
from fxpipe.errors import FxpipeError, InputError, OptionError, RankError, ScheduleError
from fxpipe.runtime import script
from tests.emit.models import Mlp, cases
from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]


def make(case, **options):
    torch.manual_seed(0)
    return fxpipe.compile(case.model(), loss=case.loss, **{**case.options, **options})


def emit(case, pipe, folder, **options):
    return pipe.emit(folder, args=case.args, kwargs=case.kwargs, target=case.target, **options)


def numbers_of(pipe, step):
    """Losses of two steps of SGD, and what they leave of parameters, gradients and buffers."""
    optimizer = torch.optim.SGD([{"params": list(pipe.parameters())}], lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(step().loss)
        optimizer.step()
    state = {name: (p.detach(), p.grad) for name, p in pipe.named_parameters()}
    return losses, state, dict(pipe.named_buffers())


def numbers_of_scripts(folder, ranks):
    inputs, target = torch.load(folder / "batch.pt")
    with script.load(folder, ranks) as pipe:
        return numbers_of(pipe, lambda: pipe.step(*inputs, target=target))


def assert_same(found, expected):
    for loss, wanted in zip(found[0], expected[0], strict=True):
        assert torch.equal(loss, wanted)
    for name, (value, gradient) in found[1].items():
        assert torch.equal(value, expected[1][name][0]), name
        assert torch.equal(gradient, expected[1][name][1]), name
    for name, buffer in found[2].items():
        assert torch.equal(buffer, expected[2][name]), name


@pytest.mark.parametrize("name", cases())
def test_two_steps_of_scripts_in_one_process_give_the_bits_of_the_pipeline(name, tmp_path):
    case = cases()[name]
    pipe = make(case)
    emit(case, pipe, tmp_path)
    expected = numbers_of(pipe, lambda: pipe.step(*case.args, target=case.target, **case.kwargs))
    found = numbers_of_scripts(tmp_path, pipe.options.ranks)
    assert [found[1].keys(), found[2].keys()] == [expected[1].keys(), expected[2].keys()]
    assert_same(found, expected)


@pytest.mark.parametrize("name", cases())
def test_two_steps_of_scripts_on_many_ranks_give_the_bits_of_the_pipeline(name, tmp_path):
    case = cases()[name]
    pipe = make(case)
    emit(case, pipe, tmp_path)
    expected = numbers_of(pipe, lambda: pipe.step(*case.args, target=case.target, **case.kwargs))
    ranks = pipe.options.ranks
    parts = run_ranks(ranks, lambda rank: numbers_of_scripts(tmp_path, ranks))
    for part in parts:
        assert_same(part, expected)
    assert {n for part in parts for n in part[1]} == expected[1].keys()
    assert {n for part in parts for n in part[2]} == expected[2].keys()


def test_a_script_holds_sizes_that_differ_by_microbatch(tmp_path):
    case = cases()["written"]
    pipe = make(case)
    emit(case, pipe, tmp_path)
    text = (tmp_path / "rank_1.py").read_text()
    assert re.findall(r"sizes=(.*),", text) == ["(0,)", "(6,)", "(4,)"]
    assert "written=True" in text


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


# 10 to 30 s: four processes, and the one that starts them, import torch
def test_torchrun_prints_the_losses_of_the_pipeline(tmp_path):
    case = cases()["skip"]
    pipe = make(case)
    path = emit(case, pipe, tmp_path)
    losses, *_ = numbers_of(pipe, lambda: pipe.step(*case.args, target=case.target, **case.kwargs))
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "4", str(path), "--steps", "2"]
    result = subprocess.run(
        [sys.executable, *command], env=environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"step 0 loss {losses[0].item()!r}\nstep 1 loss {losses[1].item()!r}\n"


# 3 s and more: a process of its own imports torch
def test_a_script_runs_without_a_module_of_the_compiler(tmp_path):
    case = cases()["normed"]
    path = emit(case, make(case), tmp_path)
    code = f"""
import runpy, sys
runpy.run_path({str(path)!r}, run_name="__main__")
print(sorted(name for name in sys.modules if name.split(".")[0] in ("fxpipe", "tests")))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    *printed, modules = result.stdout.splitlines()
    assert [line.split()[:3] for line in printed] == [["step", "0", "loss"]]
    allowed = r"fxpipe(\.(compat|errors|log|ops|tree|(runtime|schedule)(\..*)?))?"
    assert not [name for name in ast.literal_eval(modules) if not re.fullmatch(allowed, name)]


@pytest.mark.parametrize("name", cases())
def test_scripts_import_torch_the_standard_library_and_the_runtime_alone(name, tmp_path):
    case = cases()[name]
    emit(case, make(case), tmp_path)
    imported = set()
    for path in tmp_path.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
    roots = {name.split(".")[0] for name in imported - {"fxpipe.runtime"}}
    assert roots <= {"torch", *sys.stdlib_module_names}


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("name", cases())
def test_the_step_of_a_script_performs_the_program_of_its_rank(name, unroll, tmp_path):
    case = cases()[name]
    pipe = make(case)
    emit(case, pipe, tmp_path, unroll=unroll)
    for rank in range(pipe.options.ranks):
        text = (tmp_path / f"rank_{rank}.py").read_text()
        names = {}
        exec(compile(text, f"rank_{rank}.py", "exec"), names)
        assert names["SCRIPT"].program == pipe.program(rank)


def test_the_order_is_loops_unless_it_is_unrolled():
    case = cases()["skip"]
    pipe = make(case, microbatches=8)
    batch = {"args": case.args, "kwargs": case.kwargs, "target": case.target}
    assert "    for k in range(" in pipe.code(1, **batch)
    assert "    for k in range(" not in pipe.code(1, **batch, unroll=True)


def without_versions(text):
    text = re.sub(
        r"by fxpipe \S+ with torch [^\s;]+", "by fxpipe <version> with torch <version>", text
    )
    return re.sub(r'emission="\w+"', 'emission="<digest>"', text)


def test_the_script_of_the_last_rank(golden):
    torch.manual_seed(0)
    pipe = fxpipe.compile(Mlp(), 2, loss=F.cross_entropy, microbatches=6, cuts=["narrow"])
    batch = torch.zeros(14, 4), torch.zeros(14, dtype=torch.int64)
    golden(without_versions(pipe.code(1, args=batch[:1], target=batch[1])))


def test_run_py(golden, tmp_path):
    case = cases()["skip"]
    golden(without_versions(emit(case, make(case), tmp_path).read_text()))


def test_code_is_the_text_that_emit_writes(tmp_path):
    case = cases()["tied"]
    pipe = make(case)
    emit(case, pipe, tmp_path)
    for rank in range(3):
        code = pipe.code(rank, args=case.args, kwargs=case.kwargs, target=case.target)
        assert code == (tmp_path / f"rank_{rank}.py").read_text()


def test_without_a_batch_the_scripts_are_for_microbatches_like_the_traced_one(tmp_path):
    pipe = fxpipe.compile(
        Mlp(), 2, loss=F.cross_entropy, microbatches=2, example_inputs=((torch.zeros(6, 4),), {})
    )
    path = pipe.emit(tmp_path)
    assert not (tmp_path / "batch.pt").exists()
    assert "x: f32[3, 4]" in path.read_text()
    x, y = torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)
    expected = pipe.step(x, target=y)
    with script.load(tmp_path, 2) as scripts:
        assert torch.equal(scripts.step(x, target=y).loss, expected.loss)
        with pytest.raises(InputError, match=re.escape("microbatches of [[3, 4]]")):
            scripts.step(x[:5], target=y[:5])


def test_run_py_without_a_batch_says_how_to_give_it_one(tmp_path):
    pipe = fxpipe.compile(Mlp(), 1, loss=F.cross_entropy, example_inputs=((torch.zeros(6, 4),), {}))
    names = {"__name__": "run", "__file__": str(tmp_path / "run.py")}
    exec(compile(pipe.emit(tmp_path).read_text(), "run.py", "exec"), names)
    with pytest.raises(SystemExit, match=r"no batch: torch.save\(\(inputs, target\), .*batch.pt"):
        names["next_batch"]("cpu")


def test_in_eval_mode_scripts_run_forward_alone(tmp_path):
    case = cases()["normed"]
    pipe = make(case).eval()
    pipe.emit(tmp_path, args=case.args)
    with script.load(tmp_path, 2) as scripts:
        result = scripts.step(*case.args)
    expected = pipe(*case.args)
    assert result.loss is None
    assert result.output.keys() == {"output['logits']", "output['parts'][0]", "output['parts'][1]"}
    assert torch.equal(result.output["output['logits']"], expected["logits"])


def test_in_eval_mode_a_target_gives_a_loss(tmp_path):
    case = cases()["normed"]
    pipe = make(case).eval()
    emit(case, pipe, tmp_path)
    with script.load(tmp_path, 2) as scripts:
        result = scripts.step(*case.args, target=case.target)
    assert torch.equal(result.loss, pipe.step(*case.args, target=case.target).loss)


def test_scripts_start_from_what_training_has_made_of_the_parameters(tmp_path):
    case = cases()["tied"]
    pipe = make(case)
    numbers_of(pipe, lambda: pipe.step(*case.args, target=case.target))
    emit(case, pipe, tmp_path)
    with script.load(tmp_path, 3) as scripts:
        found = dict(scripts.named_parameters())
    expected = dict(pipe.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_batch_unlike_the_one_that_was_emitted_is_refused(tmp_path):
    case = cases()["skip"]
    emit(case, make(case), tmp_path)
    inputs = [*case.args, *case.kwargs.values()]
    with script.load(tmp_path, 4) as scripts:
        with pytest.raises(InputError, match="1 inputs are given, and the model takes 2"):
            scripts.step(inputs[0], target=case.target)
        with pytest.raises(InputError, match="the target is "):
            scripts.step(*inputs, target=case.target.double())
        with pytest.raises(InputError, match="emit again with a batch of this shape"):
            scripts.step(
                *(torch.cat([x, x]) for x in inputs), target=torch.cat([case.target, case.target])
            )


def test_scripts_of_two_emissions_do_not_run_together(tmp_path):
    case = cases()["skip"]
    emit(case, make(case), tmp_path)
    emit(case, make(case, microbatches=2), tmp_path / "other")
    (tmp_path / "rank_2.py").write_text((tmp_path / "other" / "rank_2.py").read_text())
    with pytest.raises(InputError, match="rank 0 and of ranks 2 were not written together"):
        script.load(tmp_path, 4)


def test_a_changed_order_that_cannot_work_is_refused_before_it_runs(tmp_path):
    case = cases()["skip"]
    emit(case, make(case), tmp_path)
    path = tmp_path / "rank_3.py"
    path.write_text(path.read_text().replace("    p.SEND_B(3, 3)\n", ""))
    with pytest.raises(ScheduleError, match="3SEND_B3"):
        script.load(tmp_path, 4)


def test_an_error_names_the_line_of_the_script(tmp_path):
    case = cases()["skip"]
    emit(case, make(case), tmp_path)
    path = tmp_path / "rank_1.py"
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("def stage_1"))
    lines.insert(at + 1, "    raise ValueError('boom')")
    path.write_text("\n".join(lines))
    with script.load(tmp_path, 4) as scripts, pytest.raises(RankError, match="boom") as raised:
        scripts.step(*case.args, *case.kwargs.values(), target=case.target)
    assert "stage 1" in raised.value.at
    assert f"rank_1.py:{at + 2}" in raised.value.at


def test_a_target_without_its_batch_is_refused():
    pipe = fxpipe.compile(Mlp(), 2, example_inputs=((torch.zeros(6, 4),), {}))
    with pytest.raises(OptionError, match="a target is given without its batch"):
        pipe.code(0, target=torch.zeros(6))


def test_nothing_is_written_down_before_a_batch_is_seen(tmp_path):
    with pytest.raises(FxpipeError, match="not compiled yet"):
        fxpipe.compile(Mlp(), 2).emit(tmp_path)
