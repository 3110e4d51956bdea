"""verify names faults that were planted in small engines: the cause, and the line of the user's file."""

from collections import Counter

import pytest

from spmd_engine import Mesh, run_threads
from spmd_engine.engine import SGD
from spmd_engine.errors import UsageError
from spmd_engine.verification import engine_and_reference, fill_zeros, verify
from spmd_engine.verification.reference import batches_of_shape
from support import planted, tiny
from support.pairwise import in_turn


def report_of(make, source, **options):
    _, axes, shape = planted.SOURCES[source]

    def program():
        with Mesh(**axes) as mesh:
            engine, reference = engine_and_reference(make, mesh)
            fill_zeros(engine, reference, seed=3)
            batches = batches_of_shape(engine, reference, shape)
            return verify(engine, reference, batches, steps=1, optimizer=SGD, rate=0.1, **options)

    return run_threads(program, tiny.ranks_of(axes))[0]


def check(fault, folder):
    """verify finds the fault, and says what it is and where."""
    report = report_of(fault.engine(folder), fault.source)
    assert not report.agrees
    findings = report.disagreement.findings if report.disagreement else report.gradients.findings
    assert [finding.cause for finding in findings] == [fault.cause], report.verdict
    assert any(f"(engine.py:{line})" in findings[0].text for line in fault.lines), report.verdict
    assert findings[0].text in report.verdict


KINDS = list(dict.fromkeys(fault.kind for fault in planted.FAULTS))


def ranks_of(fault):
    return tiny.ranks_of(planted.SOURCES[fault.source][1])


#: Of each kind, the last one on the fewest ranks.
FIRST = [min((each for each in reversed(planted.FAULTS) if each.kind == kind), key=ranks_of) for kind in KINDS]


@in_turn(2, source=list(planted.SOURCES))
def test_engines_without_a_fault_agree(source, tmp_path):
    fault = planted.Planted("none", source, None, "import numpy as np\n", "import numpy as np\n")
    assert report_of(fault.engine(tmp_path), source).agrees


@in_turn(2, fault={fault.kind: fault for fault in FIRST})
def test_a_fault_of_each_kind_is_named_with_its_line(fault, tmp_path):
    check(fault, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("fault", planted.FAULTS, ids=str)
def test_every_fault_is_named_with_its_line(fault, tmp_path):
    check(fault, tmp_path)


def test_there_are_two_faults_or_more_of_each_kind():
    assert min(Counter(fault.kind for fault in planted.FAULTS).values()) >= 2


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("transposed, not square", r"gradient of w1 has shape \(6, 8\), the parameter \(8, 6\): it is transposed"),
        ("no gradient", "backward returns no gradient of b1; it returns: w4, b3"),
    ],
)
def test_without_finite_differences_gradients_must_be_there_and_of_their_shapes(kind, message, tmp_path):
    fault = next(fault for fault in planted.FAULTS if fault.kind == kind)
    with pytest.raises(UsageError, match=message):
        report_of(fault.engine(tmp_path), fault.source, finite_differences=False)
