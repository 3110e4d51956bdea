"""How long products take on a host: by their shapes, and by the kernel that makes them; and how that is measured."""

from dataclasses import replace

import numpy as np
import pytest

from spmd_engine import run_threads
from spmd_engine.arrays.meta.meter import CONVOLUTION, CONVOLUTION_WEIGHTS
from spmd_engine.comm.mesh import Mesh
from spmd_engine.engine.model_config import ModelConfig
from spmd_engine.engine.parallel_config import ParallelConfig
from spmd_engine.planning import analyze
from spmd_engine.planning.dry_run.step_analysis import Computation, Phases, Product, Products
from spmd_engine.planning.machine import measure
from spmd_engine.planning.machine.machine import Curve, Fitted, parse_machine, read_machine, toml_of
from spmd_engine.planning.simulator.step_evaluation import evaluate_step
from spmd_engine.planning.simulator.times import ComputeTimes, bytes_of
from support.script_module import script


def host(**speeds):
    """A host whose cubes of width w reach w GFLOP/s, and whose memory moves 10 GB/s."""
    cubes = Curve(tuple((2.0 * w**3, w * 1e9) for w in (8, 64, 512)))
    machine = replace(read_machine("cpu").with_ranks(1), fitted=Fitted())
    node = replace(machine.nodes[0], speeds={"float32": cubes, **speeds}, memory_bandwidth=Curve.flat(1e10))
    return replace(machine, nodes=(node,))


def seconds(machine, product):
    return ComputeTimes(machine).of(
        0, Computation("", "", Phases.FORWARD, products=Products([product]), calls=product.calls)
    )


@pytest.mark.parametrize("shape", [(4096, 24, 48), (24, 4096, 48), (48, 24, 4096)])
def test_a_narrow_product_is_as_fast_as_the_cube_of_its_harmonic_mean(shape):
    width = 3 / sum(1 / length for length in shape)
    found = seconds(host(), Product(*shape))
    assert found.products == pytest.approx(2 * np.prod(shape) / (width * 1e9)) and found.rest == 0


def test_a_product_with_a_vector_takes_as_long_as_its_bytes():
    product = Product(1, 512, 4096)
    assert seconds(host(), product).rest == pytest.approx(bytes_of(product) / 1e10)


def test_convolutions_have_speeds_of_their_own_where_a_machine_has_them():
    machine = host(convolution=Curve.flat(2e9), convolution_weights=Curve.flat(1e9))
    assert toml_of(parse_machine(toml_of(machine))) == toml_of(machine)
    product = Product(4096, 64, 64, kernel=CONVOLUTION)
    assert seconds(machine, product).products == product.flops / 2e9
    assert seconds(machine, replace(product, kernel=CONVOLUTION_WEIGHTS)).products == product.flops / 1e9
    assert seconds(host(), product) == seconds(host(), replace(product, kernel=""))


def test_a_step_of_images_says_which_kernels_make_its_products(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setenv("SPMD_FAST", "1")
    steps = analyze(ModelConfig("convnet"), {"data": 1}, batch_size=4).classes[0].step.computations
    kernels = {product.kernel for each in steps for product in each.products}
    assert kernels == {"", CONVOLUTION, CONVOLUTION_WEIGHTS}


def test_two_ranks_measure_at_once(monkeypatch):
    sizes = {"PRODUCTS": (8, 32), "ARRAYS": (1 << 10, 1 << 12), "IMAGES": (1,), "POOL": 1 << 16}
    for name, small in {**sizes, "DISK": 1 << 24, "BLOCK": 1 << 20}.items():
        monkeypatch.setattr(measure, name, small)

    def program():
        with Mesh(data=2) as mesh:
            return measure.measure_machine(mesh, seconds=0.01)

    machine, other = run_threads(program, ranks=2)
    assert other is None
    node = machine.nodes[0]
    assert {"float32", "float64"} <= node.speeds.keys()
    assert all(speed > 0 for curve in (*node.speeds.values(), node.memory_bandwidth) for _, speed in curve.points)
    assert parse_machine(toml_of(machine)).nodes[0].speeds.keys() == node.speeds.keys()
    assert parse_machine(toml_of(machine)).nodes[0].disk_copy == pytest.approx(node.disk_copy, rel=1e-4) != 8e9


def test_a_device_is_measured_with_its_launches(cuda, monkeypatch):
    small = {"DEVICE_PRODUCTS": (8, 32), "ARRAYS": (1 << 10, 1 << 12), "DEVICE_POOL": 1 << 16, "LAUNCHES": 3}
    for name, value in small.items():
        monkeypatch.setattr(measure, name, value)
    with Mesh() as mesh:
        machine = parse_machine(toml_of(measure.measure_machine(mesh, 0.01, backend=cuda)))
    (node,) = machine.nodes
    assert (machine.device, node.has_devices, node.ranks) == ("cuda", True, 1)
    assert node.memory == pytest.approx(80 << 30, rel=1e-5)
    assert node.launch_seconds > 0 and node.sync_seconds > 0 and {"float32", "float64"} <= node.speeds.keys()


def test_a_plan_for_gpus_counts_launches_unless_passes_are_fitted():
    model, machine = ModelConfig("gpt-nano").build(ParallelConfig()), read_machine("h100").with_ranks(1)
    plain, fitted = ParallelConfig(), machine.with_fitted(pass_seconds=1e-9)
    found = evaluate_step(model, machine, {"data": 1}, plain, 4, 1)
    launches = found.analysis.classes[0].step.launches
    assert launches > 500 and found.seconds > launches * machine.nodes[0].launch_seconds
    other = evaluate_step(model, fitted, {"data": 1}, plain, 4, 1)
    assert other.analysis.classes[0].step.launches == 0 and other.seconds < found.seconds


def test_recorded_steps_are_predicted(capsys, monkeypatch):
    """What was measured on a machine is predicted by what was measured of it, whatever machine this is."""
    step_times = script("step_times", "benchmarks")
    monkeypatch.setattr(step_times, "launched", None)  # nothing is run
    for file in sorted(step_times.RECORDED.glob("*.json")):
        monkeypatch.setattr("sys.argv", ["step_times.py", "--replay", str(file), "--only", "gpt-mini/data=2;mlp"])
        step_times.main()
        said = capsys.readouterr().out
        assert "median error" in said
        assert float(said.partition("median error ")[2].partition("%")[0]) < 10
