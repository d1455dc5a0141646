import pytest
from helpers import plan_of
from hypothesis import given
from oracles.plans import cube, plans

from beam_inference.errors import AlignmentError


@given(plans())
def test_every_patch_of_a_chunk_fits_its_input_and_its_core_is_covered(plan):
    for index in range(plan.chunks.count):
        work = plan.work(index)
        assert work.lattice.domain.contains(work.core_box)
        assert work.patches == work.lattice.touching(work.core_box)
        first, last = (tuple(r[end] for r in work.patches) for end in (0, -1))
        assert work.lattice.patch_box(first).grow(work.crop_margin).start == work.input_box.start
        assert work.lattice.patch_box(last).grow(work.crop_margin).stop == work.input_box.stop
        if plan.strategy != "crop":
            assert work.lattice == plan.lattice


def test_the_domain_is_the_roi_with_its_context_clipped_to_the_volume():
    plan = plan_of(
        cube(2, 40), (8,) * 3, (4,) * 3, (16,) * 3, volume=cube(0, 50), context=(5, 5, 5)
    )
    assert plan.lattice.domain == cube(0, 45)


def test_crop_has_a_lattice_per_chunk_over_its_core_and_margin():
    plan = plan_of(
        cube(0, 64), (8,) * 3, (4,) * 3, (16,) * 3, strategy="crop", chunk_crop_margin=(4, 4, 4)
    )
    middle = plan.work(21)
    assert middle.core_box.start == (16, 16, 16)
    assert middle.lattice.domain == cube(12, 36)
    assert plan.work(0).lattice.domain == cube(0, 20)


def test_an_roi_outside_the_volume_is_refused_naming_the_part_inside():
    with pytest.raises(AlignmentError, match=r"The part inside is \[2, 2, 2 to 20, 20, 20\)"):
        plan_of(cube(2, 30), (4,) * 3, (0,) * 3, (8,) * 3, volume=cube(0, 20))
    with pytest.raises(AlignmentError, match=r"exclusive\). No part of it is inside\.$"):
        plan_of(cube(20, 30), (4,) * 3, (0,) * 3, (8,) * 3, volume=cube(0, 20))
