from fxpipe.cost.formulas import (
    grouped_mm_flops,
    missing_formulas,
    recurrent_flops,
    stacked_recurrent_flops,
)


def test_groups_multiply_the_work_only_where_every_group_has_its_own_rows():
    assert grouped_mm_flops((32, 16), (4, 16, 24)) == 2 * 32 * 16 * 24
    assert grouped_mm_flops((4, 32, 16), (16, 24)) == 2 * 32 * 16 * 24
    assert grouped_mm_flops((4, 32, 16), (4, 16, 24)) == 4 * 2 * 32 * 16 * 24


def test_a_recurrent_layer_multiplies_by_its_matrices_at_each_step():
    matrices = ((64, 8), (64, 16))
    expected = 2 * 5 * 3 * (64 * 8 + 64 * 16)
    assert recurrent_flops((5, 3, 8), *matrices, (64,), (64,)) == expected
    assert stacked_recurrent_flops((5, 3, 8), [*matrices, (64,), (64,)]) == expected


def test_every_formula_belongs_to_an_operator_of_this_torch():
    assert len(missing_formulas()) >= 4
